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


def test_bradley_terry_of_a_pair_read_backwards_is_the_same():
    forth, _ = loss_of(2.0, 0.5, margin=0.7, strength=0.8, centering=0.1)
    back, _ = loss_of(0.5, 2.0, margin=-0.7, strength=0.2, centering=0.1)
    assert forth.item() == pytest.approx(back.item(), abs=1e-6)


def test_bradley_terry_is_at_rest_where_the_scores_say_what_the_labels_say():
    # d/ds_w = σ(z) - p: zero at z = logit p, which is s_w - s_l = m + logit p
    strength, margin = 0.8, 0.5
    chosen = torch.tensor([margin + math.log(strength / (1 - strength))], requires_grad=True)
    loss, _ = bradley_terry(chosen, torch.zeros(1), torch.tensor([margin]), torch.tensor([strength]), 0.0)
    loss.backward()
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12, [1, 2, 3, 6]])
def test_no_cut_into_pieces_changes_the_bradley_terry_gradient(sizes):
    draw = torch.Generator().manual_seed(0)
    features, weights = torch.randn(2, 12, 5, generator=draw), torch.randn(5, generator=draw)
    labels = torch.rand(2, 12, generator=draw)

    def gradient(places):
        head = weights.clone().requires_grad_()
        for some in places:
            chosen, rejected = features[0, some] @ head, features[1, some] @ head
            (bradley_terry(chosen, rejected, labels[0, some], labels[1, some], 0.01)[0] / 12).backward()
        return head.grad

    cut = torch.arange(12).split(sizes)
    assert torch.allclose(gradient(cut), gradient([torch.arange(12)]), atol=1e-6)
