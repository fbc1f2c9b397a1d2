"""Expected numbers by hand; the rank correlation against scipy."""

import math
import random

import pytest
from scipy import stats

from pedigree.stages.reward_model import calibration
from pedigree.stages.reward_model.calibration import (
    accuracy_by_margin,
    brier,
    expected_calibration_error,
    log_loss,
    ordered_triples,
    reliability,
    spearman,
)


def logit(p):
    return math.log(p / (1 - p))


def test_bins_ask_the_preferred_answer_whether_it_was_right():
    # Confidences: 0.75 (right), 0.72 (wrong: the worse answer is preferred), 0.92 (right). Ten bins over [½, 1] are 0.05 wide:
    # 0.75 opens the sixth, 0.72 lies in the fifth, 0.92 in the ninth.
    bins = reliability([logit(0.75) + 1e-9, -logit(0.72), logit(0.92)], [1.0, 1.0, 1.0])
    assert [(round(one.low, 2), round(one.high, 2), one.pairs) for one in bins] == [(0.7, 0.75, 1), (0.75, 0.8, 1), (0.9, 0.95, 1)]
    assert [one.accuracy for one in bins] == [0.0, 1.0, 1.0]
    assert [one.confidence for one in bins] == pytest.approx([0.72, 0.75, 0.92])
    # (|0 - 0.72| + |1 - 0.75| + |1 - 0.92|) / 3
    assert expected_calibration_error(bins) == pytest.approx((0.72 + 0.25 + 0.08) / 3)


def test_within_a_bin_errors_cancel():
    # Four pairs at 0.75, three of them right: a perfect bin.
    bins = reliability([logit(0.75) + 1e-9] * 3 + [-logit(0.75) - 1e-9], [1.0] * 4)
    assert len(bins) == 1 and bins[0].accuracy == 0.75 and expected_calibration_error(bins) == pytest.approx(0, abs=1e-6)


def test_full_bins_weigh_more():
    # Three pairs at 0.82, all right: off by 0.18; one at 0.62, wrong: off by 0.62. (3 · 0.18 + 0.62) / 4
    bins = reliability([logit(0.82)] * 3 + [-logit(0.62)], [1.0] * 4)
    assert expected_calibration_error(bins) == pytest.approx((3 * 0.18 + 0.62) / 4)


def test_soft_labels_and_equal_scores():
    # Preferred with 0.9 where the labels say 0.9; the other way round the labels give it 0.1. Equal scores: half right.
    assert [one.accuracy for one in reliability([logit(0.91), 0.0], [0.9, 1.0])] == [0.5, 0.9]
    assert reliability([-logit(0.91)], [0.9])[0].accuracy == pytest.approx(0.1)


def test_certainty_beyond_floats_lies_in_the_last_bin():
    (last,) = reliability([800.0, -800.0], [1.0, 1.0])
    assert (last.low, last.high, last.pairs, last.confidence) == (0.95, 1.0, 2, 1.0)


def test_brier_and_log_loss_by_hand():
    # (0.8 - 1)² = 0.04 and (0.4 - 1)² = 0.36; against a label of 0.8 the first is perfect
    assert brier([logit(0.8), logit(0.4)], [1.0, 1.0]) == pytest.approx(0.2)
    assert brier([logit(0.8)], [0.8]) == pytest.approx(0)
    assert log_loss([logit(0.8), logit(0.4)], [1.0, 1.0]) == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2)
    assert log_loss([logit(0.8)], [0.25]) == pytest.approx(-(0.25 * math.log(0.8) + 0.75 * math.log(0.2)))
    assert log_loss([0.0], [0.3]) == pytest.approx(math.log(2)) and log_loss([-900.0], [1.0]) == 900


def test_quarters_by_margin_never_part_equal_margins():
    # Margins 1 … 8 in quarters of two; right are the pairs from 5 on, and 2.
    gaps = [-1, 1, -1, -1, 1, 1, 1, 1]
    quarters = accuracy_by_margin(gaps, [float(m) for m in range(1, 9)])
    assert [(one.low, one.high, one.pairs, one.accuracy) for one in quarters] == [(1, 2, 2, 0.5), (3, 4, 2, 0), (5, 6, 2, 1), (7, 8, 2, 1)]
    # Quartiles of 1 … 5 are 2, 3 and 4: each closes its quarter.
    assert [one.pairs for one in accuracy_by_margin(gaps[:5], [1.0, 2.0, 3.0, 4.0, 5.0])] == [2, 1, 1, 1]
    (only,) = accuracy_by_margin(gaps, [1.0] * 8)
    assert (only.pairs, only.accuracy) == (8, 5 / 8) and accuracy_by_margin([], []) == []


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_scipys_with_ties(seed):
    draw = random.Random(seed)
    one, other = [[float(draw.randrange(6)) for _ in range(20)] for _ in range(2)]
    assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
    assert list(calibration.ranks(one)) == list(stats.rankdata(one))


def test_a_constant_has_no_rank_correlation():
    assert spearman([1.0, 1.0], [1.0, 2.0]) is None and spearman([1.0], [1.0]) is None


def test_triples_of_a_ranked_list():
    every = [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")]
    # Scores order them a, c, b, d: of abc, abd, acd, bcd the triples without both b and c are in order.
    scores = {("l", "a"): 4.0, ("l", "b"): 2.0, ("l", "c"): 3.0, ("l", "d"): 1.0}
    assert ordered_triples({"l": every}, scores) == (2, 4)
    assert ordered_triples({"l": [("a", "b"), ("b", "c"), ("c", "d")]}, scores) == (0, 2)  # neighbours alone: abc and bcd
    assert ordered_triples({"l": [("a", "d")]}, scores) == (0, 0)
