"""An end to looking at one thing: a regular expression may try all ways to split a text, which takes longer than anybody waits."""

import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from configs.base.problems import PedigreeError

SECONDS = 10.0
"""Of the processor, so that a machine with other work is no reason. Ordinary patterns look at a million characters in less than one."""
REMEDY = (
    "it may match a text in very many ways: write it so that no part of a text can be read by two of its parts, `[ab]+` instead of "
    "`(a|b|ab)+`, or bound what repeats, `.{0,200}` instead of `.*`"
)

Thing = TypeVar("Thing")
Found = TypeVar("Found")


class TooSlow(PedigreeError):
    """One look took longer than anybody waits; it would again."""


class _Over(Exception):
    pass


def each(look: Callable[[Thing], Found], things: Iterable[Thing], told: Callable[[Thing], str]) -> list[Found]:
    """What a look at each thing finds, in their order.

    A clock that ticks every `SECONDS` ends a look that was under way at the tick before. No other thread than the main one can be ended
    so: in others nothing is.

    Args:
        look: may take long inside of `re`, which asks for signals while it matches.
        things: are looked at one after the other.
        told: what is looked for, and in which thing.

    Raises:
        TooSlow: one look took more than `SECONDS`.
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
            if not found:  # what it takes to have the first one is not a look at it
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, SECONDS)
            found.append(look(thing))
        return found
    except _Over:
        assert thing is not None
        raise TooSlow(f"{told(thing)} takes more than {SECONDS:g} s of the processor: {REMEDY}") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
