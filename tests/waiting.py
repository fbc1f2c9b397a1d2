"""Waiting in tests: for events, never for time. A deadline only ends what hangs, so a slow or busy machine moves it out."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")
FACTOR = "PEDIGREE_TEST_SLOWNESS"
"""Environment variable: how many times slower than a quiet machine this one is; measured once a session and handed down."""
LOOPS, USUAL_S, TRIES = 400_000, 0.02, 9
"""A loop, how long it takes on a quiet machine of today, and how often it is tried: the median counts."""
POLL_S = 0.02


@cache
def slowness(workers: int = 1) -> float:
    """At least 1. Measured in wall-clock time, so that other work on the machine counts too; `workers` run tests side by side, each with
    processes of its own."""
    if FACTOR not in os.environ:
        crowd = 2 * workers / len(os.sched_getaffinity(0)) if workers > 1 else 1.0
        os.environ[FACTOR] = str(max(1.0, crowd) * max(1.0, statistics.median(_loop() for _ in range(TRIES)) / USUAL_S))
    return float(os.environ[FACTOR])


def _loop() -> float:
    started = time.perf_counter()
    sum(range(LOOPS))
    for _ in range(LOOPS):
        pass
    return time.perf_counter() - started


def deadline(seconds: float) -> float:
    """A time-out for what takes much less than `seconds` on a quiet machine."""
    return seconds * slowness()


def until(condition: Callable[[], Found], seconds: float = 60.0, *, alive: Callable[[], object] = lambda: True) -> Found:
    """Waits for something true, and returns it.

    Args:
        condition: looked at again and again.
        seconds: as for `deadline`.
        alive: whether it can still come true, e.g. because a process lives.
    """
    end = time.monotonic() + deadline(seconds)
    while not (found := condition()):
        assert alive() or condition(), "it ended before the condition was met"
        assert time.monotonic() < end, f"the condition was not met within {deadline(seconds):.0f} s"
        time.sleep(POLL_S)  # between two looks
    return found


class InThread(Generic[Found]):
    """A function at work in a thread. What it raises is raised in whoever asks after it: a thread of its own would lose it."""

    def __init__(self, function: Callable[..., Found], *given: Any) -> None:
        self._end = Future[Found]()
        threading.Thread(target=self._work, args=(function, *given), daemon=True).start()

    def _work(self, function: Callable[..., Found], *given: Any) -> None:
        try:
            self._end.set_result(function(*given))
        except BaseException as error:
            self._end.set_exception(error)

    def alive(self) -> bool:
        """For `until`."""
        if not self._end.done():
            return True
        self._end.result()
        return False

    def join(self, seconds: float = 120.0) -> Found:
        """What the function returns; `seconds` as for `deadline`."""
        return self._end.result(deadline(seconds))
