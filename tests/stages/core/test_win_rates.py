"""Win rates by hand and against a matrix of probabilities."""

import math
import random

import pytest
import torch

from pedigree.stages.judge.win_rates import contests, win_rate_table, win_rates


def test_three_to_one_by_hand():
    # odds 3 : 1 are log 3 logits: ½ against itself, ¾ against the other
    assert win_rates([math.log(3), 0.0], 1.0) == pytest.approx([(0.5 + 0.75) / 2, (0.25 + 0.5) / 2])
    assert win_rates([1.0, 0.0], math.log(3)) == pytest.approx([0.625, 0.375])


def test_verdicts_are_certain_and_equals_draw():
    assert win_rates([1.0, 0.0, 0.0], None) == pytest.approx([(0.5 + 1 + 1) / 3, (0 + 0.5 + 0.5) / 3, 1 / 3])
    assert win_rates([0.3], None) == win_rates([0.3], 2.0) == [0.5]


def test_they_are_the_row_means_of_bradley_terry():
    draw = random.Random(0)
    scores = [draw.gauss(0, 3) for _ in range(7)]
    table = torch.tensor(scores, dtype=torch.float64)
    expected = torch.sigmoid(1.7 * (table[:, None] - table[None])).mean(1)
    assert win_rates(scores, 1.7) == pytest.approx(expected.tolist(), abs=1e-12)
    assert sum(win_rates(scores, 1.7)) == pytest.approx(3.5)  # what one wins another loses
    assert win_rates([1e6, -1e6], 1e3) == [0.75, 0.25]


PROMPTS = [{"a": [1.0, 0.0], "b": [0.0], "c": [1.0]}, {"b": [1.0], "a": [0.0]}, {"a": [3.0], "d": []}]


def test_a_policy_wins_against_another_by_hand():
    # of a's two answers one is better than b's and one equal: (1 + ½) / 2; against c one is equal and one worse: (½ + 0) / 2
    found = contests(PROMPTS[0])
    assert found == {("a", "b"): 0.75, ("b", "a"): 0.25, ("a", "c"): 0.25, ("c", "a"): 0.75, ("b", "c"): 0.0, ("c", "b"): 1.0}
    assert contests(PROMPTS[2]) == {}


def test_prompts_count_alike_and_those_that_one_has_not_answered_not_at_all():
    table = win_rate_table(PROMPTS, ["b", "a", "d", "c"], resamples=200, seed=0)
    found = {(one.policy, one.against): one for one in table}
    assert [(one.policy, one.against) for one in table] == [("b", "a"), ("b", "c"), ("a", "b"), ("a", "c"), ("c", "b"), ("c", "a")]
    assert (found["a", "b"].mean, found["a", "b"].prompts) == ((0.75 + 0.0) / 2, 2) and found["c", "b"].mean == 1.0
    assert (found["a", "b"].low, found["a", "b"].high) == (0.0, 0.75)  # of two prompts both may be drawn twice
    for (one, other), rate in found.items():
        back = found[other, one]
        assert (rate.mean, rate.low, rate.high) == pytest.approx((1 - back.mean, 1 - back.high, 1 - back.low))


def test_an_interval_of_many_prompts_is_that_of_the_mean():
    draw = random.Random(3)
    prompts = [{"a": [float(draw.random() < 0.6)], "b": [0.5]} for _ in range(400)]
    (a, _) = win_rate_table(prompts, ["a", "b"], resamples=500, seed=1)
    half = 1.96 * math.sqrt(a.mean * (1 - a.mean) / 400)
    assert (a.low, a.high) == pytest.approx((a.mean - half, a.mean + half), abs=0.01) and 0.55 < a.mean < 0.65
