"""Programs that score an answer: from 0.0, wrong, to 1.0, right, and an error where they cannot say.

`arithmetic`, `gsm`, `gsm8k` {answer}     a number, see `numbers`
`math`, `strict_math` {answer}            a mathematical expression, see `maths`
`ifeval` {instructions [, mode, score]}   IFEval's 25 checks, see `ifeval`
`constraint` {function, arguments}        the checks of RLVR-IFeval's rows, see `constraints`
`extracted` {answer, patterns}            what stands where the prompt asks for the answer, see `extraction`
`mentions`, `drop` {answers}              short answers of PopQA and DROP, see `short_answers`
`python` {before, tests, entry}           a program that passes tests in a sandbox, see `programs`
`choice`, `mc2` {answer | labels}         the likelihood of given choices, see `choices`
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stages.verifiers import choices, constraints, extraction, ifeval, maths, numbers, programs, short_answers
from stages.verifiers.verdict import Verdict, VerifierError

__all__ = ["Verdict", "VerifierError", "check", "verify", "version"]

Fields = Mapping[str, Any]


class _Verifier(NamedTuple):
    check: Callable[[Fields], None]
    verify: Callable[[Fields, str], Verdict]
    version: int = 1
    """Raise it where an answer may now get another score: it is part of every task's hash."""


def verify(verifier: Fields, text: str) -> Verdict:
    """Scores an answer.

    Raises:
        VerifierError: the verifier is malformed, or cannot say whether the answer is right.
    """
    check(verifier)
    return _VERIFIERS[verifier["name"]].verify(verifier, text)


def check(verifier: Any) -> None:
    """Raises VerifierError when this is no verifier: an unknown name, a missing or unknown argument, a value out of bounds."""
    name = verifier.get("name") if isinstance(verifier, Mapping) else None
    if not isinstance(name, str) or name not in _VERIFIERS:
        raise VerifierError(f"verifier {verifier!r} has none of the names {', '.join(sorted(_VERIFIERS))}")
    _VERIFIERS[name].check(verifier)


def version(name: str) -> int:
    """Of a verifier: answers are scored alike by equal versions."""
    return _VERIFIERS[name].version


_VERIFIERS = {
    "arithmetic": _Verifier(numbers.check, numbers.arithmetic),
    "gsm": _Verifier(numbers.check, numbers.gsm),
    "gsm8k": _Verifier(numbers.check, numbers.gsm8k),
    "math": _Verifier(maths.check, maths.flexible),
    "strict_math": _Verifier(maths.check, maths.strict, version=2),
    "ifeval": _Verifier(ifeval.check, ifeval.verify),
    "constraint": _Verifier(constraints.check, constraints.verify, version=2),
    "extracted": _Verifier(extraction.check, extraction.verify),
    "mentions": _Verifier(short_answers.check_mentions, short_answers.mentions),
    "drop": _Verifier(short_answers.check_drop, short_answers.drop),
    "python": _Verifier(programs.check, programs.verify, version=2),
    "choice": _Verifier(choices.check, choices.refuse),
    "mc2": _Verifier(choices.check, choices.refuse),
}
