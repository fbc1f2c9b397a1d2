"""Every preference loss against numbers worked out by hand.

One pair throughout, unless a test says otherwise: S_w = -4 over 2 tokens, S_l = -9 over 3; the reference gives -5 and -6. So
r_w = 1, r_l = -3, r_w / n_w = ½, r_l / n_l = -1, S_w / n_w = -2, S_l / n_l = -3.
"""

import math
from typing import get_args

import pytest
import torch

from pedigree.configs.methods import preference as configs
from pedigree.stages.core.batches import Document
from pedigree.stages.core.preference_losses import PAIR_LOSSES, Answers, kto, log1mexp, means, mismatched, pair_loss


def side(logp, reference, length):
    return Answers(torch.tensor([logp]), None if reference is None else torch.tensor([reference]), torch.tensor([float(length)]))


CHOSEN, REJECTED = side(-4.0, -5.0, 2), side(-9.0, -6.0, 3)


def nll(z):
    """ℓ(z) = -log σ(z)."""
    return math.log1p(math.exp(-z))


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def logit_of_mean(p):
    """p - log(1 - e^p)."""
    return p - math.log(1 - math.exp(p))


BY_HAND = {
    # β (r_w - r_l) = ½ · 4 = 2
    "dpo": (configs.Dpo(type="dpo", beta=0.5), nll(2), 2.0),
    # and -S_w / n_w = 2, weighted by ¼
    "rpo": (configs.Rpo(type="rpo", beta=0.5, nll_weight=0.25), nll(2) + 0.5, 2.0),
    "cdpo": (configs.Cdpo(type="cdpo", beta=0.5, epsilon=0.2), 0.8 * nll(2) + 0.2 * nll(-2), 2.0),
    "robust": (configs.Robust(type="robust", beta=0.5, epsilon=0.2), (0.8 * nll(2) - 0.2 * nll(-2)) / 0.6, 2.0),
    # 1 - 0.2 · 4
    "hinge": (configs.Hinge(type="hinge", beta=0.2), 0.2, 0.8),
    "hinge, satisfied": (configs.Hinge(type="hinge", beta=0.5), 0.0, 2.0),
    # 5 (½ + 1) = 7.5
    "dpo_norm": (configs.DpoNorm(type="dpo_norm"), nll(7.5), 7.5),
    # gap 1.5, goal 1 / 0.5 = 2: (-½)²
    "ipo_mean": (configs.IpoMean(type="ipo_mean", beta=0.25), 0.25, 0.375),
    # gap 4, goal 2: 2²
    "ipo_sum": (configs.IpoSum(type="ipo_sum", beta=0.25), 4.0, 1.0),
    # (1 - σ(½)) + σ(-1.5)
    "apo_zero": (configs.ApoZero(type="apo_zero", beta=0.5), 1 - sigmoid(0.5) + sigmoid(-1.5), 2.0),
    # σ(½) + (1 - σ(2))
    "apo_down": (configs.ApoDown(type="apo_down", beta=0.5), sigmoid(0.5) + 1 - sigmoid(2), 2.0),
    # goal 1 / (2 · ¼) = 2: (1 - 2)² + (-3 + 2)²
    "sppo_hard": (configs.SppoHard(type="sppo_hard", beta=0.25), 2.0, 1.0),
    # 2 (-2 + 3) - 1 = 1
    "simpo": (configs.Simpo(type="simpo"), nll(1), 2.0),
    # 0.1 (-4 + 9) = ½, and NLL 2
    "cpo": (configs.Cpo(type="cpo"), nll(0.5) + 2, 0.5),
    # p = -2 and -3
    "orpo": (
        configs.Orpo(type="orpo"),
        2 + 0.1 * nll(logit_of_mean(-2) - logit_of_mean(-3)),
        logit_of_mean(-2) - logit_of_mean(-3),
    ),
    # forward KL: s = 1 - e^-r: 1 - e^-1 and 1 - e^3
    "dpo, forward KL": (
        configs.Dpo(type="dpo", divergence=configs.ForwardKl(type="forward_kl")),
        nll(0.1 * (math.exp(3) - math.exp(-1))),
        0.1 * (math.exp(3) - math.exp(-1)),
    ),
    # Jensen-Shannon: log(2 u / (1 + u)) with u = e^1 and e^-3
    "hinge, Jensen-Shannon": (
        configs.Hinge(type="hinge", beta=0.1, divergence=configs.JensenShannon(type="js")),
        1 - 0.1 * (math.log(2 * math.e / (1 + math.e)) - math.log(2 * math.exp(-3) / (1 + math.exp(-3)))),
        0.1 * (math.log(2 * math.e / (1 + math.e)) - math.log(2 * math.exp(-3) / (1 + math.exp(-3)))),
    ),
    # α = ½: 2 (1 - e^-½) and 2 (1 - e^1.5)
    "cdpo, alpha": (
        configs.Cdpo(type="cdpo", beta=0.5, epsilon=0.0, divergence=configs.Alpha(type="alpha")),
        nll(math.exp(1.5) - math.exp(-0.5)),
        math.exp(1.5) - math.exp(-0.5),
    ),
}


