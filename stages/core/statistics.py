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


def bootstrap_average(
    scores: Sequence[float],
    *,
    groups: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    resamples: int,
    seed: int,
) -> Interval:
    """Percentile bootstrap of an average over items, resampled within their groups (stratified; Efron & Tibshirani 1993, §8.3, §13.3).

    Equal seeds and lengths draw equal resamples, so two policies scored on the same items are resampled alike.
    (1/G) Σ_g Σ_{i in g} w_i s_i / Σ_{i in g} w_i: with groups the macro average, with equal weight per group; with one group and equal
    weights the mean over items.

    Args:
        scores: [N], one per item.
        groups: [N], names; a single group if absent. Groups are resampled in the order of their names.
        weights: [N], above 0, e.g. the number of a prompt's instructions; all 1 if absent.

    Raises:
        ValueError: no scores, a non-finite score, a weight of 0 or less, or lists of unequal length.
    """
    values_N = np.asarray(scores, dtype=np.float64)
    weights_N = np.ones_like(values_N) if weights is None else np.asarray(weights, dtype=np.float64)
    names = [""] * values_N.size if groups is None else list(groups)
    if values_N.size == 0:
        raise ValueError("no scores: an average needs at least one item")
    if not len(names) == weights_N.size == values_N.size:
        raise ValueError(f"{values_N.size} scores, {len(names)} groups and {weights_N.size} weights: the numbers must be equal")
    if not np.isfinite(values_N).all():
        raise ValueError(f"score {int(np.flatnonzero(~np.isfinite(values_N))[0])} is not finite")
    if not (weights_N > 0).all():
        raise ValueError(f"weight {int(np.flatnonzero(~(weights_N > 0))[0])} is not above 0")
    members: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        members.setdefault(name, []).append(place)
    parts = [(values_N[places], weights_N[places]) for _, places in sorted(members.items())]
    generator = np.random.default_rng([seed, values_N.size])
    averages = np.empty(resamples)
    for number in range(resamples):  # one resample at a time: resamples x items may not fit in memory
        drawn = [generator.integers(0, values.size, values.size) for values, _ in parts]
        averages[number] = _average([(values[places], shares[places]) for places, (values, shares) in zip(drawn, parts, strict=True)])
    low, high = np.quantile(averages, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(_average(parts), float(low), float(high))


def _average(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The mean over (values, weights) of the weighted mean of each."""
    if len(parts) == 1 and (parts[0][1] == 1).all():
        return float(parts[0][0].mean())
    return float(np.mean([np.average(values, weights=weights) for values, weights in parts]))


def paired_difference(candidate: Sequence[float], baseline: Sequence[float], *, resamples: int, seed: int) -> Interval:
    """Percentile bootstrap of mean(candidate - baseline), item by item.

    Raises:
        ValueError: the two differ in length, are empty, or have non-finite scores.
    """
    differences = [a - b for a, b in zip(candidate, baseline, strict=True)]
    return bootstrap_average(differences, resamples=resamples, seed=seed)


def wilson(share: float, trials: int) -> Interval:
    """Score interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22:209), which is informative even for 10 of 10.

    (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n), p the share of successes in n independent trials.

    Raises:
        ValueError: no trials, or a share outside [0, 1].
    """
    if trials < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share of {share} of {trials} trials has no interval: it must be in [0, 1], of at least one trial")
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))

    def lower(p: float) -> float:
        """The product of both ends is p² / (1 + z²/n). Dividing by the other end avoids cancellation, and is exactly 0 for 0."""
        return p**2 / (p + z**2 / (2 * trials) + half)

    return Interval(share, lower(share), 1 - lower(1 - share))
