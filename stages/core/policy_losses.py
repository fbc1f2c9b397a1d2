"""Ratios, objectives, KL penalties and aggregations of policy-gradient methods: pure functions, in the papers' symbols.

Shapes: P prompts, G answers to each; D answers, N trained tokens of all answers concatenated; `documents_N` is the answer of
each token. Everything is fp32. An objective is a loss per token; `token_weights` are the weights of the tokens, so that Σ weight · loss
over all micro-batches of all ranks is the loss, and splitting the batch into micro-batches does not change its gradient.

Results equal TRL 1.16's for the methods that it has (`tests/stages/test_policy_trl.py`).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pedigree.configs.methods.policy_gradient import AdaptiveEntropy, AdaptiveKl, Algorithm, Cispo, Clipped, Correction, Dcpo, Kl, Ratio
from pedigree.stages.core.batches import sum_by_document

LARGEST_DELTA = 20.0
"""Log-ratios to the reference are clamped to ± this: e^20 per token is far beyond a useful gradient."""


class Objective(NamedTuple):
    """The loss per token, and the tokens clipped by a bound."""

    loss_N: Tensor
    low_N: Tensor
    """1 where the lower bound clips the gradient."""
    high_N: Tensor
    """1 where the upper bound clips the gradient (CISPO: the weight)."""


def has_gradient(algorithm: Algorithm, advantages_PG: Tensor | None, present_PG: Tensor, bonus: bool = False) -> Tensor:
    """Which answers can have a gradient, (P, G) bool: the others need no forward pass, but count in the loss's divisor.

    An answer without a reward has none. An answer whose group has no advantages has none either, except with a KL (in the loss it pulls
    every answer to the reference; in the reward it creates advantages), with an entropy bonus or a teacher, or with whitening, which shifts
    an advantage of 0 by the batch's mean. TRL 1.16 and verl 0.9 compute all answers; skipping these gives the same loss and gradient.

    Args:
        advantages_PG: advantage of each answer from its reward alone; None for algorithms with advantages per token.
        present_PG: which answers have a reward.
        bonus: whether the loss has an entropy bonus.
    """
    if advantages_PG is None or algorithm.kl is not None or algorithm.whitened or bonus or algorithm.teacher:
        return present_PG
    return present_PG & (advantages_PG != 0).any(1, keepdim=True)


def informative(rewards_PG: Tensor, advantages_PG: Tensor | None, taught: bool = False) -> Tensor:
    """Which groups have a learning signal, (P,) bool: those with a nonzero advantage; with advantages per token, all groups if rewards
    differ within the batch; with a teacher, all.

    Args:
        rewards_PG: NaN if missing.
        advantages_PG: advantage of each answer from its reward alone; None for algorithms with advantages per token.
    """
    present_PG = ~rewards_PG.isnan()
    if taught:
        return present_PG.any(1)
    if advantages_PG is not None:
        return (advantages_PG != 0).any(1)
    known = rewards_PG[present_PG]
    return present_PG.any(1) & bool(len(known) and (known != known[0]).any())


def ratios(log_ratios_N: Tensor, documents_N: Tensor, num_documents: int, level: Ratio) -> Tensor:
    """ρ of each token: the token's own, or its answer's, exp(mean_t log ρ_t) (GSPO, arXiv 2507.18071, eq. 7) or Π_t ρ_t."""
    if level != "token":
        sums_D = sum_by_document(log_ratios_N, documents_N, num_documents)
        if level == "sequence_mean":
            sums_D = sums_D / sum_by_document(torch.ones_like(log_ratios_N), documents_N, num_documents).clamp(min=1)
        log_ratios_N = sums_D[documents_N]
    return log_ratios_N.exp()


def clipped(ratios_N: Tensor, advantages_N: Tensor, low: float | Tensor, high: float | Tensor, dual_clip: float | None = None) -> Objective:
    """-min(ρA, clip(ρ, low, high) A) (PPO, arXiv 1707.06347, eq. 7); where A < 0 at most -cA with c = `dual_clip` (arXiv 1912.09729,
    eq. 5). The bounds are 1 - ε_low and 1 + ε_high, or one per token.
    """
    free_N = ratios_N * advantages_N
    lowest, highest = (bound if isinstance(bound, Tensor) else ratios_N.new_full((), bound) for bound in (low, high))
    bounded_N = torch.minimum(torch.maximum(ratios_N, lowest), highest) * advantages_N
    objective_N = torch.minimum(free_N, bounded_N)
    negative_N = advantages_N < 0
    cut_N = bounded_N < free_N
    high_N = cut_N & ~negative_N
    if dual_clip is not None:
        floor_N = dual_clip * advantages_N
        high_N = high_N | (negative_N & (objective_N < floor_N))
        objective_N = torch.where(negative_N, torch.maximum(objective_N, floor_N), objective_N)
    return Objective(-objective_N, (cut_N & negative_N).float(), high_N.float())


def dynamic_bounds(old_logps_N: Tensor, clip_low: float, clip_high: float, max_ratio: float) -> tuple[Tensor, Tensor]:
    """Bounds of ρ for which |ρ - 1| π_θ ≤ ε, that is |ρ² - ρ| q ≤ ε with q = π_old(y_t) (DCPO, arXiv 2509.02333, eqs. 3 and 4)."""
    q_N = old_logps_N.exp()
    low_N = 0.5 + 0.5 * (1 - 4 * clip_low / q_N).clamp(min=0).sqrt()
    high_N = 0.5 + 0.5 * (1 + 4 * clip_high / q_N).sqrt()
    return low_N, high_N.clamp(max=max_ratio)


def cispo(ratios_N: Tensor, logps_N: Tensor, advantages_N: Tensor, clip_max: float) -> Objective:
    """-sg(min(ρ, ε_max)) A log π_θ (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5)."""
    loss_N = -ratios_N.detach().clamp(max=clip_max) * advantages_N * logps_N
    return Objective(loss_N, torch.zeros_like(advantages_N), (ratios_N > clip_max).float())


def reinforce(logps_N: Tensor, advantages_N: Tensor) -> Objective:
    """-A log π_θ (Williams 1992)."""
    zeros_N = torch.zeros_like(advantages_N)
    return Objective(-advantages_N * logps_N, zeros_N, zeros_N)


def objective(algorithm: Algorithm, ratios_N: Tensor, logps_N: Tensor, old_logps_N: Tensor, advantages_N: Tensor) -> Objective:
    """The algorithm's loss of each token, without its KL."""
    match algorithm:
        case Clipped():
            return clipped(ratios_N, advantages_N, 1 - algorithm.clip_low, 1 + algorithm.clip_high, algorithm.dual_clip)
        case Dcpo():
            bounds = dynamic_bounds(old_logps_N, algorithm.clip_low, algorithm.clip_high, algorithm.max_ratio)
            return clipped(ratios_N, advantages_N, *bounds, dual_clip=algorithm.max_ratio)
        case Cispo():
            return cispo(ratios_N, logps_N, advantages_N, algorithm.clip_max)
        case _:
            return reinforce(logps_N, advantages_N)


