"""Engines of one model that work side by side, each in a process of its own and asked by a thread of its own."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from stages.sampling.engine_processes import Ahead
from stages.sampling.sampler import Child

N = TypeVar("N")


@contextmanager
def open_engines(settings: dict[str, Any], count: int, ahead: Ahead) -> Iterator[list[Child]]:
    """Engines of equal settings (`stages.sampling.sampler.engine_settings`) for the time of a `with` block."""
    with ExitStack() as opened:
        engines = []
        for _ in range(count):
            engines.append(Child(settings, ahead.take()))
            opened.callback(engines[-1].close)
        yield engines


def side_by_side(engines: Sequence[Child], work: Callable[[int, Child, Callable[[N], None]], None]) -> Generator[N, None, None]:
    """What all engines tell while they work, in the order in which it comes.

    Whoever reads it does all else (files, signs of life) in one thread. When one engine fails, or nobody reads on, all are ended; what
    they had told before is still given when one fails.

    Args:
        engines: who works.
        work: called for each with its number, itself, and whom to tell.

    Raises:
        Exception: what the first that failed has raised.
    """
    news: SimpleQueue[tuple[N] | BaseException | None] = SimpleQueue()

    def ask(number: int, engine: Child) -> None:
        try:
            work(number, engine, lambda told: news.put((told,)))
        except BaseException as error:  # the boundary of the thread: it is raised where the news are read
            news.put(error)
        else:
            news.put(None)

    threads = [Thread(target=ask, args=one, daemon=True, name="engine") for one in enumerate(engines)]
    for thread in threads:
        thread.start()
    at_work = len(threads)
    try:
        while at_work:
            told = news.get()
            if isinstance(told, BaseException):
                _end(engines, threads)
                yield from _told(news)
                raise told
            if told is None:
                at_work -= 1
            else:
                yield told[0]
    finally:  # also where whoever reads fails, or stops
        _end(engines if at_work else (), threads)


def _end(engines: Iterable[Child], threads: Iterable[Thread]) -> None:
    """Threads end with their engines."""
    for engine in engines:
        engine.abandon()
    for thread in threads:
        thread.join()


def _told(news: SimpleQueue[tuple[N] | BaseException | None]) -> Iterator[N]:
    """What has been told and not been read."""
    while not news.empty():
        told = news.get()
        if isinstance(told, tuple):
            yield told[0]
