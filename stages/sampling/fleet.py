"""Parallel engines of one model, each in its own process and driven by its own thread."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from pedigree.stages.sampling.engine_processes import WarmEngines
from pedigree.stages.sampling.sampler import Child

N = TypeVar("N")


@contextmanager
def open_engines(settings: dict[str, Any], count: int, ahead: WarmEngines) -> Iterator[list[Child]]:
    """Open engines with equal settings (`stages.sampling.sampler.engine_settings`) for a `with` block."""
    with ExitStack() as opened:
        engines = []
        for _ in range(count):
            engines.append(Child(settings, ahead.take()))
            opened.callback(engines[-1].close)
        yield engines


def side_by_side(engines: Sequence[Child], work: Callable[[int, Child, Callable[[N], None]], None]) -> Generator[N, None, None]:
    """Yield messages of all engines as they arrive.

    The consumer does everything else (files, heartbeats) in one thread. If an engine fails, or the consumer stops, all engines are ended;
    after a failure, messages already sent are still yielded.

    Args:
        engines: the engines.
        work: called in a thread per engine with its number, the engine, and a function that sends a message.

    Raises:
        Exception: the error of the first engine that failed.
    """
    news: SimpleQueue[tuple[N] | BaseException | None] = SimpleQueue()

    def ask(number: int, engine: Child) -> None:
        try:
            work(number, engine, lambda told: news.put((told,)))
        except BaseException as error:  # the boundary of the thread: raised again in the consumer
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
                yield from _pending(news)
                raise told
            if told is None:
                at_work -= 1
            else:
                yield told[0]
    finally:  # also if the consumer fails or stops
        _end(engines if at_work else (), threads)


def _end(engines: Iterable[Child], threads: Iterable[Thread]) -> None:
    """End the engines, and with them their threads."""
    for engine in engines:
        engine.abandon()
    for thread in threads:
        thread.join()


def _pending(news: SimpleQueue[tuple[N] | BaseException | None]) -> Iterator[N]:
    """Messages that were sent but not read."""
    while not news.empty():
        told = news.get()
        if isinstance(told, tuple):
            yield told[0]
