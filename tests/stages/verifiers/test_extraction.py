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


@pytest.mark.parametrize(("found", "right"), [("1,072", 1), ("1072.0", 1), ("1073", 0), ("one", 0)])
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
