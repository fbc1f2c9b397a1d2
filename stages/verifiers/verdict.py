"""What verifiers give and raise."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from configs.base.problems import PedigreeError


class VerifierError(PedigreeError):
    """A row's verifier is malformed, or cannot say whether an answer is right; the message says which and why."""


class Verdict(NamedTuple):
    """What a verifier found."""

    score: float
    answer: str | None
    """What was read as the answer; None where there is none, or the verifier reads none."""
    reason: str


def exactly(arguments: Mapping[str, Any], names: set[str]) -> None:
    """Raises VerifierError when these are not the fields, no more and no fewer."""
    if set(arguments) != names:
        raise VerifierError(f"{dict(arguments)!r} must have the fields {', '.join(sorted(names))} and no others")
