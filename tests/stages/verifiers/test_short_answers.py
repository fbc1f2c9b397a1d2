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


LOOSE = {"ignore_case": True, "ignore_punctuation": True, "ignore_whitespace": True}
EXACT = [
    ("Paris", "Paris", {}, 1),
    (" Paris\n", "Paris", {}, 1),
    ("paris", "Paris", {}, 0),
    ("Paris.", "Paris", {}, 0),
    ("Paris", ["Lutetia", "Paris"], {}, 1),
    ("Paris or Lyon", ["Paris", "Lyon"], {}, 0),
    ("The capital is Paris", "Paris", LOOSE, 0),
    ("", "Paris", LOOSE, 0),
    ("...", "Paris", LOOSE, 0),
    ("paris", "Paris", {"ignore_case": True}, 1),
    ("STRASSE", "Straße", {"ignore_case": True}, 1),
    ("paris", "Paris", {"ignore_case": False}, 0),
    ("“Paris”!", "Paris", {"ignore_punctuation": True}, 1),
    ("New\n York", "New York", {"ignore_whitespace": True}, 1),
    ("NewYork", "New York", {"ignore_whitespace": True}, 0),
    ("new   york.", "New York", LOOSE, 1),
    ("caf\u0065\u0301", "caf\u00e9", {}, 1),  # é in two ways
    ("35", "3.5", LOOSE, 0),
    ("5", "-5", LOOSE, 0),
    ("5", ".5", LOOSE, 0),
    ("12", "1,2", LOOSE, 0),
    ("1 2", "12", LOOSE, 0),
    ("3.5.", "3.5", LOOSE, 1),
    ("a < b", "a > b", LOOSE, 0),
    ("\ufeffParis\u200b", "Paris", {}, 1),  # invisible characters
    ("50", "50%", LOOSE, 0),
    ("C", "C#", LOOSE, 0),
    ("1", "#1", LOOSE, 1),
    ("3", "–3", LOOSE, 0),
]


@pytest.mark.parametrize(("reply", "answer", "options", "score"), EXACT)
def test_exact_match(reply, answer, options, score):
    assert verify({"name": "exact_match", "answer": answer, **options}, reply).score == score


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
        {"name": "exact_match", "answer": []},
        {"name": "exact_match", "answer": 3},
        {"name": "exact_match", "answer": " "},
        {"name": "exact_match", "answer": ["?"], "ignore_punctuation": True},  # every punctuation mark would be right
        {"name": "exact_match", "answer": "x", "ignore_case": 1},
        {"name": "exact_match", "answer": "x", "ignore_numbers": True},
        {"name": "mentions", "answers": []},
        {"name": "mentions", "answers": [""]},
        {"name": "drop", "answers": ["red"]},
        {"name": "drop", "answers": [["red"]], "score": "bleu"},
    ],
)
def test_a_malformed_verifier_is_refused(malformed):
    with pytest.raises(VerifierError):
        check(malformed)
