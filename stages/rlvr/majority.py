"""Rewards by majority vote: agreement with the most frequent result among the answers to a prompt (TTRL, arXiv 2504.16084, §2)."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, NamedTuple

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.reward_terms import Majority
from pedigree.stages.verifiers import BEAT_SECONDS, maths, numbers, sandbox
from pedigree.stages.verifiers.reward_programs import Answered, Value


class VotingRule(NamedTuple):
    """What a verifier takes for an answer's result, and when two are equal."""

    result: Callable[[str], Hashable | None]
    """None if the answer has none."""
    equal: Callable[[Any, Any], bool]
    """Raises PedigreeError if that is undecided."""


def _expression(text: str) -> str | None:
    return text.strip() if len(text) <= maths.LONGEST and text.strip() else None  # longer ones are prose


def _number(found: tuple[str, Any] | None) -> Any:
    return None if found is None else found[1]


RULES = {
    "math": VotingRule(lambda text: _expression(maths.candidates(text)[0]), maths.equal),
    "strict_math": VotingRule(lambda text: _expression(maths.in_minervas_place(text) or text), maths.equal),
    "arithmetic": VotingRule(lambda text: _number(numbers.read(text)), lambda one, other: one == other),
    "gsm": VotingRule(lambda text: _number(numbers.in_gsms_place(text)), lambda one, other: one == other),
}


def agreement(texts: Sequence[str], rule: VotingRule) -> list[Value]:
    """1 for each answer whose result is the most frequent one, 0 for each with another or none, and the cause where that is undecided."""
    results = [rule.result(text) for text in texts]

    @cache
    def compared(later: Any, earlier: Any) -> bool | str:
        try:
            return rule.equal(later, earlier)
        except PedigreeError as error:
            return f"{later!s:.80} cannot be compared with the most frequent {earlier!s:.80}: {error}"

    alike: list[list[int]] = []
    """Places of equal results, in the order of the first."""
    for place, result in enumerate(results):
        if result is not None:
            own = next((places for places in alike if compared(result, results[places[0]]) is True), None)
            alike.append([place]) if own is None else own.append(place)
    values: list[Value] = [0.0] * len(texts)
    best = max(alike, key=len, default=[])
    for places in alike:
        first, second = sorted((places[0], best[0]))
        undecided = compared(results[second], results[first]) if first != second else True
        for place in places:
            values[place] = undecided if isinstance(undecided, str) else float(places is best)
    return values


class Majorities:
    """A term's rewards. `beat` is called while comparisons, each with a time limit, take their time."""

    def __init__(self, term: Majority, beat: Callable[[], None]) -> None:
        self._rule, self._beat = RULES[term.compared_by], beat
        self._threads = ThreadPoolExecutor(sandbox.AT_ONCE, "votes")

    def values(self, groups: Sequence[Sequence[Answered]]) -> list[list[Value]]:
        found = [self._threads.submit(agreement, [answer.text for answer in group], self._rule) for group in groups]
        while wait(found, timeout=BEAT_SECONDS).not_done:
            self._beat()
        return [future.result() for future in found]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
