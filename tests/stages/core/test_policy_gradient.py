import math

import pytest
import torch
from pydantic import TypeAdapter

from pedigree.configs.methods.policy_gradient import AdaptiveEntropy, AdaptiveKl, Algorithm, Correction, Kl
from pedigree.stages.core import policy_losses as pg

DOCUMENTS = torch.tensor([0, 0, 0, 1])
"""Two answers of 3 and 1 tokens, one after the other."""


def logs(*values):
    return torch.log(torch.tensor(values))


def test_ratios_of_tokens_and_of_whole_answers():
    log_ratios = logs(2.0, 1.0, 4.0, 3.0)
    assert pg.ratios(log_ratios, DOCUMENTS, 2, "token").tolist() == pytest.approx([2, 1, 4, 3])
    # geometric mean of 2, 1, 4: 8^(1/3) = 2; product 8
    assert pg.ratios(log_ratios, DOCUMENTS, 2, "sequence_mean").tolist() == pytest.approx([2, 2, 2, 3])
    assert pg.ratios(log_ratios, DOCUMENTS, 2, "sequence_sum").tolist() == pytest.approx([8, 8, 8, 3])


def test_the_clip_is_higher_upwards():
    ratios, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.25]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    found = pg.clipped(ratios, advantages, 0.8, 1.28)
    assert found.loss_N.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.25])
    assert found.low_N.tolist() == [0, 0, 0, 1, 0] and found.high_N.tolist() == [1, 0, 0, 0, 0]


def test_the_dual_clip_bounds_what_a_bad_answer_can_do():
    # A = -1, ρ = 7: min(ρA, clip A) = -7, and at least cA = -3; a good answer is left alone
    ratios, advantages = torch.tensor([7.0, 2.0, 7.0], requires_grad=True), torch.tensor([-1.0, -1.0, 1.0])
    found = pg.clipped(ratios, advantages, 0.8, 1.2, dual_clip=3.0)
    assert found.loss_N.tolist() == pytest.approx([3, 2, -1.2])
    assert found.high_N.tolist() == [1, 0, 1]
    found.loss_N.sum().backward()
    assert ratios.grad is not None and ratios.grad.tolist() == [0, 1, 0]


def test_cispo_cuts_the_weight_and_keeps_the_gradient():
    # ρ = 8 is cut to 5, ρ = 2 stays; -w A log π: 5 · 1 · 1 = 5, -2 · 3 · 2 = -12; gradients -wA
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    ratios = torch.tensor([8.0, 2.0]) * (logps - logps.detach()).exp()
    found = pg.cispo(ratios, logps, torch.tensor([1.0, -3.0]), 5.0)
    assert found.loss_N.tolist() == pytest.approx([5, -12]) and found.high_N.tolist() == [1, 0]
    found.loss_N.sum().backward()
    assert logps.grad is not None and logps.grad.tolist() == pytest.approx([-5, 6])


def test_dcpo_gives_rare_tokens_more_room():
    # q = 1: ½ + ½√(1 - 0.64) = 0.8, ½ + ½√1.8 = 1.17082; q = 0.16: ½ + ½√(1 - 4) → ½, ½ + ½√6 = 1.72474; q = 1e-4: 10
    low, high = pg.dynamic_bounds(logs(1.0, 0.16, 1e-4), 0.16, 0.2, 10.0)
    assert low.tolist() == pytest.approx([0.8, 0.5, 0.5]) and high.tolist() == pytest.approx([1.170820, 1.724745, 10.0])
    # at a bound that no maximum cuts, |ρ - 1| π_θ = |ρ - 1| ρ q is ε
    assert [(h - 1) * h * q for h, q in zip(high.tolist()[:2], (1.0, 0.16), strict=True)] == pytest.approx([0.2, 0.2])
    assert (1 - low[0].item()) * low[0].item() == pytest.approx(0.16)
    found = pg.clipped(torch.tensor([1.5, 1.5, 1.5]), torch.ones(3), low, high)
    assert found.loss_N.tolist() == pytest.approx([-1.170820, -1.5, -1.5])


