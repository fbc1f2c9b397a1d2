"""Advantages of answers and tokens: pure functions, in the papers' symbols.

Shapes: P prompts, G answers to each, D answers of a micro-batch, T tokens of the longest, N trained tokens of all answers concatenated.
A missing reward is NaN: it is excluded from every mean, and its advantage is 0. Advantages of a group with equal rewards are exactly 0, so
the group has no gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pedigree.stages.core.batches import sum_by_document

EPSILON = 1e-4
"""Added to a group's standard deviation before dividing by it, as in TRL."""


def centred(rewards_PG: Tensor) -> Tensor:
    """A_i = R_i - mean R over the answers to one prompt (Dr.GRPO, arXiv 2503.20783, §3.2)."""
    present = ~rewards_PG.isnan()
    rewards = torch.where(present, rewards_PG, 0.0)
    mean = rewards.sum(1, keepdim=True) / present.sum(1, keepdim=True).clamp(min=1)
    highest = torch.where(present, rewards, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(present, rewards, torch.inf).amin(1, keepdim=True)
    return torch.where(present & (highest > lowest), rewards - mean, 0.0)


def normalised(rewards_PG: Tensor) -> Tensor:
    """A_i = (R_i - mean R) / (std R + ε), std with G - 1 (GRPO, arXiv 2402.03300, §4.1.2)."""
    differences = centred(rewards_PG)
    count = (~rewards_PG.isnan()).sum(1, keepdim=True)
    std = ((differences**2).sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return differences / (std + EPSILON)


def turns_normalised(rewards_PGT: Tensor) -> Tensor:
    """A_ik = Σ_{l≥k} (r_il - mean r) / (std r + ε), mean and std over all turns of all answers to a prompt (GRPO with process supervision,
    arXiv 2402.03300, §4.1.3). With one turn each, `normalised`.

    Args:
        rewards_PGT: of up to T turns of each answer, NaN where there is none.
    """
    return normalised(rewards_PGT.flatten(1)).view_as(rewards_PGT).flip(2).cumsum(2).flip(2)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """A_i = R_i - mean_{j≠i} R_j = k / (k - 1) (R_i - mean R) with k rewards present (RLOO, arXiv 2402.14740, §2.3)."""
    count = (~rewards_PG.isnan()).sum(1, keepdim=True)
    return centred(rewards_PG) * count / (count - 1).clamp(min=1)


def over_greedy(rewards_PG: Tensor, greedy_P: Tensor) -> Tensor:
    """A_i = R_i - R(greedy answer) (ReMax, arXiv 2310.10505); 0 where either is missing."""
    differences = rewards_PG - greedy_P[:, None]
    return torch.where(differences.isnan(), 0.0, differences)


class Visits(NamedTuple):
    """Reward statistics of one prompt over all steps that visited it; plain numbers, for checkpoints."""

    visits: int = 0
    answers: int = 0
    """Number of rewards."""
    mean: float = 0.0
    squares: float = 0.0
    """Σ (R - mean)²."""


def smoothed(rewards_PG: Tensor, before_P: Sequence[Visits]) -> tuple[Tensor, list[Visits]]:
    """DCPO's advantages (arXiv 2509.02333, eqs. 5 to 7): at the v-th visit to a prompt, with A_new over this visit's answers and A_total
    over those of all visits, of A_total / v + (v - 1) / v A_new and (v - 1) / v A_total + A_new / v the one of smaller magnitude.

    Returns:
        (advantages, statistics after this visit). A visit without rewards does not count.
    """
    new = normalised(rewards_PG)
    advantages, after = [], []
    for rewards_G, new_G, history in zip(rewards_PG.double(), new.double(), before_P, strict=True):
        history = _visited(history, [reward for reward in rewards_G.tolist() if reward == reward])
        std = (history.squares / max(1, history.answers - 1)) ** 0.5
        total_G = ((rewards_G - history.mean) / (std + EPSILON)).nan_to_num(0.0)  # equal fp32 rewards add up exactly in fp64
        late, visits = 1 - 1 / max(1, history.visits), max(1, history.visits)
        towards_new, towards_total = total_G / visits + late * new_G, late * total_G + new_G / visits
        advantages.append(torch.where(towards_new.abs() < towards_total.abs(), towards_new, towards_total))
        after.append(history)
    return torch.stack(advantages).float(), after


def _visited(history: Visits, rewards: list[float]) -> Visits:
    """Statistics after one more visit: mean and sum of squares of two sets merged (Chan et al. 1983)."""
    if not rewards:
        return history
    mean = sum(rewards) / len(rewards)
    count = history.answers + len(rewards)
    gap = mean - history.mean
    squares = history.squares + sum((reward - mean) ** 2 for reward in rewards) + gap**2 * history.answers * len(rewards) / count
    return Visits(history.visits + 1, count, history.mean + gap * len(rewards) / count, squares)


def token_rewards(rewards_D: Tensor, penalties_N: Tensor, documents_N: Tensor, longest: int) -> Tensor:
    """r_t = -penalty_t, and + R at each answer's last token; shape (D, T), 0 after an answer's end."""
    rewards_DT = rows(-penalties_N, documents_N, len(rewards_D), longest)
    last_D = _lengths(documents_N, len(rewards_D)) - 1
    rewards_DT[torch.arange(len(rewards_D), device=rewards_DT.device), last_D] += rewards_D
    return rewards_DT


def returns_to_go(rewards_DT: Tensor, gamma: float) -> Tensor:
    """G_t = Σ_{k≥t} γ^{k-t} r_k."""
    return gae(rewards_DT, torch.zeros_like(rewards_DT), gamma, 1.0)


def gae(rewards_DT: Tensor, values_DT: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} - V_t (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    Rewards and values after an answer's end are 0, so its last token has no value to bootstrap from.
    """
    following_DT = torch.cat([values_DT[:, 1:], torch.zeros_like(values_DT[:, :1])], dim=1)
    deltas_DT = rewards_DT + gamma * following_DT - values_DT
    advantages_DT = torch.zeros_like(deltas_DT)
    later_D = torch.zeros_like(deltas_DT[:, 0])
    for t in reversed(range(deltas_DT.shape[1])):
        later_D = deltas_DT[:, t] + gamma * gae_lambda * later_D
        advantages_DT[:, t] = later_D
    return advantages_DT


def rows(values_N: Tensor, documents_N: Tensor, num_documents: int, longest: int) -> Tensor:
    """Values of tokens, one row per answer, 0 after its end: (N,) → (D, T)."""
    values_DT = torch.zeros(num_documents, longest, dtype=values_N.dtype, device=values_N.device)
    values_DT[documents_N, _within(documents_N, num_documents)] = values_N
    return values_DT


def flat(values_DT: Tensor, documents_N: Tensor) -> Tensor:
    """The reverse of `rows`: (D, T) → (N,)."""
    return values_DT[documents_N, _within(documents_N, len(values_DT))]


def _within(documents_N: Tensor, num_documents: int) -> Tensor:
    """Each token's position in its answer."""
    lengths_D = _lengths(documents_N, num_documents)
    return torch.arange(len(documents_N), device=documents_N.device) - (lengths_D.cumsum(0) - lengths_D)[documents_N]


def _lengths(documents_N: Tensor, num_documents: int) -> Tensor:
    """Tokens of each answer (without `bincount`, which reads the largest number first and so waits for the GPU)."""
    return sum_by_document(torch.ones_like(documents_N), documents_N, num_documents)
