"""GRPO's advantages, clipped objective and KL penalty: pure functions, in the papers' symbols.

Shapes: P prompts, G answers per prompt, N trained tokens of all answers. All inputs are fp32.
"""

import torch
from torch import Tensor


def group_advantages(rewards_PG: Tensor, epsilon: float = 1e-4) -> tuple[Tensor, Tensor]:
    """A_i = (R_i - mean R) / (std R + ε) within each prompt's answers (Shao et al. 2024, §4.1.2; std with G - 1).

    Missing rewards are NaN: they count neither in mean nor in std, and their advantage is 0.

    Returns:
        (advantages of shape (P, G), kept of shape (P, G)): answers of groups whose rewards are all equal carry no signal and
        are not kept, nor are missing ones.
    """
    present = ~rewards_PG.isnan()
    count = present.sum(1, keepdim=True)
    rewards = rewards_PG.nan_to_num(0.0)
    mean = rewards.sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(present, rewards - mean, 0.0)
    std = ((centred**2).sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    highest = torch.where(present, rewards, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(present, rewards, torch.inf).amin(1, keepdim=True)
    kept = present & (highest > lowest)
    return torch.where(kept, centred / (std + epsilon), 0.0), kept


def clipped_policy_loss(
    logps_N: Tensor, old_logps_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Σ_t -min(ρ_t A_t, clip(ρ_t, 1 - ε_low, 1 + ε_high) A_t), ρ_t = π_θ(y_t) / π_old(y_t)  (DAPO, arXiv 2503.14476, eq. 8).

    Returns:
        (the sum, the number of tokens whose gradient the clip cuts off).
    """
    ratio = (logps_N - old_logps_N).exp()
    free = ratio * advantages_N
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return -torch.minimum(free, bounded).sum(), (bounded < free).float().sum().detach()


def kl_k3(logps_N: Tensor, reference_logps_N: Tensor) -> Tensor:
    """Σ_t e^{-δ} - 1 + δ, δ = log π_θ - log π_ref: an estimate of KL(π_θ ‖ π_ref) that is never negative (Schulman 2020)."""
    delta = logps_N - reference_logps_N
    return ((-delta).exp() - 1 + delta).sum()
