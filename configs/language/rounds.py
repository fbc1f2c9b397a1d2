"""Groups of rounds: a template unrolled once per round, and the resolution of stage names within it.

Inside a group's `in`, with the current round r:

    pair                the stage of round r
    previous            the group's last stage of round r - 1; in round 1 the stage named by `first`
    dpo@$round-2        the stage of round r - 2
    dpo@1               the stage of round 1
    pair@all            the stages of rounds 1 to r, as a list
    pair@$round-2..$round-1     the stages of a range of rounds, as a list; rounds before the first are omitted

The group's last stage has fallbacks: a single round before the first resolves to `first`, and a numbered round that is not finished yet
resolves to `previous`. So `reference: dpo@1` is `first` in round 1 and dpo_1 afterwards.
"""

import re
from dataclasses import dataclass
from typing import Any

from pedigree.configs.base.document import Place, Problem, YamlDocument

NAME = re.compile(r"[a-z][a-z0-9_]*")
ROUND = re.compile(r"(?P<number>[0-9]+)|\$round(?:-(?P<back>[0-9]+))?")
FORMS = "all, a number, $round-K, or a range of those with `..` between"


class RoundError(ValueError):
    """A name that resolves to no round; the message states the remedy."""


@dataclass(frozen=True)
class Round:
    """One round of a group."""

    index: int
    last: int
    """Number of rounds in the group."""
    stages: tuple[str, ...]
    first: str

    @property
    def previous(self) -> str:
        return f"{self.stages[-1]}_{self.index - 1}" if self.index > 1 else self.first

    def resolve(self, reference: str) -> str | list[str]:
        """The stage, or stages, that a name refers to in this round.

        Raises:
            RoundError: the name contains `@` but refers to no round up to this one.
        """
        name, at, wanted = reference.partition("@")
        if not at:
            return self.previous if name == "previous" else f"{name}_{self.index}" if name in self.stages else reference
        if name not in self.stages:
            raise RoundError(f"{reference!r}: {name} is not a stage of this group, which has {', '.join(self.stages)}")
        begin, dots, end = ("1", "..", "$round") if wanted == "all" else wanted.partition("..")
        if dots:
            return [
                self._stage(reference, name, number)
                for number in range(max(1, self._number(reference, begin)), self._number(reference, end) + 1)
            ]
        number, is_last = self._number(reference, begin), name == self.stages[-1]
        if is_last and (number < 1 or (begin.isdigit() and self.index <= number <= self.last)):
            return self.first if number < 1 else self.previous
        return self._stage(reference, name, number)

    def _number(self, reference: str, text: str) -> int:
        found = ROUND.fullmatch(text)
        if found is None:
            raise RoundError(f"{reference!r}: {text!r} is not a round; after @ write {FORMS}")
        return int(found["number"]) if found["number"] else self.index - int(found["back"] or 0)

    def _stage(self, reference: str, name: str, number: int) -> str:
        if number < 1:
            raise RoundError(
                f"{reference!r} in round {self.index} is round {number}, which does not exist: only {self.stages[-1]}, the last stage of "
                f"the group, has a fallback before round 1; a range such as {name}@all omits such rounds"
            )
        if number > self.index:
            beyond = f"of {self.last}" if number > self.last else "which is later"
            raise RoundError(f"{reference!r} in round {self.index} is round {number}, {beyond}: name this round or an earlier one")
        return f"{name}_{number}"


def is_stage(document: YamlDocument, place: Place, body: Any, problems: list[Problem]) -> bool:
    """Whether an entry under `stages` has a valid name and form; problems are collected."""
    name, before = place[-1], len(problems)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problems.append(document.problem(place, f"stage name {name!r} must match {NAME.pattern}"))
    elif not isinstance(body, dict):
        problems.append(document.problem(place, f"stage {name} must be a mapping"))
    return len(problems) == before


def unroll(document: YamlDocument, name: str, body: dict[str, Any], problems: list[Problem]) -> dict[str, tuple[str, Any]]:
    """Stage → (name of its template, its body) for all rounds, in order; empty if the group has problems, which are collected."""
    place: Place = ("stages", name)
    rounds, first, inner = body.get("rounds"), body.get("first"), body.get("stages")
    if set(body) != {"rounds", "first", "stages"} or not isinstance(inner, dict) or not inner:
        problems.append(document.problem(place, f"group {name} must have exactly `rounds`, `first` and `stages`"))
        return {}
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        problems.append(
            document.problem((*place, "rounds"), f"group {name}: rounds is {rounds!r}, but must be a whole number of at least 1")
        )
        return {}
    if not all([is_stage(document, (*place, "stages", stage), template, problems) for stage, template in inner.items()]):
        return {}
    found: dict[str, tuple[str, Any]] = {}
    for index in range(1, rounds + 1):
        now = Round(index, rounds, tuple(inner), str(first))
        for stage, template in inner.items():
            made = _numbered(template, index)
            for port, value in made["in"].items() if isinstance(made.get("in"), dict) else ():
                try:
                    made["in"][port] = _renamed(value, now)
                except RoundError as error:
                    where = (*place, "stages", stage, "in", port)
                    problems.append(document.problem(where, f"stage {stage}_{index}: input {port!r} names {error}"))
            found[f"{stage}_{index}"] = (stage, made)
    return found


def _numbered(value: Any, index: int) -> Any:
    """A copy with `$round` replaced by the round number, and `$round-1` by the one before."""
    if isinstance(value, dict):
        return {key: _numbered(inner, index) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbered(inner, index) for inner in value]
    found = ROUND.fullmatch(value) if isinstance(value, str) and value.startswith("$") else None
    return index - int(found["back"] or 0) if found else value


def _renamed(value: Any, now: Round) -> Any:
    """An input with names resolved for this round; ranges are flattened into the enclosing list."""
    if isinstance(value, dict):
        named = {label: _renamed(inner, now) for label, inner in value.items()}
        several = next((label for label, inner in named.items() if isinstance(inner, list)), None)
        if several is not None:
            raise RoundError(f"{value[several]!r} under the label {several}, but it means several stages: write a list without labels")
        return named
    if isinstance(value, list):
        found = []
        for inner in value:
            renamed = _renamed(inner, now)
            found += renamed if isinstance(renamed, list) else [renamed]
        return found
    return now.resolve(value) if isinstance(value, str) else value