def kl(estimator: str, logps_N: Tensor, reference_logps_N: Tensor) -> Tensor:
    """k1 = δ, k2 = δ²/2, k3 = e^-δ - 1 + δ with δ = log π_θ - log π_ref (Schulman 2020), each per token."""
    delta_N = (logps_N - reference_logps_N).clamp(-LARGEST_DELTA, LARGEST_DELTA)
    match estimator:
        case "k1":
            return delta_N
        case "k2":
            return 0.5 * delta_N**2
        case "k3":
            return (-delta_N).exp() - 1 + delta_N
    raise ValueError(f"unknown estimator {estimator!r}: use k1, k2 or k3")


def kl_loss(settings: Kl, logps_N: Tensor, reference_logps_N: Tensor, ratios_N: Tensor) -> Tensor:
    """The penalty on each token, without its coefficient: k, or ρk whose gradient is unbiased (arXiv 2512.02556, §3.1).

    ρ is the token's own ratio, even if the objective uses the answer's: k is defined per token, and only the token's ratio makes the
    expectation correct.
    """
    penalty_N = kl(settings.estimator, logps_N, reference_logps_N)
    return penalty_N * ratios_N if settings.unbiased else penalty_N


def adapted(coefficient: float, measured: float, answers: int, settings: AdaptiveKl) -> float:
    """β (1 + n/horizon · clip(KL/target - 1, -0.2, 0.2)) (Ziegler et al. 2019, arXiv 1909.08593, §2.2)."""
    error = min(settings.most_change, max(-settings.most_change, measured / settings.target - 1))
    return coefficient * (1 + error * answers / settings.horizon)


