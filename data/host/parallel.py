"""Ordered parallel map over batches in forked processes, which share this process's memory."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from pedigree.data.host.process import die_with

Batch = TypeVar("Batch")
Result = TypeVar("Result")

AHEAD = 2
"""Batches per worker that are in progress or finished but not consumed; bounds memory."""

_work: Callable[[Any], Any]


def mapped(work: Callable[[Batch], Result], batches: Iterable[Batch], workers: int) -> Iterator[Result]:
    """Apply `work` to each batch, in order; in this process if there is one worker.

    `work` sees this process's memory as of the first result; only batches and results are transferred. Workers end with this process, even
    if it is killed.
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
    for polite in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # handled by the job; they may be sent to the whole process group
        signal.signal(polite, signal.SIG_IGN)
    _work = work


def _do(batch: Any) -> Any:
    return _work(batch)
