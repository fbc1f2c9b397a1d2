import math
import random

import numpy as np
import pytest
from scipy.stats import binomtest

from pedigree.stages.core.statistics import bootstrap_average, paired_difference, wilson


def test_pairing_removes_the_difficulty_of_the_items():
    draw = random.Random(2)
    easy = [draw.random() for _ in range(300)]
    better = [score + 0.05 for score in easy]
    gain = paired_difference(better, easy, resamples=500, seed=0)
    assert gain.low == pytest.approx(0.05) and gain.high == pytest.approx(0.05)


@pytest.mark.parametrize("scores", [[], [1.0, float("nan")]])
def test_nothing_to_average_is_an_error(scores):
    with pytest.raises(ValueError):
        bootstrap_average(scores, resamples=100, seed=0)


def test_unpaired_scores_are_an_error():
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 0.0], resamples=100, seed=0)


@pytest.mark.parametrize(("right", "trials"), [(0, 1), (10, 10), (9, 14), (300, 1000)])
def test_the_interval_of_a_proportion_is_scipys(right, trials):
    expected = binomtest(right, trials).proportion_ci(0.95, method="wilson")
    assert wilson(right / trials, trials) == pytest.approx((right / trials, expected.low, expected.high))


@pytest.mark.parametrize("trials", [1, 5, 6, 105, 10**6])
def test_none_and_all_of_the_trials_are_ends_without_rounding(trials):
    assert wilson(0.0, trials).low == 0.0 and wilson(1.0, trials).high == 1.0


@pytest.mark.parametrize(("share", "trials"), [(0.5, 0), (1.2, 5), (float("nan"), 5)])
def test_a_proportion_of_nothing_is_an_error(share, trials):
    with pytest.raises(ValueError, match="at least one trial"):
        wilson(share, trials)


def test_one_group_of_equal_weights_is_the_mean_over_items_bit_for_bit():
    draw = random.Random(5)
    scores = np.array([draw.random() for _ in range(40)])
    generator = np.random.default_rng([3, 40])
    means = [scores[generator.integers(0, 40, 40)].mean() for _ in range(200)]
    expected = (scores.mean(), *np.quantile(means, [0.025, 0.975]))
    assert bootstrap_average(scores.tolist(), resamples=200, seed=3) == pytest.approx(expected, abs=0)


def test_macro_counts_groups_and_micro_items():
    scores, groups = [1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"]
    assert bootstrap_average(scores, groups=groups, resamples=100, seed=0).mean == 0.5  # (3/3 + 0/1) / 2
    assert bootstrap_average(scores, resamples=100, seed=0).mean == 0.75  # 3 of 4


def test_weights_make_the_share_of_all_instructions():
    # 1 of 1 instruction and 1 of 3: 2 of 4 in all, where the mean of shares would be 2/3
    assert bootstrap_average([1.0, 1 / 3], weights=[1, 3], resamples=100, seed=0).mean == pytest.approx(0.5)


def test_items_are_resampled_within_their_groups():
    """Two groups that differ and do not vary: an interval of no width, which resampling over all items would not give."""
    interval = bootstrap_average([1.0] * 5 + [0.0] * 5, groups=["a"] * 5 + ["b"] * 5, resamples=300, seed=0)
    assert interval == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "more", [{"groups": ["a"]}, {"weights": [1.0]}, {"weights": [1.0, 0.0]}, {"weights": [1.0, -1.0]}, {"weights": [1.0, float("nan")]}]
)
def test_groups_and_weights_fit_the_scores(more):
    with pytest.raises(ValueError):
        bootstrap_average([0.0, 1.0], resamples=100, seed=0, **more)


def test_the_macro_interval_agrees_with_the_normal_one():
    # groups of 400 and 100 with p = 0.5: variance of the macro average (0.25/400 + 0.25/100) / 4
    scores = [float(place % 2) for place in range(500)]
    groups = ["large"] * 400 + ["small"] * 100
    half = 1.96 * math.sqrt((0.25 / 400 + 0.25 / 100) / 4)
    interval = bootstrap_average(scores, groups=groups, resamples=4000, seed=1)
    assert interval.high - interval.mean == pytest.approx(half, rel=0.08)
