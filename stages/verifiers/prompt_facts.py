"""Facts about a prompt that reward functions of the project receive, each under its name; they score no answer by themselves.

`facts` {any names}   JSON values
"""

from collections.abc import Mapping
from typing import Any

from pedigree.stages.verifiers.verdict import Verdict, VerifierError


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if there are none, or one has no identifier as its name."""
    if len(verifier) < 2:
        raise VerifierError("verifier facts has no facts: give it at least one, e.g. answer")
    for name in verifier:
        if not isinstance(name, str) or not name.isidentifier():
            raise VerifierError(f"verifier facts: {name!r:.80} is not an identifier, and cannot be an argument of a function")


def refuse(verifier: Mapping[str, Any], text: str) -> Verdict:
    raise VerifierError(
        "facts score no answer: set `reward: {right: 0, terms: [{type: program, path: ...}]}` in the stage `rlvr`, or `programs` in an "
        "evaluation whose items all have the verifier facts"
    )
