"""Results and errors of verifiers."""

from collections.abc import Collection, Mapping
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


def exactly(arguments: Mapping[str, Any], names: Collection[str], optional: Collection[str] = ()) -> None:
    """Raise VerifierError unless the fields are `names` and any of `optional`."""
    if not set(names) <= set(arguments) <= {*names, *optional}:
        may = f", may have {', '.join(sorted(optional))}" if optional else ""
        raise VerifierError(f"{dict(arguments)!r} must have the fields {', '.join(sorted(names))}{may} and no others")
