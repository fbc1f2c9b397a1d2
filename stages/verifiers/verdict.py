"""Results and errors of verifiers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pedigree.configs.base.problems import PedigreeError


class VerifierError(PedigreeError):
    """A row's verifier is malformed, or cannot decide whether an answer is right; the message says which and why."""


class Verdict(NamedTuple):
    """A verifier's result."""

    score: float
    answer: str | None
    """The extracted answer; None if there is none, or if the verifier does not extract one."""
    reason: str


def exactly(arguments: Mapping[str, Any], names: set[str]) -> None:
    """Raise VerifierError unless the fields are exactly `names`."""
    if set(arguments) != names:
        raise VerifierError(f"{dict(arguments)!r} must have the fields {', '.join(sorted(names))} and no others")
