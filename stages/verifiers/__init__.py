"""Verifiers score an answer from 0.0 (wrong) to 1.0 (right), and raise an error if they cannot decide.

`arithmetic`, `gsm`, `gsm8k` {answer}     a number, see `numbers`
`math`, `strict_math` {answer}            a mathematical answer, see `maths`
`minerva_math`, `strict_minerva_math`     the same by the rule of published scores, see `minerva`
`ifeval` {instructions [, mode, score]}   IFEval's 25 checks, see `ifeval`
`constraint` {function, arguments}        the checks of RLVR-IFeval's rows, see `constraints`
`extracted` {answer, patterns}            an answer in the place that the prompt specifies, see `extraction`
`exact_match` {answer [, ignore_...]}     the whole reply, see `short_answers`
`mentions`, `drop` {answers}              short answers of PopQA and DROP, see `short_answers`
`python` {before, tests, entry | examples}   a program that passes tests in a sandbox, see `programs`
`choice`, `mc2` {answer | labels}         the likelihood of given choices, see `choices`
`facts` {...}                             no score: values for reward functions of the project, see `facts`
`several` {verifiers [, score]}           all of them; with `score: share` the mean of their scores

All but `facts` may also have `hints`, texts from weak to strong, which only the stage `rlvr` reads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pedigree.configs.base.mistakes import not_one_of
from pedigree.stages.verifiers import (
    choices,
    constraints,
    extraction,
    ifeval,
    maths,
    minerva,
    numbers,
    programs,
    prompt_facts,
    sandbox,
    short_answers,
)
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

__all__ = ["Outcome", "Verdict", "VerifierError", "Verifying", "check", "ended", "names", "verify", "verify_each", "version"]

Fields = Mapping[str, Any]
T = TypeVar("T")
AHEAD = 4 * sandbox.AT_ONCE
"""Answers that are read before the first of them is scored."""
BEAT_SECONDS = 1.0
Outcome = Verdict | VerifierError | None
"""A verdict, an error if the verifier cannot decide, or None without a verifier."""


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


class Verifying:
    """Scores answers in background threads as they arrive. A context manager that cancels pending work at its end.

    Threads suffice: programs and algebra run in processes of their own, and other verifiers take less time than sampling an answer. A
    verdict depends on verifier and answer only, not on the order of arrival.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(sandbox.AT_ONCE, "verifiers")

    def __enter__(self) -> "Verifying":
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, verifier: Fields | None, text: str) -> "Future[Outcome]":
        """Queue an answer."""
        return self._threads.submit(_outcome, verifier, text)


def verify_each(asked: Iterable[tuple[Fields | None, str]], beat: Callable[[], None] = lambda: None) -> Iterator[Outcome]:
    """Score (verifier, answer) in order, programs in parallel. `beat` is called while waiting."""
    with Verifying() as verifying:
        begun: deque[Callable[[], Outcome]] = deque()
        for verifier, text in asked:
            if verifier is not None and "python" in names(verifier):
                begun.append(partial(ended, verifying.begin(verifier, text), beat))
            else:
                begun.append(partial(_outcome, verifier, text))
            if len(begun) > AHEAD:
                yield begun.popleft()()
        for one in begun:
            yield one()


def _outcome(verifier: Fields | None, text: str) -> Outcome:
    try:
        return None if verifier is None else verify(verifier, text)
    except VerifierError as error:
        return error


def ended(future: "Future[T]", beat: Callable[[], None]) -> T:
    """Wait for a result; `beat` is called meanwhile."""
    while not wait([future], timeout=BEAT_SECONDS).done:
        beat()
    return future.result()


def names(verifier: Fields) -> set[str]:
    """The names of a verifier and of those that it consists of."""
    return {verifier["name"]}.union(*map(names, verifier.get("verifiers", ())))


def check(verifier: Any) -> None:
    """Raise VerifierError for an invalid verifier: an unknown name, a missing or unknown argument, a value out of bounds."""
    name = verifier.get("name") if isinstance(verifier, Mapping) else None
    if not isinstance(name, str):
        raise VerifierError(f"verifier {verifier!r:.80} must have a name: {', '.join(sorted(_VERIFIERS))}")
    if name not in _VERIFIERS:
        raise VerifierError(f"verifier {not_one_of(name, sorted(_VERIFIERS))}")
    if name != "facts":
        verifier = {**verifier}
        hints = verifier.pop("hints", [])
        if not isinstance(hints, list) or not all(isinstance(hint, str) and hint.strip() for hint in hints):
            raise VerifierError(f"verifier {name}: hints {hints!r:.80} must be a list of texts, from the weakest to the strongest")
    _VERIFIERS[name].check(verifier)


def version(name: str) -> int:
    """Version of a verifier; equal versions score answers alike."""
    return _VERIFIERS[name].version


def _check_several(verifier: Fields) -> None:
    exactly(verifier, {"name", "verifiers"}, {"score"})
    given = verifier["verifiers"]
    if not isinstance(given, (list, tuple)) or not given:
        raise VerifierError(f"verifier several has no verifiers: {given!r:.80} must be a list of at least one")
    if verifier.get("score", "all") not in ("all", "share"):
        raise VerifierError(f"verifier several: score {verifier['score']!r:.80} must be all or share")
    for one in given:
        check(one)
        if one["name"] in ("several", "choice", "mc2", "facts"):
            raise VerifierError(f"verifier several cannot contain {one['name']}: list verifiers of texts")


def _several(verifier: Fields, text: str) -> Verdict:
    found = [verify(one, text) for one in verifier["verifiers"]]
    scores = [one.score for one in found]
    reasons = [f"{own['name']}: {one.reason}" for own, one in zip(verifier["verifiers"], found, strict=True) if one.score < 1]
    score = sum(scores) / len(scores) if verifier.get("score") == "share" else float(min(scores) == 1)
    return Verdict(score, next((one.answer for one in found if one.answer is not None), None), "; ".join(reasons) or "right")


_VERIFIERS = {
    "arithmetic": _Verifier(numbers.check, numbers.arithmetic, version=3),
    "gsm": _Verifier(numbers.check, numbers.gsm, version=3),
    "gsm8k": _Verifier(numbers.check, numbers.gsm8k),
    "math": _Verifier(maths.check, maths.flexible, version=4),
    "strict_math": _Verifier(maths.check, maths.strict, version=5),
    "minerva_math": _Verifier(maths.check, minerva.flexible),
    "strict_minerva_math": _Verifier(maths.check, minerva.strict),
    "ifeval": _Verifier(ifeval.check, ifeval.verify, version=2),
    "constraint": _Verifier(constraints.check, constraints.verify, version=4),
    "extracted": _Verifier(extraction.check, extraction.verify, version=4),
    "exact_match": _Verifier(short_answers.check_exact, short_answers.exact_match, version=2),
    "mentions": _Verifier(short_answers.check_mentions, short_answers.mentions),
    "drop": _Verifier(short_answers.check_drop, short_answers.drop),
    "python": _Verifier(programs.check, programs.verify, version=5),
    "facts": _Verifier(prompt_facts.check, prompt_facts.refuse),
    "several": _Verifier(_check_several, _several),
    "choice": _Verifier(choices.check, choices.refuse),
    "mc2": _Verifier(choices.check, choices.refuse),
}