@pytest.mark.parametrize(("loss", "expected", "margin"), BY_HAND.values(), ids=BY_HAND.keys())
def test_a_loss_by_hand(loss, expected, margin):
    chosen, rejected = CHOSEN, REJECTED
    if loss.reference_free:
        chosen, rejected = side(-4.0, None, 2), side(-9.0, None, 3)
    value, sums = pair_loss(loss, chosen, rejected)
    assert value.item() == pytest.approx(expected, abs=1e-5)
    assert sums["margin"].item() == pytest.approx(margin, abs=1e-5) and sums["accuracy"].item() == 1


def test_every_loss_has_a_function_a_formula_and_a_source():
    union, _ = get_args(configs.PreferenceLoss)
    assert set(get_args(union)) == {*PAIR_LOSSES, configs.SppoSoft, configs.Kto}
    assert {type(loss) for loss, _, _ in BY_HAND.values()} == set(get_args(union)) - {configs.Kto, configs.SppoSoft}
    divergences, _ = get_args(configs.Divergence)
    for config in (*get_args(union), *get_args(divergences)):
        assert config.formula and config.source


def test_metrics_show_likelihood_displacement_and_lengths():
    _, sums = pair_loss(configs.Dpo(type="dpo"), CHOSEN, REJECTED)
    assert {name: value.item() for name, value in sums.items() if name[:3] in ("cho", "rej")} == {
        "chosen_logp": -4, "chosen_ratio": 1, "chosen_length": 2, "rejected_logp": -9, "rejected_ratio": -3, "rejected_length": 3,
    }  # fmt: skip


def test_entropies_are_means_over_tokens_and_only_where_they_were_asked_for():
    # (3 nats over 2 tokens, 6 over 3) of the good answers and 1 over 1 of the bad one
    answers = Answers(*(torch.tensor(values) for values in ([-4.0, -9.0, -3.0], [-5.0, -6.0, -3.0], [2.0, 3.0, 1.0], [3.0, 6.0, 1.0])))
    _, sums = kto(configs.Kto(type="kto"), answers, torch.tensor([True, True, False]), 0.0)
    assert (sums["chosen_entropy"].item(), sums["rejected_entropy"].item()) == (1.5 + 2, 1)
    _, sums = pair_loss(configs.Dpo(type="dpo"), answers.select(slice(1, 2)), answers.select(slice(2, 3)))
    assert (sums["chosen_entropy"].item(), sums["rejected_entropy"].item()) == (2, 1)


def two_pairs(policy=None):
    """The pair above and one in which the policy is wrong: r_w = -1, r_l = 2."""
    logps = policy if policy is not None else torch.tensor([[-4.0, -9.0], [-7.0, -4.0]])
    reference, lengths = torch.tensor([[-5.0, -6.0], [-6.0, -6.0]]), torch.tensor([[2.0, 3.0], [4.0, 1.0]])
    return Answers(logps[:, 0], reference[:, 0], lengths[:, 0]), Answers(logps[:, 1], reference[:, 1], lengths[:, 1])


