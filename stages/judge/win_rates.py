"""Win rates of answers and policies against the other answers to the same prompt."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

from pedigree.stages.core.statistics import bootstrap_average


def win_rates(scores: Sequence[float], scale: float | None) -> list[float]:
    """P(y_i beats the policy) = 1/K Σ_k P(y_i beats y_k) over the K answers to a prompt, with P(y_i beats y_k) = σ(scale (s_i - s_k));
    without a scale, the higher score always wins.

    Wu et al. 2024, arXiv 2405.00675, algorithm 1; as in the authors' program (uclaml/SPPO, scripts/compute_prob.py), y_i itself is among
    the K. The probability of one answer against another is that of Bradley & Terry 1952.
    """
    return [sum(_wins(own - other, scale) for other in scores) / len(scores) for own in scores]


def _wins(gap: float, scale: float | None) -> float:
    if scale is None:
        return 0.5 if gap == 0 else float(gap > 0)
    return 0.5 * (1 + math.tanh(0.5 * scale * gap))  # σ(x), without overflow


def contests(scores: Mapping[str, Sequence[float]]) -> dict[tuple[str, str], float]:
    """How often a policy beats another on the same prompt: the share of all pairs of their answers in which its answer has the higher
    score; ties count half, and policies without answers are ignored.

    Returns:
        (policy, other policy) → share, in both directions; the two sum to 1.
    """
    answered = {name: values for name, values in scores.items() if values}
    found = {}
    for one, other in permutations(answered, 2):
        wins = [_wins(own - theirs, None) for own in answered[one] for theirs in answered[other]]
        found[one, other] = sum(wins) / len(wins)
    return found


class WinRate(NamedTuple):
    """How often a policy beats another over all prompts that both answered."""

    policy: str
    against: str
    prompts: int
    mean: float
    """Mean over prompts."""
    low: float
    high: float
    """Bounds of the 95 % interval over prompts."""


def win_rate_table(
    prompts: Iterable[Mapping[str, Sequence[float]]], policies: Sequence[str], *, resamples: int, seed: int
) -> list[WinRate]:
    """The matrix of `contests` over many prompts, row by row in the order of the policies; pairs without a common prompt have no entry."""
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    for scores in prompts:
        for pair, share in contests(scores).items():
            shares[pair].append(share)
    found: dict[tuple[str, str], WinRate] = {}
    for one, other in combinations(policies, 2):
        if won := shares.get((one, other)):
            mean, low, high = bootstrap_average(won, resamples=resamples, seed=seed)
            found[one, other] = WinRate(one, other, len(won), mean, low, high)
            found[other, one] = WinRate(other, one, len(won), 1 - mean, 1 - high, 1 - low)
    return [found[pair] for pair in permutations(policies, 2) if pair in found]
