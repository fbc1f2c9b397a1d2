import math
import random

import pytest
import torch

from pedigree.stages.core import advantages
from pedigree.stages.core.advantages import Visits

NAN = math.nan


def test_group_advantages_by_hand():
    # rewards 1, 0, 0, 0: mean ¼, variance (9 + 3) / 16 / 3 = ¼, std ½
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    centred = torch.tensor([[0.75, -0.25, -0.25, -0.25]])
    assert torch.allclose(advantages.centred(rewards), centred)
    assert torch.allclose(advantages.normalised(rewards), centred / 0.5001, atol=1e-6)
    # the others' means: 0, ⅓, ⅓, ⅓
    assert torch.allclose(advantages.leave_one_out(rewards), torch.tensor([[1.0, -1 / 3, -1 / 3, -1 / 3]]), atol=1e-6)


@pytest.mark.parametrize("name", ["centred", "normalised", "leave_one_out"])
def test_a_group_without_differences_has_exactly_no_advantages(name):
    # 0.7 seven times: the mean is off by a rounding, which must not become an advantage
    rewards = torch.tensor([[0.7] * 7, [NAN] * 6 + [0.7], [NAN] * 7])
    assert (rewards[0] - rewards[0].sum() / 7).any()
    assert not getattr(advantages, name)(rewards).any()


def test_a_missing_reward_counts_nowhere():
    rewards = torch.tensor([[0.0, NAN, 1.0, 0.5]])
    # of 0, 1, ½: mean ½, std √(½ / 2) = ½; without one: the others' means ¾, ¼, ½
    assert advantages.centred(rewards)[0].tolist() == pytest.approx([-0.5, 0, 0.5, 0])
    assert advantages.normalised(rewards)[0].tolist() == pytest.approx([-0.5 / 0.5001, 0, 0.5 / 0.5001, 0])
    assert advantages.leave_one_out(rewards)[0].tolist() == pytest.approx([-0.75, 0, 0.75, 0])


def test_the_greedy_answer_is_the_baseline():
    found = advantages.over_greedy(torch.tensor([[1.0, 0.0], [1.0, NAN], [1.0, 1.0]]), torch.tensor([1.0, 0.25, NAN]))
    assert found.tolist() == [[0.0, -1.0], [0.75, 0.0], [0.0, 0.0]]


def test_dcpo_smooths_over_visits():
    # First visit: A_total = A_new, and both mixtures are A_new.
    first = torch.tensor([[1.0, 0.0]])
    found, (known,) = advantages.smoothed(first, [Visits()])
    assert torch.allclose(found, advantages.normalised(first))
    assert known == Visits(1, 2, 0.5, 0.5)
    # Second: rewards 1, 1: A_new = 0. All: 1, 0, 1, 1: mean ¾, Σ squares 3/16 + 9/16 = ¾, std ½; A_total = ¼ / 0.5001 for both.
    # v = 2: both mixtures are ½ A_total.
    found, (known,) = advantages.smoothed(torch.tensor([[1.0, 1.0]]), [known])
    assert found[0].tolist() == pytest.approx([0.125 / 0.5001] * 2)
    assert known == Visits(2, 4, 0.75, 0.75)
    # Third: 0, 1: A_new = ∓½ / (√½ + 1e-4). All, 1, 0, 1, 1, 0, 1: mean ⅔, Σ squares 4/9 · 2 + 1/9 · 4 = 4/3, std √(4/15).
    # v = 3: of A_total / 3 + ⅔ A_new and ⅔ A_total + A_new / 3 the smaller one.
    found, (known,) = advantages.smoothed(torch.tensor([[0.0, 1.0]]), [known])
    new = [-0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)]
    total = [(reward - 2 / 3) / (math.sqrt(4 / 15) + 1e-4) for reward in (0.0, 1.0)]
    mixtures = [(t / 3 + 2 * n / 3, 2 * t / 3 + n / 3) for n, t in zip(new, total, strict=True)]
    assert found[0].tolist() == pytest.approx([min(pair, key=abs) for pair in mixtures], abs=1e-6)
    assert abs(mixtures[0][0]) < abs(mixtures[0][1]) and abs(mixtures[1][0]) > abs(mixtures[1][1])  # each is taken once
    assert (known.visits, known.answers, known.mean, known.squares) == pytest.approx((3, 6, 2 / 3, 4 / 3))


def test_dcpos_running_numbers_are_those_of_all_rewards_at_once():
    draw = random.Random(0)
    rewards = [draw.random() for _ in range(20)]
    known = Visits()
    for start in range(0, 20, 5):
        _, (known,) = advantages.smoothed(torch.tensor([[*rewards[start : start + 5], NAN]], dtype=torch.float64), [known])
    mean = sum(rewards) / 20
    assert known.visits == 4 and known.answers == 20
    assert (known.mean, known.squares) == pytest.approx((mean, sum((reward - mean) ** 2 for reward in rewards)))


def test_dcpo_sees_no_signal_where_all_visits_gave_the_same():
    known = Visits()
    for _ in range(3):
        found, (known,) = advantages.smoothed(torch.tensor([[0.7] * 7]), [known])
        assert not found.any()
    found, (unchanged,) = advantages.smoothed(torch.tensor([[NAN] * 7]), [known])
    assert unchanged == known and not found.any()  # no visit


# Two answers of 3 and 1 tokens, one after the other.
DOCUMENTS = torch.tensor([0, 0, 0, 1])


def test_tokens_become_rows_and_come_back():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    table = advantages.rows(values, DOCUMENTS, 2, 3)
    assert table.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert advantages.flat(table, DOCUMENTS).tolist() == [1, 2, 3, 4]


def test_the_reward_is_the_last_tokens_and_the_penalty_each_ones():
    found = advantages.token_rewards(torch.tensor([1.0, 5.0]), torch.tensor([0.1, 0.2, 0.3, 0.4]), DOCUMENTS, 3)
    assert torch.allclose(found, torch.tensor([[-0.1, -0.2, 0.7], [4.6, 0, 0]]))


def test_returns_to_go_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    assert advantages.returns_to_go(rewards, 1.0).tolist() == [[7, 6, 4], [3, 0, 0]]
    # γ = ½: 4; 2 + ½ 4 = 4; 1 + ½ 4 = 3
    assert advantages.returns_to_go(rewards, 0.5).tolist() == [[3, 4, 4], [3, 0, 0]]


def test_gae_by_hand():
    # r = 0, 0, 1; V = 0.5, 0.6, 0.8; γ = 0.9, λ = 0.5
    # δ = 0.9 · 0.6 - 0.5 = 0.04; 0.9 · 0.8 - 0.6 = 0.12; 1 - 0.8 = 0.2
    # A_3 = 0.2; A_2 = 0.12 + 0.45 · 0.2 = 0.21; A_1 = 0.04 + 0.45 · 0.21 = 0.1345
    # the second answer ends after its first token: δ = 2 - 0.3, whatever stands behind it is 0
    rewards = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    values = torch.tensor([[0.5, 0.6, 0.8], [0.3, 0.0, 0.0]])
    found = advantages.gae(rewards, values, 0.9, 0.5)
    assert found[0].tolist() == pytest.approx([0.1345, 0.21, 0.2]) and found[1].tolist() == pytest.approx([1.7, 0, 0])
