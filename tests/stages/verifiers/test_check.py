"""Whatever a row has in a verifier's place: it is a verifier, or a `VerifierError` says what is wrong."""

import subprocess
import sys
import threading
from typing import Any

import pytest
from waiting import deadline

from pedigree.stages.verifiers import _VERIFIERS, Verdict, VerifierError, check, extraction, names, programs, sandbox, verify, verify_each

SOUND: dict[str, dict[str, Any]] = {
    "arithmetic": {"answer": "4"},
    "gsm": {"answer": "4"},
    "gsm8k": {"answer": "4"},
    "math": {"answer": "4"},
    "strict_math": {"answer": "4"},
    "minerva_math": {"answer": "4"},
    "strict_minerva_math": {"answer": "4"},
    "ifeval": {"instructions": [{"id": "length_constraints:number_words", "relation": "at least", "num_words": 3}], "mode": "loose"},
    "constraint": {"function": "validate_word_constraint", "arguments": {"N": 2, "quantifier": "at most"}},
    "extracted": {"answer": "A", "patterns": ["(.)"], "compare": "text"},
    "exact_match": {"answer": ["a"], "ignore_case": True},
    "several": {"verifiers": [{"name": "gsm", "answer": "4"}], "score": "share"},
    "mentions": {"answers": ["a"]},
    "drop": {"answers": [["a"]], "score": "f1"},
    "python": {"before": "", "tests": "f()", "entry": "f", "seconds": 1, "opened": True},
    "facts": {"answer": "4", "level": 3},
    "choice": {"answer": 0, "normalise": "tokens"},
    "mc2": {"labels": [0, 1]},
}
ODD: list[Any] = [None, True, -1, 1.5, "", "x", [], ["a"], [None], [["a"]], [[1], 0], {}, {"id": ["x"]}, [{"id": ["x"]}]]


def changed(value: Any) -> list[Any]:
    """A value with any part of it replaced by each of the odd ones."""
    found = [*ODD]
    if isinstance(value, dict):
        found += [{**value, name: other} for name, inner in value.items() for other in changed(inner)]
    if isinstance(value, list):
        found += [[*value[:place], other, *value[place + 1 :]] for place, inner in enumerate(value) for other in changed(inner)]
    return found


def test_every_verifier_is_here():
    assert set(SOUND) == set(_VERIFIERS)


@pytest.mark.parametrize("name", SOUND)
def test_hints_are_texts_that_change_no_verifier(name):
    sound = {"name": name, **SOUND[name]}
    check(sound | {"hints": ["Count on.", "It is 2 + 2."]})
    for odd in [None, "Count on.", [""], [1], {"a": "b"}]:
        if name == "facts":  # which may mean something else by it
            check(sound | {"hints": odd})
            continue
        with pytest.raises(VerifierError, match=f"verifier {name}: hints .* must be a list of texts, from the weakest to the strongest"):
            check(sound | {"hints": odd})


def test_an_answer_is_scored_alike_whatever_the_hints():
    assert verify({"name": "gsm", "answer": "4", "hints": ["5"]}, "It is 4.") == verify({"name": "gsm", "answer": "4"}, "It is 4.")


@pytest.mark.parametrize("name", SOUND)
def test_odd_values_are_refused_by_name_and_never_crash(name):
    sound = {"name": name, **SOUND[name]}
    check(sound)
    refused = 0
    for verifier in changed(sound):
        try:
            check(verifier)
        except VerifierError as error:
            refused += bool(str(error))
    assert refused >= len(ODD)


EXAMPLES = {"name": "python", "examples": [{"input": "1", "output": "1"}]}
NUMBER, TEXT = {"name": "arithmetic", "answer": "4"}, {"name": "exact_match", "answer": "= 4"}


@pytest.mark.parametrize(("text", "score", "share"), [("= 4", 1, 1), ("4", 0, 0.5), ("= 5", 0, 0), ("5", 0, 0)])
def test_several_verifiers_all_hold_or_each_counts(text, score, share):
    assert verify({"name": "several", "verifiers": [NUMBER, TEXT]}, text).score == score
    assert verify({"name": "several", "verifiers": [NUMBER, TEXT], "score": "share"}, text).score == share


@pytest.mark.integration
def test_a_script_without_a_main_guard_can_score_answers():
    script = "from pedigree.stages.verifiers import verify; print(verify({'name': 'math', 'answer': '2/4'}, '0.5').score)"
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n", done.stderr


def test_facts_score_no_answer():
    with pytest.raises(VerifierError, match=r"facts score no answer: set `reward: \{right: 0"):
        verify({"name": "facts", "answer": "4"}, "4")


def test_several_verifiers_name_those_that_fail():
    assert verify({"name": "several", "verifiers": [NUMBER, TEXT]}, "4").reason == "exact_match: 4 is none of = 4"


@pytest.mark.parametrize(
    ("verifiers", "problem"),
    [
        ([], "at least one"),
        ([{"name": "gsm"}], "must have the fields answer, name"),
        ([{"name": "several", "verifiers": [NUMBER]}], "cannot contain several"),
        ([{"name": "choice", "answer": 0}], "cannot contain choice"),
        ([{"name": "facts", "answer": 0}], "cannot contain facts"),
    ],
)
def test_malformed_parts_of_several_are_refused(verifiers, problem):
    with pytest.raises(VerifierError, match=problem):
        check({"name": "several", "verifiers": verifiers})


def test_if_one_of_several_cannot_decide_the_score_is_unknown(monkeypatch):
    unknown = {"name": "extracted", "answer": "A", "patterns": ["(a|aa)+$"]}
    monkeypatch.setattr(extraction, "extract", lambda *_: (_ for _ in ()).throw(VerifierError("took too long")))
    with pytest.raises(VerifierError, match="took too long"):
        verify({"name": "several", "verifiers": [NUMBER, unknown]}, "4")


def test_the_names_of_several_are_those_of_its_parts():
    """The hash of a task depends on the versions of all of them."""
    assert names({"name": "several", "verifiers": [NUMBER, EXAMPLES]}) == {"several", "arithmetic", "python"}


def test_a_batch_is_scored_in_order_with_programs_in_parallel(monkeypatch):
    """All programs must run at the same time: each waits for the others."""
    together = threading.Barrier(sandbox.AT_ONCE)

    def run(*_):
        together.wait(deadline(20))
        return sandbox.Outcome(True, "right")

    monkeypatch.setattr(programs, "require", lambda: None)
    monkeypatch.setattr(programs, "run", run)
    batch = [(NUMBER, "4"), (None, "x"), ({"name": "nobody"}, "x"), *[(EXAMPLES, "x = 1")] * sandbox.AT_ONCE, (NUMBER, "5")] * 12
    found = list(verify_each(batch))
    kinds = [one.score if isinstance(one, Verdict) else type(one) for one in found]
    assert kinds == [1, type(None), VerifierError, *[1] * sandbox.AT_ONCE, 0] * 12
