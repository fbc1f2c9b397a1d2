import pytest

from pedigree.stages.verifiers import VerifierError, check, verify
from pedigree.stages.verifiers.short_answers import normalised, span_f1


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("politician", 1),
        ("He was a politician.", 1),
        ("Politician", 1),
        ("a Political activist", 1),
        ("political", 0),
        ("painter", 0),
        ("", 0),
    ],
)
def test_mentions(reply, score):
    assert verify({"name": "mentions", "answers": ["politician", "Political activist"]}, reply).score == score


@pytest.mark.parametrize(
    ("text", "words"), [("The 3 Dogs!", "3.0 dogs"), ("a well-known fact", "well known fact"), ("1.50", "1.5"), ("an", "")]
)
def test_normalised(text, words):
    assert normalised(text) == words


@pytest.mark.parametrize(
    ("reply", "spans", "expected"),
    [
        ("John Smith", ["Smith"], 0.67),  # P 1/2, R 1: 2/3
        ("the Smith", ["Smith"], 1.0),
        ("3", ["3"], 1.0),
        ("3 dogs", ["4 dogs"], 0.0),  # another number is another answer
        ("dogs", ["4 dogs"], 0.0),
        ("red", ["red", "blue"], 0.5),  # one of two spans
        ("", ["red"], 0.0),
        ("completely different", ["red"], 0.0),
    ],
)
def test_f1_by_hand(reply, spans, expected):
    assert span_f1(normalised(reply), spans) == expected


def test_the_best_of_several_answers_counts_and_exact_match_asks_for_all():
    answers = [["two"], ["2"]]
    assert verify({"name": "drop", "answers": answers}, " 2").score == 1
    assert verify({"name": "drop", "answers": answers, "score": "exact_match"}, "2").score == 1
    assert verify({"name": "drop", "answers": answers, "score": "exact_match"}, "2 dogs").score == 0
    assert verify({"name": "drop", "answers": [["red", "blue"]], "score": "exact_match"}, "red").score == 0


@pytest.mark.parametrize(
    "malformed",
    [
        {"name": "mentions", "answers": []},
        {"name": "mentions", "answers": [""]},
        {"name": "drop", "answers": ["red"]},
        {"name": "drop", "answers": [["red"]], "score": "bleu"},
    ],
)
def test_a_malformed_verifier_is_refused(malformed):
    with pytest.raises(VerifierError):
        check(malformed)