@pytest.mark.parametrize("name", [name for name in BY_HAND if "sppo" not in name])
def test_an_uncertain_pair_costs_its_expectation(name):
    loss, certain, _ = BY_HAND[name]
    turned, _ = pair_loss(loss, REJECTED, CHOSEN)
    expected, _ = pair_loss(loss, CHOSEN, REJECTED, torch.tensor([0.7]))
    assert expected.item() == pytest.approx(0.7 * certain + 0.3 * turned.item(), abs=1e-5)


def test_the_probability_of_winning_is_sppos_target_and_its_hard_form_asks_for_a_verdict():
    # log-ratios 1 and -3; P ¾ and ⅜: goals ¼ / ¼ = 1 and -⅛ / ¼ = -½: (1 - 1)² + (-3 + ½)²
    soft = configs.SppoSoft(type="sppo_soft", beta=0.25)
    loss, _ = pair_loss(soft, CHOSEN, REJECTED, win_rates_P2=torch.tensor([[0.75, 0.375]]))
    assert loss.item() == pytest.approx(6.25)
    # each answer has its own goal: with P = 1 and 0 it is the hard form
    certain, _ = pair_loss(soft, CHOSEN, REJECTED, win_rates_P2=torch.tensor([[1.0, 0.0]]))
    assert certain.item() == pytest.approx(BY_HAND["sppo_hard"][1])
    with pytest.raises(ValueError, match="requires win rates"):
        pair_loss(soft, CHOSEN, REJECTED, torch.tensor([0.75]))
    with pytest.raises(ValueError, match="no uncertain pairs"):
        pair_loss(configs.SppoHard(type="sppo_hard"), CHOSEN, REJECTED, torch.tensor([0.75]))


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loss_is_a_sum_over_pairs(name):
    loss = BY_HAND[name][0]
    chosen, rejected = two_pairs()
    both, _ = pair_loss(loss, chosen, rejected)
    alone = [pair_loss(loss, chosen.select(slice(i, i + 1)), rejected.select(slice(i, i + 1)))[0].item() for i in range(2)]
    assert both.item() == pytest.approx(sum(alone), rel=1e-6)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_gradient_is_the_difference_quotient(name):
    """In fp64, for all four log-probabilities of two pairs."""
    loss = BY_HAND[name][0]
    start = torch.tensor([[-4.0, -9.0], [-7.0, -4.0]], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda logps: pair_loss(loss, *two_pairs(logps))[0], start, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "expected"), [("dpo", math.log(2)), ("sppo_hard", 8.0), ("rpo", math.log(2) + 0.25 * 2.5)])
def test_the_loss_where_policy_and_reference_are_one(name, expected):
    """The first step's loss; rpo adds the reference's 5 / 2 nats per token."""
    loss, sums = pair_loss(BY_HAND[name][0], CHOSEN.at_reference(), REJECTED.at_reference())
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert sums["accuracy"].item() == 0  # a tie is no success


def test_extreme_log_ratios_stay_finite():
    wild = Answers(torch.tensor([500.0, -500.0]), torch.zeros(2), torch.ones(2)).select
    for divergence in (configs.ForwardKl(type="forward_kl"), configs.JensenShannon(type="js"), configs.Alpha(type="alpha", alpha=1.0)):
        loss, _ = pair_loss(configs.Dpo(type="dpo", divergence=divergence), wild(slice(1, 2)), wild(slice(0, 1)))
        assert math.isfinite(loss.item())


@pytest.mark.parametrize("x", [-1e-6, -1e-3, -0.5, -math.log(2), -1.0, -20.0, -80.0])
def test_log1mexp_is_exact_near_both_ends(x):
    exact = math.log(-math.expm1(x)) if x > -30 else -math.exp(x)
    single = torch.tensor([x], requires_grad=True)
    value = log1mexp(single)
    value.sum().backward()
    assert value.item() == pytest.approx(exact, rel=1e-5)
    assert single.grad is not None and single.grad.isfinite().all()


