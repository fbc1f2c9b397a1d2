import pytest

from pedigree.stages.verifiers import VerifierError, check, verify

MUST_EQUAL = [
    ("42", "42"),
    ("42", " 42\n"),
    ("42", "The answer is 42."),
    ("42", "17 + 25 = 42"),
    ("42", "17+25=42"),
    ("42", "**42**"),
    ("42", "42.0"),
    ("42", "no, not 41 but 42!"),
    ("42", "042"),
    ("-4", "-4"),
    ("-4", "−4"),  # U+2212
    ("-4", "17 - 21 = -4"),
    ("-4", "(-4)"),
    ("1234", "1,234"),
    ("1,234", "1234"),
    ("1234567", "It is $1,234,567."),
    ("0.5", "0.50"),
    ("7", "x = 7"),
]
MUST_DIFFER = [
    ("5", "25"),
    ("25", "5"),
    ("4", "-4"),
    ("-4", "4"),
    ("4", "8 or 4 or 6"),  # naming many
    ("42", "42, because 17 + 25"),
    ("42", "4 2"),
    ("42", "42.5"),
    ("42", "42nd"),
    ("42", "x42"),
    ("1234", "1,23,4"),
    ("42", ""),
    ("42", "forty-two"),
    ("3", "1.2.3"),
    ("-21", "17-21"),  # an operand, not a sign
    ("-21", "(10 + 7)-21"),
]


@pytest.mark.parametrize(("answer", "text"), MUST_EQUAL)
def test_arithmetic_accepts(answer, text):
    assert verify({"name": "arithmetic", "answer": answer}, text).score == 1.0


@pytest.mark.parametrize(("answer", "text"), MUST_DIFFER)
def test_arithmetic_refuses(answer, text):
    assert verify({"name": "arithmetic", "answer": answer}, text).score == 0.0


GSM = [
    ("17 + 25 = 42\n#### 42", 1.0),
    ("#### 1\nno\n#### 42", 1.0),
    ("#### 42 (from 17 + 25)", 1.0),
    ("it is 42\n####", 0.0),  # the marker without a number
    ("it is 42\n#### 41", 0.0),
    ("so it is 42", 1.0),
    ("#### -42", 0.0),
]


@pytest.mark.parametrize(("text", "score"), GSM)
def test_gsm_reads_after_the_last_marker(text, score):
    assert verify({"name": "gsm", "answer": "42"}, text).score == score


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
