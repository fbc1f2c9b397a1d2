"""Select answers that are good enough to imitate, and rows with the best scores: pure functions of everything but the texts.

Scores and hashes of (seed, id) decide, independent of row order and of other prompts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from pedigree.configs.base.frozen import digest
from pedigree.configs.judging.selection import Above, AllAbove, BestAnswers, BestOfN, TopShare
from pedigree.data.records.answer_pool import AnswerFacts, value_of

NO_SCORE, BELOW, OUTSIDE = "no score", "below min_score", "outside the top share"
"""Reasons for dropping rows."""


class Scored(NamedTuple):
    """A row as seen by the selection."""

    id: str
    source: str
    score: float | None


def left_out(rows: Sequence[Scored], keep: TopShare | Above) -> list[str | None]:
    """For each row, why it is dropped, or None."""
    match keep:
        case Above(min_score=least):
            found: list[str | None] = [BELOW if row.score is not None and row.score < least else None for row in rows]
        case TopShare():
            best = _top(rows, keep)
            found = [None if place in best else OUTSIDE for place in range(len(rows))]
    return [NO_SCORE if row.score is None else reason for row, reason in zip(rows, found, strict=True)]


def _top(rows: Sequence[Scored], keep: TopShare) -> set[int]:
    """Places of the best rows, overall or per source, rounded up: a share of 0.3 of 11 rows is 4."""
    ranked: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.score is not None:
            ranked[row.source if keep.per_source else ""].append((-row.score, digest([keep.seed, row.id]), place))
    share = Fraction(str(keep.share))
    return {place for group in ranked.values() for *_, place in sorted(group)[: math.ceil(share * len(group))]}


def worth_imitating(group: Sequence[AnswerFacts], config: BestAnswers) -> list[AnswerFacts] | str:
    """The answers to keep for one prompt, best first, or why there are none.

    Equal texts are kept once. A hash breaks ties, because taking the first or the longest answer would be a bias.
    """
    scored = [one for one in group if one.value is not None]
    if not scored:
        return "no scored answer"
    ended = [one for one in scored if one.ended or config.truncated == "keep"]
    if not ended:
        return "no answer that came to its end"
    whole = [one for one in ended if not one.blank]
    if not whole:
        return "empty answers"
    formed = [one for one in whole if not one.malformed]
    if not formed:
        return "no well-formed conversation"
    good = [one for one in formed if is_good(one, config)]
    if not good:
        return "no answer above min_score"
    drawn = sorted(good, key=lambda one: digest([config.seed, one.id]))
    match config.keep:
        case BestOfN():
            return [max(drawn, key=value_of)]
        case AllAbove(max_per_prompt=most):
            different = {one.text: one for one in reversed(drawn)}  # the first draw of each text
            kept = [one for one in drawn if different[one.text] is one][:most]
            return sorted(kept, key=value_of, reverse=True)


def is_good(one: AnswerFacts, config: BestAnswers) -> bool:
    """Whether a scored answer reaches `min_score`."""
    return config.keep.min_score is None or value_of(one) >= config.keep.min_score


def pass_rate(group: Sequence[AnswerFacts], config: BestAnswers) -> float | None:
    """Share of a prompt's scored answers that are good enough, truncated or not; None if none is scored."""
    scored = [one for one in group if one.value is not None]
    return sum(is_good(one, config) for one in scored) / len(scored) if scored else None


def histogram(rates: Iterable[float]) -> dict[str, int]:
    """Number of prompts with rate 0, with rate 1, and in between by tenths: {"none": 3, "0.4": 2, "all": 1}; empty bins are omitted.

    A bin includes its lower edge.
    """
    counts = Counter(_bin(rate) for rate in rates)
    return {name: counts[name] for name in ("none", *(f"0.{tenth}" for tenth in range(10)), "all") if counts[name]}


def _bin(rate: float) -> str:
    if rate <= 0:
        return "none"
    return "all" if rate >= 1 else f"0.{math.floor(10 * rate)}"
