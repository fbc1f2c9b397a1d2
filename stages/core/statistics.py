"""Intervals over benchmark items."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap_mean(scores: Sequence[float], *, resamples: int, seed: int) -> Interval:
    """Percentile bootstrap of the mean over items (Efron & Tibshirani 1993, §13.3).

    Equal seeds and lengths draw equal resamples, so two policies scored on the same items are resampled alike.

    Raises:
        ValueError: no scores, or one that is not finite.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no scores: an interval needs at least one item")
    if not np.isfinite(values).all():
        raise ValueError(f"score {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    generator = np.random.default_rng([seed, values.size])
    means = np.empty(resamples)
    for number in range(resamples):  # one resample at a time: resamples x items need not fit in memory
        means[number] = values[generator.integers(0, values.size, values.size)].mean()
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def paired_difference(candidate: Sequence[float], baseline: Sequence[float], *, resamples: int, seed: int) -> Interval:
    """Percentile bootstrap of mean(candidate - baseline), item by item.

    Args:
        candidate: scores of one policy.
        baseline: scores of another on the same items in the same order.

    Raises:
        ValueError: the two differ in length, or hold no or non-finite scores.
    """
    differences = [a - b for a, b in zip(candidate, baseline, strict=True)]
    return bootstrap_mean(differences, resamples=resamples, seed=seed)


def wilson(share: float, trials: int) -> Interval:
    """Score interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22:209), which says something about 10 of 10, too.

    (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n)

    Args:
        share: p, of the trials that succeeded.
        trials: n, independent of each other.

    Raises:
        ValueError: no trials, or a share outside [0, 1].
    """
    if trials < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share of {share} of {trials} trials has no interval: it lies in [0, 1], of at least one trial")
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))

    def lower(p: float) -> float:
        """The product of both ends is p² / (1 + z²/n): so without a difference that rounds, and exactly 0 for 0."""
        return p**2 / (p + z**2 / (2 * trials) + half)

    return Interval(share, lower(share), 1 - lower(1 - share))
