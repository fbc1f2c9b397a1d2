"""Votes among the answers to a prompt: counted by hand, with ties, answers without a result, and pairs that cannot be compared."""

import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.reward_terms import Majority
from pedigree.stages.rlvr.majority import RULES, Majorities, VotingRule, agreement
from pedigree.stages.verifiers.reward_programs import Answered


def undecided(one: str, other: str) -> bool:
    if "?" in one + other:
        raise PedigreeError("the question decides")
    return one.lower() == other.lower()


WORDS = VotingRule(lambda text: text or None, undecided)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("texts", "rewards"),
    [
        (["a", "B", "b", "c", "b"], [0, 1, 1, 0, 1]),
        (["a", "b", "B", "A"], [1, 0, 0, 1]),  # two each: that of the first answer
        (["", "a", "", "b", ""], [0, 1, 0, 0, 0]),  # no result is no vote, though it is the most frequent
        (["", ""], [0, 0]),
        (["x"], [1]),
    ],
)
def test_votes_by_hand(texts, rewards):
    assert agreement(texts, WORDS) == rewards


@pytest.mark.unit
def test_what_cannot_be_compared_with_the_most_frequent_result_is_unknown_and_no_disagreement():
    right, also, unknown, wrong = agreement(["a", "A", "?", "b"], WORDS)
    assert (right, also, wrong) == (1, 1, 0)
    assert unknown == "? cannot be compared with the most frequent a: the question decides"
    assert agreement(["?", "a", "a"], WORDS)[1:] == [1, 1]  # it has a class of its own


@pytest.mark.unit
@pytest.mark.parametrize(
    ("rule", "texts", "rewards"),
    [
        ("arithmetic", ["It is 42.", "42", "forty-two", "$42", "41 or 42?", "1/2"], [1, 1, 0, 1, 0, 0]),
        ("gsm", ["2 + 2 = 5 #### 4", "4", "#### 5 apples", "#### four"], [1, 1, 0, 0]),
    ],
)
def test_results_are_those_of_the_verifier(rule, texts, rewards):
    assert agreement(texts, RULES[rule]) == rewards


def test_mathematical_results_are_compared_as_the_verifier_compares_them():
    """1/2 has three of six votes in three forms; 50 is not 50 %, which is."""
    texts = [r"So \boxed{\frac{1}{2}}.", "The answer is 0.5", r"$\frac{2}{4}$", r"\boxed{50}", "x" * 1001, r"\boxed{0.51}"]
    row = {"id": "p", "source": "s", "messages": [], "verifier": None}
    votes = Majorities(Majority(type="majority"), lambda: None)
    answers = [Answered(row, text, [1], "stop", None) for text in texts]
    assert votes.values([answers, answers[:1]]) == [[1, 1, 1, 0, 0, 0], [1]]
    votes.close()
