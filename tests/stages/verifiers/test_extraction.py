import pytest

from pedigree.stages.verifiers import VerifierError, check, verify
from pedigree.stages.verifiers.extraction import plain

EXACT = [r"Therefore, the answer is \(([A-D])\)"]
FLEX = [*EXACT, r"(?i)answer is:?\s*\(?([A-D])\b", r"\(([A-D])\)", r"\b([A-D])\b"]


def letter(text: str, patterns: list[str], answer: str = "B") -> tuple[float, str | None]:
    verdict = verify({"name": "extracted", "answer": answer, "patterns": patterns}, text)
    return verdict.score, verdict.answer


@pytest.mark.parametrize(
    ("text", "exact", "flex"),
    [
        ("So. Therefore, the answer is (B)", (1, "B"), (1, "B")),
        ("Therefore, the answer is (A). No: Therefore, the answer is (B)", (1, "B"), (1, "B")),
        ("Therefore, the answer is (A), not (B)", (0, "A"), (0, "A")),
        ("the answer is B.", (0, None), (1, "B")),
        ("I take (B), surely", (0, None), (1, "B")),
        ("B", (0, None), (1, "B")),
        ("Bees and Doves", (0, None), (0, None)),
        ("", (0, None), (0, None)),
    ],
)
def test_the_exact_form_and_the_cascade(text, exact, flex):
    assert letter(text, EXACT) == exact
    assert letter(text, FLEX) == flex


@pytest.mark.parametrize(
    ("one", "other"), [("(A)", "A"), ("True.", "true"), ('"valid"', "Valid"), (" [ ] ", "[ ]"), ("{()}", "()"), ("**No**", "no")]
)
def test_texts_that_are_the_same(one, other):
    assert plain(one) == plain(other)


@pytest.mark.parametrize(("one", "other"), [("A", "B"), ("12", "21"), ("a b", "ab"), ("3.", "3.5")])
def test_texts_that_differ(one, other):
    assert plain(one) != plain(other)


@pytest.mark.parametrize(
    ("found", "answer", "right"),
    [("2*x**2", "2*x**2", 1), ("2x^2", "2*x**2", 1), ("-2/7", "-2/7", 1), ("3, 5", "5, 3", 0), ("x", "2*x", 0)],
)
def test_expressions_are_compared_by_what_they_say(found, answer, right):
    patterns = [r"(?is)final answer is (.*?)\. I hope it is correct\."]
    verifier = {"name": "extracted", "answer": answer, "patterns": patterns, "compare": "expression"}
    assert verify(verifier, f"Therefore, the final answer is {found}. I hope it is correct.").score == right


WHOLE = [
    ("1,072", "1072", 1),  # thousands
    ("-12,000", "-12000", 1),
    ("$52,304$", "52304", 1),
    ("1,073", "1072", 0),
    ("1", "1,072", 0),
    ("1,072, 5", "1072, 5", 1),  # in a list
    ("10,200", "10, 200", 0),  # one number, and two
    ("(1/2, 3)", "(0.5, 3)", 1),  # brackets
    ("(3, 1/2)", "(0.5, 3)", 0),
    ("{2, 1}", "{1, 2}", 1),
    ("x = 1, x = 2", "x = 2, x = 1", 1),
    ("2*(x+1), 3", "(x+1)*2, 3", 1),  # lists in order
    ("3,5", "3, 5", 1),
    ("1, 2", "1, 2, 3", 0),
    ("1/2, Red", "0.5, red", 1),  # with a text
    ("**1/2**", "0.5", 1),  # bold, no power
    ("**1/2**.", "0.5", 1),
    ("**x**2**", "x^2", 1),
]


@pytest.mark.parametrize(("found", "answer", "right"), WHOLE)
def test_expressions_are_read_whole_before_they_are_split_at_commas(found, answer, right):
    verifier = {"name": "extracted", "answer": answer, "patterns": ["answer is (.*)"], "compare": "expression"}
    assert verify(verifier, f"the answer is {found}").score == right


def test_whether_the_order_matters_next_to_brackets_is_unknown():
    verifier = {"name": "extracted", "answer": "(1, 2), 3", "patterns": ["answer is (.*)"], "compare": "expression"}
    with pytest.raises(VerifierError, match="could not be compared with"):
        verify(verifier, "the answer is 3, (1, 2)")


@pytest.mark.parametrize(("found", "right"), [("1,072", 1), ("**1,072**", 1), ("1072.0", 1), ("1073", 0), ("one", 0)])
def test_numbers_are_compared_by_value(found, right):
    verifier = {"name": "extracted", "answer": "1072", "patterns": ["answer is (.*)"], "compare": "number"}
    assert verify(verifier, f"the answer is {found}").score == right


def test_a_pattern_that_takes_for_ever_is_unknown_and_not_wrong(monkeypatch):
    monkeypatch.setattr("pedigree.stages.verifiers.timed_patterns.SEARCH_SECONDS", 0.05)
    with pytest.raises(VerifierError, match="took more than"):
        verify({"name": "extracted", "answer": "B", "patterns": [r"((?:a|aa)+)$"]}, "a" * 60 + "!")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"answer": ""}, "the answer must be a text"),
        ({"patterns": []}, "at least one"),
        ({"patterns": ["("]}, "is no regular expression"),
        ({"patterns": ["A"]}, "has 0 groups"),
        ({"compare": "meaning"}, "is none of text, expression"),
        ({"more": 1}, "must have the fields"),
    ],
)
def test_a_malformed_verifier_is_refused(wrong, problem):
    with pytest.raises(VerifierError, match=problem):
        check({"name": "extracted", "answer": "B", "patterns": ["(B)"], **wrong})
