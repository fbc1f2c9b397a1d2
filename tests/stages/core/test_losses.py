import math

import pytest
import torch

from pedigree.stages.core.preference_losses import bradley_terry


def loss_of(chosen, rejected, margin=0.0, strength=1.0, centering=0.0):
    return bradley_terry(*(torch.tensor([value]) for value in (chosen, rejected, margin, strength)), centering)


def softplus(x):
    return math.log(1 + math.exp(x))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # s_w - s_l = 1: -log σ(1) = log(1 + e^-1)
        ({}, softplus(-1)),
        # centering 0.1 * (2 + 1)² = 0.9
        ({"centering": 0.1}, softplus(-1) + 0.9),
        # a margin of 3 leaves z = 1 - 3 = -2
        ({"margin": 3.0}, softplus(2)),
        # the labels are sure by 0.7: the other 0.3 pull the other way
        ({"strength": 0.7}, 0.7 * softplus(-1) + 0.3 * softplus(1)),
        ({"strength": 0.7, "margin": 3.0, "centering": 0.01}, 0.7 * softplus(2) + 0.3 * softplus(-2) + 0.09),
    ],
)
def test_bradley_terry_by_hand(given, expected):
    loss, sums = loss_of(2.0, 1.0, **given)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert sums["accuracy"].item() == 1 and sums["margin"].item() == 1  # of the scores, whatever the labels' margin
    assert loss_of(1.0, 1.0)[1]["accuracy"].item() == 0


def test_the_gradient_of_both_scores_is_the_difference_quotient():
    scores = torch.tensor([[2.0, -1.0], [1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    margin, strength = torch.tensor([0.5, 0.0]), torch.tensor([0.8, 1.0])
    torch.autograd.gradcheck(lambda both: bradley_terry(both[0], both[1], margin, strength, 0.1)[0], scores)
