import math

import pytest

from pedigree.stages.verifiers import VerifierError, check, verify
from pedigree.stages.verifiers.choices import decide, true_mass

CHOICES = ["no", "certainly"]
LOGPROBS = [[-1.5], [-1.0, -1.0]]
"""Sums -1.5 and -2.0; per token -1.5 and -1.0; per character -0.75 and -2/9."""


@pytest.mark.parametrize(("normalise", "chosen"), [("none", 0), ("tokens", 1), ("characters", 1)])
def test_the_most_likely_choice_under_each_normalisation(normalise, chosen):
    verdicts = [decide({"name": "choice", "answer": answer, "normalise": normalise}, CHOICES, LOGPROBS) for answer in (0, 1)]
    assert [verdict.score for verdict in verdicts] == [float(chosen == 0), float(chosen == 1)]
    assert {verdict.answer for verdict in verdicts} == {CHOICES[chosen]}


def test_of_equals_the_first_counts():
    assert decide({"name": "choice", "answer": 0}, ["a", "b"], [[-1.0], [-1.0]]).score == 1


def test_mc2_is_the_share_of_the_true_choices_by_hand():
    # P = 1/2, 1/4, 1/4 of the total, the first and the last true
    sums = [[math.log(0.5)], [math.log(0.25)], [math.log(0.125), math.log(2)]]
    assert decide({"name": "mc2", "labels": [1, 0, 1]}, ["a", "b", "c"], sums).score == pytest.approx(0.75)
    assert true_mass([-1000.0, -1001.0], [0, 1]) == pytest.approx(1 / (1 + math.e))  # e^-1000 itself is no float


@pytest.mark.parametrize("logprobs", [[[-1.0], []], [[-1.0], [float("nan")]], [[-math.inf], [-1.0]]])
def test_a_choice_without_a_likelihood_is_an_error(logprobs):
    with pytest.raises(ValueError, match="at least one token"):
        decide({"name": "choice", "answer": 0}, CHOICES, logprobs)


@pytest.mark.parametrize(
    "malformed",
    [
        {"name": "choice", "answer": -1},
        {"name": "choice", "answer": True},
        {"name": "choice", "answer": 0, "normalise": "bytes"},
        {"name": "mc2", "labels": [1, 1]},
        {"name": "mc2", "labels": [0, 2]},
        {"name": "mc2", "labels": [True, False]},
    ],
)
def test_a_malformed_verifier_is_refused(malformed):
    with pytest.raises(VerifierError):
        check(malformed)


def test_it_must_be_of_these_choices_and_of_no_written_answer():
    with pytest.raises(VerifierError, match="2 labels for 3 choices"):
        decide({"name": "mc2", "labels": [1, 0]}, ["a", "b", "c"], [[-1.0]] * 3)
    with pytest.raises(VerifierError, match="answer 2 is no place among 2 choices"):
        decide({"name": "choice", "answer": 2}, CHOICES, LOGPROBS)
    with pytest.raises(VerifierError, match="a written answer has none"):
        verify({"name": "choice", "answer": 0}, "no")