def test_dcpo_bounds_what_a_bad_answer_can_do_too():
    # ρ = 12 with A = -1 counts as 10 and has no gradient, ρ = 4 (above the upper bound 1.72, which is for good answers) counts whole
    algorithm = TypeAdapter(Algorithm).validate_python({"type": "dcpo"})
    ratios = torch.tensor([12.0, 4.0, 12.0], requires_grad=True)
    found = pg.objective(algorithm, ratios, torch.zeros(3), logs(0.16, 0.16, 1e-4), torch.tensor([-1.0, -1.0, 1.0]))
    assert found.loss_N.tolist() == pytest.approx([10, 4, -10]) and found.high_N.tolist() == [1, 0, 1]
    found.loss_N.sum().backward()
    assert ratios.grad is not None and ratios.grad.tolist() == [0, 1, 0]


def test_kl_estimators_at_the_reference_and_on_both_sides():
    two = math.log(2)
    logps, reference = torch.tensor([0.0, two, 0.0]), torch.tensor([0.0, 0.0, two])
    assert pg.kl("k1", logps, reference).tolist() == pytest.approx([0, two, -two])
    assert pg.kl("k2", logps, reference).tolist() == pytest.approx([0, two**2 / 2, two**2 / 2])
    assert pg.kl("k3", logps, reference).tolist() == pytest.approx([0, 0.5 - 1 + two, 2 - 1 - two])


def test_a_token_that_the_reference_cannot_say_gives_a_finite_penalty():
    for name in ("k1", "k2", "k3"):
        assert pg.kl(name, torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])).isfinite().all()


@pytest.mark.parametrize(("estimator", "unbiased"), [("k3", True), ("k1", True), ("k2", False)])
def test_the_unbiased_gradient_is_that_of_the_kl(estimator, unbiased):
    """The expectation over a whole vocabulary, where the policy that drew the tokens is the one that is differentiated."""
    torch.manual_seed(0)
    logits, reference = torch.randn(5, requires_grad=True), torch.randn(5).log_softmax(0)
    logps = logits.log_softmax(0)
    exact = (logps.exp() * (logps - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    settings = Kl(estimator=estimator, coefficient=1.0, unbiased=unbiased)
    estimate = (logps.detach().exp() * pg.kl_loss(settings, logps, reference, (logps - logps.detach()).exp())).sum()
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    assert torch.allclose(found, expected, atol=1e-6)
    biased = (logps.detach().exp() * pg.kl("k3", logps, reference)).sum()
    assert not torch.allclose(torch.autograd.grad(biased, logits)[0], expected, atol=1e-2)


def test_the_coefficient_follows_the_kl():
    settings = AdaptiveKl(target=6.0, horizon=100)
    assert pg.adapted(0.1, 6.0, 50, settings) == pytest.approx(0.1)
    assert pg.adapted(0.1, 6.6, 50, settings) == pytest.approx(0.1 * (1 + 0.1 * 0.5))  # 10 % above, half a horizon
    assert pg.adapted(0.1, 60.0, 50, settings) == pytest.approx(0.1 * (1 + 0.2 * 0.5))  # cut at 20 %
    assert pg.adapted(0.1, 0.0, 50, settings) == pytest.approx(0.1 * (1 - 0.2 * 0.5))


@pytest.mark.parametrize(
    ("level", "mode", "weights", "changed"),
    [
        # ratios 0.4, 1, 3 and 4; bounds 0.5 and 2; the first answer's product is 1.2
        ("token", "truncate", [0.5, 1, 2, 2], [1, 0, 1, 1]),
        ("token", "mask", [0, 1, 0, 0], [1, 0, 1, 1]),
        ("sequence", "truncate", [1.2, 1.2, 1.2, 2], [0, 0, 0, 1]),
        ("sequence", "mask", [1.2, 1.2, 1.2, 0], [0, 0, 0, 1]),
    ],
)
def test_corrections_by_hand(level, mode, weights, changed):
    settings = Correction(level=level, mode=mode, low=0.5, high=2.0)
    found, cut = pg.correction_weights(settings, logs(0.4, 1.0, 3.0, 4.0), torch.zeros(4), DOCUMENTS, 2)
    assert found.tolist() == pytest.approx(weights) and cut.tolist() == changed


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # answers of 1, 3 and 4 tokens to 2 prompts, at most 10
        ("token-mean", [1 / 8, 1 / 8, 1 / 8]),
        ("seq-mean-token-mean", [1 / 3, 1 / 9, 1 / 12]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30]),
        ("token-sum", [1, 1, 1]),
        ("seq-sum-token-mean", [1 / 2, 1 / 6, 1 / 8]),
    ],
)
def test_what_a_token_counts(aggregation, expected):
    assert pg.token_weights(aggregation, torch.tensor([1, 3, 4]), 2, 10).tolist() == pytest.approx(expected)


