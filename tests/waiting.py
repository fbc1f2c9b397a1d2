"""Waiting in tests: for events, never for time. A deadline only ends what hangs, so a slow or busy machine moves it out."""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

Found = TypeVar("Found")
FACTOR = "PEDIGREE_TEST_SLOWNESS"
"""Environment variable: how many times slower than a quiet machine this one is; measured once a session and handed down."""
LOOPS, USUAL_S = 400_000, 0.02
"""A loop, and how long it takes on a quiet machine of today."""
POLL_S = 0.02


@cache
def slowness() -> float:
    """At least 1. Measured in wall-clock time, so that other work on the machine counts too."""
    if FACTOR not in os.environ:
        started = time.perf_counter()
        sum(range(LOOPS))
        for _ in range(LOOPS):
            pass
        os.environ[FACTOR] = str(max(1.0, (time.perf_counter() - started) / USUAL_S))
    return float(os.environ[FACTOR])


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
        time.sleep(POLL_S)
    return found
