"""Timeouts for single evaluations, e.g. of regular expressions with catastrophic backtracking."""

import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pedigree.configs.base.problems import PedigreeError

SECONDS = 10.0
"""CPU time, so that other load on the machine does not matter. Ordinary patterns match a million characters in less than one second."""
REMEDY = (
    "the pattern probably backtracks: avoid alternatives that match the same text, `[ab]+` instead of `(a|b|ab)+`, or bound repetitions, "
    "`.{0,200}` instead of `.*`"
)

Thing = TypeVar("Thing")
Found = TypeVar("Found")


class _Over(Exception):
    pass


def each(look: Callable[[Thing], Found], things: Iterable[Thing], describe: Callable[[Thing], str]) -> list[Found]:
    """Apply `look` to each thing, in order.

    A timer that ticks every `SECONDS` of CPU time aborts a call that was already running at the previous tick: `re` checks for signals
    while matching. This works in the main thread only; in other threads there is no timeout. `describe` names pattern and thing.

    Raises:
        PedigreeError: one call took more than `SECONDS`.
    """
    if threading.current_thread() is not threading.main_thread():
        return [look(thing) for thing in things]
    found: list[Found] = []
    ticked = -1

    def tick(*_: Any) -> None:
        nonlocal ticked
        if ticked == len(found):
            raise _Over
        ticked = len(found)

    before, thing = signal.signal(signal.SIGVTALRM, tick), None
    try:
        for thing in things:
            if not found:  # obtaining the first thing does not count
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, SECONDS)
            found.append(look(thing))
        return found
    except _Over:
        assert thing is not None
        raise PedigreeError(f"{describe(thing)} takes more than {SECONDS:g} s of CPU time: {REMEDY}") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
