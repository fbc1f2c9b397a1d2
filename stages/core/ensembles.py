"""Combine the rewards of several reward models, measure their agreement, and compute an answer's score.

All rewards are normalized to standard deviations of each member's held-out answers, so that members are comparable.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev, pvariance
from typing import TypeVar

from pedigree.configs.judging.scoring import Scorers
from pedigree.configs.methods.reward_terms import Ensemble, Mean, RewardProgram, UncertaintyWeighted, WorstCase

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Member:
    """The rewards of one reward model for many answers."""

    raw: Sequence[float | None]
    """None for answers that it could not score."""
    mean: float
    """Mean over its held-out answers."""
    std: float
    """Standard deviation over its held-out answers."""

    def normalised(self, place: int) -> float | None:
        raw = self.raw[place]
        return None if raw is None else (raw - self.mean) / self.std


def of_all(members: Iterable[Member], place: int) -> list[float] | None:
    """The normalized rewards of one answer; None without members, or if one could not score, because the others would form a different
    ensemble."""
    return all_known(member.normalised(place) for member in members)


def model_terms(scorers: Scorers, reward: float | None, rating: float | None) -> list[float | None]:
    """Terms of an answer's score from an ensemble's reward and a mean rating; terms of weight zero are omitted."""
    weighed = ((scorers.reward_weight, reward), (scorers.rating_weight, rating))
    return [None if number is None else weight * number for weight, number in weighed if weight > 0]


def program_terms(programs: Iterable[RewardProgram], values: Mapping[str, Sequence[float | str | None]], place: int) -> list[float | None]:
    """Terms of an answer's score from functions (`values`: name → value of each answer): None if a function could not score it, and none
    where a function leaves it out or has the weight 0."""
    found = ((program.weight, values[program.called][place]) for program in programs if program.weight)
    return [None if isinstance(value, str) else weight * value for weight, value in found if value is not None]


def total(terms: Iterable[float | None]) -> float | None:
    """The sum; None if a term is missing or there are none."""
    known = all_known(terms)
    return None if known is None else sum(known)


def all_known(numbers: Iterable[Number | None]) -> list[Number] | None:
    """The numbers; None if one is missing or there are none."""
    found = list(numbers)
    known = [number for number in found if number is not None]
    return known if known and len(known) == len(found) else None


def combine(rewards: Sequence[float], ensemble: Ensemble) -> float:
    """The ensemble's reward of one answer, from one normalized reward per member."""
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
    """Share of answer pairs to the same prompt that two members order alike, where a tie counts as a third order. None without pairs.

    Args:
        groups: for each prompt, the two members' rewards of each answer.
    """
    alike = total = 0
    for group in groups:
        for (a, b), (c, d) in combinations(group, 2):
            total += 1
            alike += (a > c) - (a < c) == (b > d) - (b < d)
    return alike / total if total else None