def entropy_threshold(entropies_N: Tensor, share: float) -> Tensor:
    """The lowest of the 1 + ⌊share · (N - 1)⌋ highest entropies (arXiv 2506.01939). Those at or above it are the tokens at or above
    the linearly interpolated quantile 1 - share of TRL and torch, which takes at most 2^24 values."""
    kept = 1 + math.floor(share * (len(entropies_N) - 1) + 1e-9)  # 0.7 * 10 is less than 7 in floating point
    return entropies_N.sort(descending=True).values[kept - 1]


def adapted_entropy(coefficient: float, measured: float, settings: AdaptiveEntropy) -> tuple[float, float]:
    """(c, α) after a batch of rollouts with this mean entropy (Skywork-OR1, arXiv 2505.22312): c rises by `step` where H ≤ target and falls
    by it otherwise, within its bounds; α = c where H ≤ target, else 0."""
    if measured <= settings.target:
        coefficient = min(coefficient + settings.step, settings.high)
        return coefficient, coefficient
    return max(coefficient - settings.step, settings.low), 0.0


def correction_weights(
    settings: Correction, old_logps_N: Tensor, sampled_logps_N: Tensor, documents_N: Tensor, num_documents: int
) -> tuple[Tensor, Tensor]:
    """(w of each token, 1 where a bound changed w); w = π_old(trainer) / π(sampler), for the token or its whole answer."""
    level: Ratio = "token" if settings.level == "token" else "sequence_sum"
    weights_N = ratios(old_logps_N - sampled_logps_N, documents_N, num_documents, level)
    outside_N = (weights_N < settings.low) | (weights_N > settings.high)
    if settings.mode == "truncate":
        return weights_N.clamp(settings.low, settings.high), outside_N.float()
    return torch.where(outside_N, 0.0, weights_N), outside_N.float()


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """(½ max((V - R̂)², (clip(V, V_old - ε, V_old + ε) - R̂)²) of each token, 1 where the clipped term is larger)."""
    free_N = (values_N - returns_N) ** 2
    if clip is None:
        return 0.5 * free_N, torch.zeros_like(free_N)
    bounded_N = (old_values_N + (values_N - old_values_N).clamp(-clip, clip) - returns_N) ** 2
    return 0.5 * torch.maximum(free_N, bounded_N), (bounded_N > free_N).float()


def token_weights(aggregation: str, lengths_D: Tensor, num_prompts: int, longest: int) -> Tensor:
    """Weight in the loss of every token of an answer, shape (D,), from ALL answers of the update, over all ranks.

    Args:
        aggregation: `token-mean` 1 / Σ|y|; `seq-mean-token-mean` 1 / (D |y|); `seq-mean-token-sum` 1 / D;
            `seq-mean-token-sum-norm` 1 / (D · longest); `token-sum` 1; `seq-sum-token-mean` 1 / (P |y|).
        lengths_D: |y| in tokens; 0 if the answer is masked.
        num_prompts: P.
        longest: maximum tokens of an answer.
    """
    lengths_D, num_answers = lengths_D.float(), len(lengths_D)
    total = lengths_D.sum()
    ones_D, lengths_D = torch.ones_like(lengths_D), lengths_D.clamp(min=1)
    weights = {
        "token-mean": ones_D / total,
        "seq-mean-token-mean": ones_D / (num_answers * lengths_D),
        "seq-mean-token-sum": ones_D / num_answers,
        "seq-mean-token-sum-norm": ones_D / (num_answers * longest),
        "token-sum": ones_D,
        "seq-sum-token-mean": ones_D / (num_prompts * lengths_D),
    }
    return weights[aggregation]
