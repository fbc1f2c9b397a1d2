"""Win rates by hand and against a matrix of probabilities."""

import math
import random

import pytest
import torch

from stages.core.win_rates import win_rates


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