def test_orpo_of_a_certain_answer_is_finite():
    certain = Answers(torch.zeros(1, requires_grad=True), None, torch.ones(1))
    loss, _ = pair_loss(configs.Orpo(type="orpo"), certain, side(-9.0, None, 3))
    loss.backward()
    assert certain.logps.grad is not None and math.isfinite(loss.item()) and certain.logps.grad.isfinite().all()


SINGLES = Answers(torch.tensor([-4.0, -9.0, -3.0]), torch.tensor([-5.0, -6.0, -3.0]), torch.tensor([2.0, 3.0, 1.0]))
GOOD = torch.tensor([True, False, False])


def test_kto_by_hand():
    # β = ½, z₀ = 1, r = 1, -3, 0. Good: 1 - σ(½(1 - 1)) = ½. Bad: 1 - σ(½(1 + 3)) = 1 - σ(2), and 1 - σ(½(1 - 0)) = 1 - σ(½).
    loss, sums = kto(configs.Kto(type="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0), SINGLES, GOOD, 1.0)
    assert loss.item() == pytest.approx(2 * 0.5 + 3 * (1 - sigmoid(2)) + 3 * (1 - sigmoid(0.5)), abs=1e-6)
    assert {name: value.item() for name, value in sums.items()} == {
        "accuracy": 2,  # the two bad ones lie below z₀, the good one not above
        "chosen_logp": -4, "chosen_length": 2, "chosen_ratio": 1, "rejected_logp": -12, "rejected_length": 4, "rejected_ratio": -3,
    }  # fmt: skip


def test_ktos_gradient_lifts_the_good_and_sinks_the_bad():
    # d/dr λ_D (1 - σ(βr)) = -λ_D β σ(βr)(1 - σ(βr)) = -¼ β at r = z₀
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    answers = Answers(logps, torch.tensor([-1.0, -2.0]), torch.ones(2))
    loss, _ = kto(configs.Kto(type="kto", beta=0.4), answers, torch.tensor([True, False]), 0.0)
    loss.backward()
    assert logps.grad is not None and logps.grad.tolist() == pytest.approx([-0.1, 0.1], abs=1e-7)


def doc(prompt, *answer):
    return Document.of((prompt, *answer), (False,) + (True,) * len(answer))


def test_mismatched_answers_stand_after_other_prompts_and_each_stands_once():
    docs = [doc(1, 10, 11), doc(2, 20), doc(1, 12), doc(3, 30), doc(2, 21)]
    found = mismatched(docs, 16)
    prompts = {10: 1, 12: 1, 20: 2, 21: 2, 30: 3}
    assert sorted(int(d.ids[1]) for d in found) == sorted(prompts)
    assert sorted(int(d.ids[0]) for d in found) == [1, 1, 2, 2, 3]
    assert all(prompts[int(d.ids[1])] != d.ids[0] for d in found)
    assert all(d.trained.tolist() == [False] + [True] * (len(d) - 1) for d in found)


def test_where_one_prompt_has_most_answers_those_without_a_partner_are_left_out():
    docs = [doc(1, 10), doc(1, 11), doc(1, 12), doc(2, 20)]
    assert [d.ids.tolist() for d in mismatched(docs, 16)] == [[1, 20], [2, 10]]
    assert mismatched(docs[:3], 16) == [] and mismatched([], 16) == []


def test_a_mismatched_answer_loses_what_exceeds_the_length():
    assert [d.ids.tolist() for d in mismatched([doc(1, 10, 11, 12), doc(2, 20)], 3)] == [[1, 20], [2, 10, 11]]


def test_means_divide_each_side_by_its_own_count():
    sums = {"loss": 6.0, "chosen_logp": -2.0, "rejected_logp": -9.0}
    assert means(sums, 3, {}) == {"loss": 2, "chosen_logp": pytest.approx(-2 / 3), "rejected_logp": -3}
    assert means(sums, 3, {"chosen": 2, "rejected": 1}) == {"loss": 2, "chosen_logp": -1, "rejected_logp": -9}
    assert means({"loss": 6.0, "rejected_logp": 0.0}, 3, {"chosen": 3, "rejected": 0}) == {"loss": 2}
