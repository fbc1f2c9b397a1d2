"""Calibration and accuracy of a reward model on held-out pairs: pure functions of scores, lengths and labels.

Shapes: P pairs, each with the gap Δ = s_w - s_l of its scores. A Bradley–Terry model predicts P(w is better) = σ(Δ). Labels always name
the better answer, so accuracy refers to the answer that the model prefers, with confidence σ(|Δ|).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Pairs with similar confidence."""

    low: float
    high: float
    """Confidence in [low, high); the last bin includes 1."""
    pairs: int
    confidence: float
    """Mean of σ(|Δ|)."""
    accuracy: float
    """Mean probability, according to the labels, that the preferred answer is the better one; equal scores count half."""


def sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(values, -700, 700)))


def reliability(gaps_P: Sequence[float], strengths_P: Sequence[float]) -> list[Bin]:
    """Non-empty bins of equal width over confidences from ½ to 1.

    `strengths_P` are P(w is better) according to the labels; 1 if certain.
    """
    gaps, strengths = np.asarray(gaps_P, dtype=np.float64), np.asarray(strengths_P, dtype=np.float64)
    confidence = sigmoid(np.abs(gaps))
    right = np.where(gaps > 0, strengths, np.where(gaps < 0, 1 - strengths, 0.5))
    place = np.minimum(((confidence - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    bins = []
    for number in range(NUM_BINS):
        inside = place == number
        if inside.any():
            low, high = (0.5 + edge / (2 * NUM_BINS) for edge in (number, number + 1))
            bins.append(Bin(low, high, int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean())))
    return bins


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Σ_b |b| / P · |accuracy(b) - confidence(b)|  (Guo et al. 2017, arXiv 1706.04599, eq. 3)."""
    total = sum(one.pairs for one in bins)
    return sum(one.pairs * abs(one.accuracy - one.confidence) for one in bins) / total


def brier(gaps_P: Sequence[float], strengths_P: Sequence[float]) -> float:
    """Mean of (σ(Δ) - p)²  (Brier 1950, one class)."""
    return float(np.mean((sigmoid(np.asarray(gaps_P, dtype=np.float64)) - np.asarray(strengths_P)) ** 2))


def log_loss(gaps_P: Sequence[float], strengths_P: Sequence[float]) -> float:
    """Mean of -p log σ(Δ) - (1 - p) log σ(-Δ); log 2 for an uninformative model."""
    gaps, strengths = np.asarray(gaps_P, dtype=np.float64), np.asarray(strengths_P, dtype=np.float64)
    return float(np.mean(strengths * np.logaddexp(0, -gaps) + (1 - strengths) * np.logaddexp(0, gaps)))


def accuracy(gaps: Sequence[float]) -> float | None:
    """Share of pairs whose better answer has the higher score (ties count as wrong); None without pairs."""
    return sum(gap > 0 for gap in gaps) / len(gaps) if gaps else None


@dataclass(frozen=True)
class Quarter:
    """Pairs with similar label margins."""

    low: float
    high: float
    """Smallest and largest label margin."""
    pairs: int
    accuracy: float


def accuracy_by_margin(gaps_P: Sequence[float], margins_P: Sequence[float]) -> list[Quarter]:
    """Accuracy by quartile of the label margin, smallest first; equal margins stay together, so there may be fewer than four."""
    margins = np.asarray(margins_P, dtype=np.float64)
    if margins.size == 0:
        return []
    place = np.searchsorted(np.unique(np.quantile(margins, [0.25, 0.5, 0.75])), margins, side="left")
    quarters = []
    for number in np.unique(place):
        inside = place == number
        right = [gap > 0 for gap, taken in zip(gaps_P, inside, strict=True) if taken]
        quarters.append(Quarter(float(margins[inside].min()), float(margins[inside].max()), len(right), sum(right) / len(right)))
    return quarters


def ranks(values: Sequence[float]) -> Floats:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson correlation of the ranks (Spearman 1904); None if either side is constant or has fewer than two values."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def ordered_triples(lists: Mapping[str, Sequence[tuple[str, str]]], scores: Mapping[tuple[str, str], float]) -> tuple[int, int]:
    """(triples whose scores are in the labels' order, all triples) of ranked lists.

    Scalar scores are always transitive, but they can disagree with the list. A triple a > b > c counts if (a, b) and (b, c) are pairs of
    the list.

    Args:
        lists: list id → its pairs (better, worse).
        scores: (list id, answer) → score.
    """
    right = total = 0
    for name, pairs in lists.items():
        below: dict[str, list[str]] = defaultdict(list)
        for better, worse in pairs:
            below[better].append(worse)
        for first, seconds in list(below.items()):
            for second in seconds:
                for third in below.get(second, ()):
                    total += 1
                    right += scores[name, first] > scores[name, second] > scores[name, third]
    return right, total