def test_the_value_loss_takes_the_worse_of_free_and_clipped():
    # old 0, return 1: V = 0.5 is cut to 0.2: max(0.25, 0.64) / 2; V = 0.1 is free: 0.81 / 2
    # old 0, return -1: V = 0.5: max(2.25, 1.44) / 2
    values, old, returns = torch.tensor([0.5, 0.1, 0.5]), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    loss, cut = pg.value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([0.32, 0.405, 1.125]) and cut.tolist() == [1, 0, 0]
    loss, cut = pg.value_loss(values, old, returns, None)
    assert loss.tolist() == pytest.approx([0.125, 0.405, 1.125]) and not cut.any()


ALGORITHMS = {
    "grpo": True, "dr_grpo": False, "dapo": False, "gspo": False, "cispo": False, "dcpo": False, "rloo": True, "remax": False,
    "reinforce_pp": True, "reinforce_pp_baseline": True, "ppo": True,
}  # fmt: skip
"""Whether by default something besides its own advantages gives an answer a gradient."""


@pytest.mark.parametrize(("type", "all_of_them"), ALGORITHMS.items())
def test_which_answers_can_have_a_gradient(type, all_of_them):
    """Three groups: unequal rewards, equal ones, and one reward with one missing."""
    algorithm = TypeAdapter(Algorithm).validate_python({"type": type})
    present = torch.tensor([[True, True], [True, True], [True, False]])
    advantages = None if algorithm.per_token else torch.tensor([[0.5, -0.5], [0.0, 0.0], [0.0, 0.0]])
    expected = present if all_of_them else torch.tensor([[True, True], [False, False], [False, False]])
    assert torch.equal(pg.has_gradient(algorithm, advantages, present), expected)
    without = pg.has_gradient(algorithm.model_copy(update={"kl": None}), advantages, present)
    assert without.any(1).tolist() == [True, *[algorithm.whitened or algorithm.per_token] * 2]


def test_which_groups_teach_something():
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [nan, nan]])
    advantages = torch.tensor([[0.5, -0.5], [0.0, 0.0], [0.0, 0.0]])
    assert pg.informative(rewards, advantages).tolist() == [True, False, False]
    assert pg.informative(rewards, None).tolist() == [True, True, False]  # per token, rewards are compared over the batch
    assert pg.informative(torch.tensor([[1.0, nan], [1.0, 1.0]]), None).tolist() == [False, False]
    assert pg.informative(torch.full((2, 2), nan), None).tolist() == [False, False]


@pytest.mark.parametrize(("share", "kept"), [(0.2, 3), (0.25, 3), (0.05, 1), (0.7, 8), (0.99, 10)])
def test_the_top_tokens_are_those_at_or_above_torchs_quantile(share, kept):
    # 1 + ⌊share · 10⌋ of eleven
    entropies = torch.tensor([0.3, 2.1, 0.9, 0.0, 1.7, 1.1, 0.2, 3.0, 0.5, 1.3, 0.7])
    threshold = pg.entropy_threshold(entropies, share)
    assert (entropies >= threshold).sum() == kept
    if share != 0.7:  # (1 - 0.7) · 10 is more than 3 in floating point
        assert ((entropies >= threshold) == (entropies >= torch.quantile(entropies, 1 - share))).all()
    assert (torch.tensor([1.0, 1.0, 0.5]) >= pg.entropy_threshold(torch.tensor([1.0, 1.0, 0.5]), 0.1)).tolist() == [True, True, False]


def test_the_coefficient_of_the_entropy_steps_towards_its_target():
    settings = AdaptiveEntropy(target=0.5, step=0.25, high=0.6)
    assert pg.adapted_entropy(0.25, 0.5, settings) == (0.5, 0.5)  # at the target, as below it
    assert pg.adapted_entropy(0.5, 0.4, settings) == (0.6, 0.6)
    assert pg.adapted_entropy(0.5, 0.6, settings) == (0.25, 0.0) and pg.adapted_entropy(0.1, 0.6, settings) == (0.0, 0.0)
