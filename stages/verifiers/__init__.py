"""Verifiers score an answer from 0.0 (wrong) to 1.0 (right), and raise an error if they cannot decide.

`arithmetic`, `gsm`, `gsm8k` {answer}     a number, see `numbers`
`math`, `strict_math` {answer}            a mathematical expression, see `maths`
`ifeval` {instructions [, mode, score]}   IFEval's 25 checks, see `ifeval`
`constraint` {function, arguments}        the checks of RLVR-IFeval's rows, see `constraints`
`extracted` {answer, patterns}            an answer in the place that the prompt specifies, see `extraction`
`mentions`, `drop` {answers}              short answers of PopQA and DROP, see `short_answers`
`python` {before, tests, entry}           a program that passes tests in a sandbox, see `programs`
`choice`, `mc2` {answer | labels}         the likelihood of given choices, see `choices`
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pedigree.stages.verifiers import choices, constraints, extraction, ifeval, maths, numbers, programs, short_answers
from pedigree.stages.verifiers.verdict import Verdict, VerifierError

__all__ = ["Verdict", "VerifierError", "check", "verify", "version"]

Fields = Mapping[str, Any]


class _Verifier(NamedTuple):
    check: Callable[[Fields], None]
    verify: Callable[[Fields, str], Verdict]
    version: int = 1
    """Increment it if an answer may now get a different score; it is part of every task's hash."""


def verify(verifier: Fields, text: str) -> Verdict:
    """Score an answer.

    Raises:
        VerifierError: the verifier is malformed, or cannot decide.
    """
    check(verifier)
    return _VERIFIERS[verifier["name"]].verify(verifier, text)


def check(verifier: Any) -> None:
    """Raise VerifierError for an invalid verifier: an unknown name, a missing or unknown argument, a value out of bounds."""
    name = verifier.get("name") if isinstance(verifier, Mapping) else None
    if not isinstance(name, str) or name not in _VERIFIERS:
        raise VerifierError(f"verifier {verifier!r} has none of the names {', '.join(sorted(_VERIFIERS))}")
    _VERIFIERS[name].check(verifier)


def version(name: str) -> int:
    """Version of a verifier; equal versions score answers alike."""
    return _VERIFIERS[name].version


_VERIFIERS = {
    "arithmetic": _Verifier(numbers.check, numbers.arithmetic, version=2),
    "gsm": _Verifier(numbers.check, numbers.gsm, version=2),
    "gsm8k": _Verifier(numbers.check, numbers.gsm8k),
    "math": _Verifier(maths.check, maths.flexible),
    "strict_math": _Verifier(maths.check, maths.strict, version=2),
    "ifeval": _Verifier(ifeval.check, ifeval.verify),
    "constraint": _Verifier(constraints.check, constraints.verify, version=2),
    "extracted": _Verifier(extraction.check, extraction.verify, version=2),
    "mentions": _Verifier(short_answers.check_mentions, short_answers.mentions),
    "drop": _Verifier(short_answers.check_drop, short_answers.drop),
    "python": _Verifier(programs.check, programs.verify, version=2),
    "choice": _Verifier(choices.check, choices.refuse),
    "mc2": _Verifier(choices.check, choices.refuse),
}
