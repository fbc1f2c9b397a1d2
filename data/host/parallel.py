"""Work on batches in processes that share what this one holds, with the results in order."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from data.host.process import die_with

Batch = TypeVar("Batch")
Result = TypeVar("Result")

AHEAD = 2
"""Batches per worker that are under way or wait to be fetched: so memory is bounded by them."""

_work: Callable[[Any], Any]


def mapped(work: Callable[[Batch], Result], batches: Iterable[Batch], workers: int) -> Iterator[Result]:
    """What `work` makes of each batch, in their order; in this process where there is one worker.

    Args:
        work: sees all that is in memory when the first result is asked for, as it was then; only batches and results are sent.
        workers: processes, which end with this one, however it ends.
    """
    if workers == 1:
        yield from map(work, batches)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(work, os.getpid())) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_do, batch))
                if len(waiting) == AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    die_with(parent)
    for polite in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # for the job to answer, which may have a whole group of processes asked
        signal.signal(polite, signal.SIG_IGN)
    _work = work


def _do(batch: Any) -> Any:
    return _work(batch)
