"""One reward of an answer from those of several reward models, and how far the members agree.

All rewards are normalised: in standard deviations of each member's own held-out answers, so that members can be compared.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, pstdev, pvariance

from configs.answers import Ensemble, Mean, UncertaintyWeighted, WorstCase


def combine(rewards: Sequence[float], ensemble: Ensemble) -> float:
    """The ensemble's reward of one answer, from one normalised reward of each member."""
    match ensemble:
        case Mean():
            return fmean(rewards)
        case WorstCase():
            return min(rewards)
        case UncertaintyWeighted(weight=weight):
            return uncertainty_weighted(rewards, weight)


def uncertainty_weighted(rewards: Sequence[float], weight: float) -> float:
    """R̄ - λ (1/k) Σ_i (R_i - R̄)²  (UWO: Coste et al. 2024, arXiv 2310.02743, eq. 5)."""
    return fmean(rewards) - weight * pvariance(rewards)


def disagreement(rewards: Sequence[float]) -> float:
    """Standard deviation over the members."""
    return pstdev(rewards)


def agreement(groups: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Share of pairs of answers to one prompt that two members order alike; a tie is an order of its own. None without pairs.

    Args:
        groups: for each prompt, the two members' rewards of each of its answers.
    """
    alike = total = 0
    for group in groups:
        for (a, b), (c, d) in combinations(group, 2):
            total += 1
            alike += (a > c) - (a < c) == (b > d) - (b < d)
    return alike / total if total else None
