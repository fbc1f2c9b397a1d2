import pytest
from number_answers import ARITHMETIC, GSM

from pedigree.stages.verifiers import VerifierError, check, verify
from pedigree.stages.verifiers.numbers import number

TABLE = [("arithmetic", *one) for one in ARITHMETIC] + [("gsm", *one) for one in GSM]


@pytest.mark.parametrize(("name", "text", "answer", "score", "reason"), TABLE)
def test_an_answer_is_scored_as_a_teacher_would(name, text, answer, score, reason):
    assert verify({"name": name, "answer": answer}, text).score == score, reason


@pytest.mark.parametrize("answer", ["42", "-4", "1,234.50", "$29.00", "3/4", "2 1/2", "42%", "1e5", "−4", "42.", "**42**", "$\\boxed{42}$"])
def test_right_answers_are_numbers_in_any_of_these_forms(answer):
    check({"name": "arithmetic", "answer": answer})


@pytest.mark.parametrize("answer", ["", "many", "x2", "3.11.2", "1,2", "42 km", "41 or 42", "1/0", "1e9999", "4" * 401])
def test_a_right_answer_that_is_no_number_is_refused(answer):
    assert number(answer) is None
    with pytest.raises(VerifierError, match="must be a number"):
        check({"name": "gsm", "answer": answer})


OPEN_INSTRUCT = [
    ("so 1,234 in all", "1234", 1.0),
    ("it is -4.", "-4", 1.0),
    ("x=0.5", "0.5", 1.0),
    ("it costs 1234", "1,234", 1.0),
    ("3 or 4", "3", 0.0),  # the last one counts
    ("42.0", "42", 0.0),  # texts are compared, not numbers
    ("17-21", "-21", 1.0),  # it takes the operator for a sign
    ("none", "0", 0.0),
]


@pytest.mark.parametrize(("text", "answer", "score"), OPEN_INSTRUCT)
def test_gsm8k_is_open_instructs_rule(text, answer, score):
    assert verify({"name": "gsm8k", "answer": answer}, text).score == score


MALFORMED = [
    None,
    {},
    {"name": "unknown"},
    {"name": "arithmetic"},
    {"name": "arithmetic", "answer": 42},
    {"name": "arithmetic", "answer": "many"},
    {"name": "arithmetic", "answer": "42", "tolerance": 1},
]


@pytest.mark.parametrize("verifier", MALFORMED)
def test_a_malformed_verifier_is_an_error_and_not_a_zero(verifier):
    with pytest.raises(VerifierError):
        check(verifier)
