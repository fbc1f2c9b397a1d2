import math

import pytest
import torch

from stages.core import losses
from stages.core.policy_gradient import clipped_policy_loss, group_advantages, kl_k3


def test_sft_is_minus_the_sum():
    assert losses.sft(torch.tensor([-1.0, -0.5, -0.25])).item() == 1.75


def test_bradley_terry_by_hand():
    # margin 2 - 1 = 1: -log σ(1) = log(1 + e^-1) = 0.313262; centering 0.1 * (2 + 1)² = 0.9
    loss, sums = losses.bradley_terry(torch.tensor([2.0]), torch.tensor([1.0]), centering=0.1)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)) + 0.9, abs=1e-6)
    assert sums["accuracy"].item() == 1 and sums["margin"].item() == 1


def test_equal_scores_are_no_success():
    _, sums = losses.bradley_terry(torch.tensor([1.0]), torch.tensor([1.0]), centering=0.0)
    assert sums["accuracy"].item() == 0


def test_advantages_by_hand():
    # rewards 1, 0, 0, 0: mean ¼, variance (9 + 3) / 16 / 3 = ¼, std ½
    advantages, kept = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert torch.allclose(advantages, torch.tensor([[0.75, -0.25, -0.25, -0.25]]) / 0.5001, atol=1e-6)
    assert kept.all()


def test_a_group_without_differences_and_a_missing_reward_carry_no_signal():
    nan = math.nan
    advantages, kept = group_advantages(torch.tensor([[1.0, 1.0, 1.0], [0.0, nan, 1.0], [nan, nan, 1.0]]))
    assert kept.tolist() == [[False] * 3, [True, False, True], [False] * 3]
    # present 0 and 1: mean ½, std √½ = 0.7071
    assert advantages[1].tolist() == pytest.approx([-0.5 / 0.70720678, 0.0, 0.5 / 0.70720678], abs=1e-6)
    assert not advantages[[0, 2]].any()


def test_the_clip_is_higher_upwards():
    logps, old = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.25])), torch.zeros(5)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    # min(ρA, clip A): 1.28 | -1.5 | 0.5 | -0.8 | 1.25
    loss, clipped = clipped_policy_loss(logps, old, advantages, 0.2, 0.28)
    assert loss.item() == pytest.approx(-(1.28 - 1.5 + 0.5 - 0.8 + 1.25), abs=1e-6)
    assert clipped.item() == 2  # the first and the fourth


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = clipped_policy_loss(logps, logps.detach(), torch.tensor([0.5, -2.0]), 0.2, 0.28)
    loss.backward()
    assert logps.grad is not None and logps.grad.tolist() == [-0.5, 2.0]


def test_k3_is_zero_at_the_reference_and_positive_on_both_sides():
    # δ = ln 2: ½ - 1 + ln 2; δ = -ln 2: 2 - 1 - ln 2
    two = math.log(2)
    assert kl_k3(torch.tensor([0.0]), torch.tensor([0.0])).item() == 0
    assert kl_k3(torch.tensor([two]), torch.tensor([0.0])).item() == pytest.approx(0.5 - 1 + two, abs=1e-6)
    assert kl_k3(torch.tensor([0.0]), torch.tensor([two])).item() == pytest.approx(1 - two, abs=1e-6)
