"""Turn the answers to a prompt into preferences, and select preferences within a budget: pure functions of everything but the texts.

Scores and hashes of (seed, id) decide, independent of row order and of other prompts, except that prompts compete for a budget.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import pvariance
from typing import NamedTuple

from pedigree.configs.base.frozen import digest
from pedigree.configs.judging.pairing import AllPairs, Budget, Delta, Pair, Relaxed, TopVsBottom
from pedigree.data.records.answer_pool import AnswerFacts, value_of
from pedigree.data.records.records import derived_from
from pedigree.stages.core.added_constraints import PART
from pedigree.stages.core.drawing import uniform

Ranked = tuple[AnswerFacts, ...]
"""Answers, best first."""


class Preferred(NamedTuple):
    """A preference without its texts."""

    id: str
    ranked: Ranked
    """Answers in the judge's order, best first."""
    strength: float | None = None
    exchanged: bool = False
    """Whether label noise reverses the texts; scores stay in place, as if the judge had confused the answers."""

    @property
    def ranking(self) -> Ranked:
        """The answer whose text is at each rank."""
        return self.ranked[::-1] if self.exchanged else self.ranked

    @property
    def gap(self) -> float | None:
        """Score gap between the first and the last answer; None without scores."""
        first, last = self.ranked[0].value, self.ranked[-1].value
        return None if first is None or last is None else first - last


def preferences(group: Sequence[AnswerFacts], config: Pair) -> list[Preferred] | str:
    """The preferences of one prompt, or why there are none.

    A hash of (seed, answer id) breaks ties, because taking the first or the longest answer would be a bias.
    """
    match config.strategy:
        case Delta():
            found = _delta(group, config.strategy, config)
        case Relaxed():
            found = _relaxed(group, config.strategy, config)
        case _:
            found = _scored(group, config)
    if isinstance(found, str):
        return found
    lists, strength = found
    several = isinstance(config.strategy, AllPairs)
    made = [_named(ranked, f"/{number}" if several else "", strength, config) for number, ranked in enumerate(lists)]
    worded = [one for one in made if not one.ranking[0].blank]
    return worded or "empty best answer"


def _named(ranked: Ranked, number: str, strength: float | None, config: Pair) -> Preferred:
    name = f"{ranked[0].prompt_id}/{config.strategy.type}{number}"
    return Preferred(name, ranked, strength, uniform(config.seed, "label_noise", name) < config.label_noise)


def _scored(group: Sequence[AnswerFacts], config: Pair) -> tuple[list[Ranked], float | None] | str:
    """(answers to compare, common strength), or why there are none."""
    scored = [one._replace(value=one.value - config.length_penalty * one.length) for one in group if one.value is not None]
    if len(scored) < 2:
        return "fewer than two scored answers"
    if len({one.text for one in scored}) < 2:
        return "identical texts"
    if config.truncated == "drop":
        scored = [one for one in scored if one.ended]
        if len(scored) < 2:
            return "fewer than two answers that came to their end"
    drawn = _in_order_of_chance(scored, config.seed)
    if config.strategy.type in OF_TEXTS:
        drawn = _texts(drawn)
        if len(drawn) < 2:
            return "identical texts"
    best, worst = max(map(value_of, drawn)), min(map(value_of, drawn))
    if config.min_best is not None and best < config.min_best:
        return "best below min_best"
    if best == worst:
        return _tie(drawn) if config.ties == "keep" else "tie"
    if best - worst < config.min_gap:
        return "gap below min_gap"
    ranked = STRATEGIES[config.strategy.type](drawn, config)
    if not ranked:
        return "gap above max_gap"
    different = [some for some in ranked if len({one.text for one in some}) > 1]
    return (different, None) if different else "identical texts"


def _tie(drawn: Sequence[AnswerFacts]) -> tuple[list[Ranked], float] | str:
    """The first two different texts, with strength ½."""
    other = next((one for one in drawn if one.text != drawn[0].text), None)
    return ([(drawn[0], other)], 0.5) if other else "identical texts"


def _delta(group: Sequence[AnswerFacts], strategy: Delta, config: Pair) -> tuple[list[Ranked], None] | str:
    """The first pair of answers of the stronger and the weaker policy with different texts."""
    drawn = _in_order_of_chance(group, config.seed)
    sides = []
    for policy in (strategy.strong, strategy.weak):
        own = [one for one in drawn if one.policy == policy]
        if not own:
            return f"no answer of {policy}"
        ended = own if config.truncated == "keep" else [one for one in own if one.ended]
        if not ended:
            return f"no answer of {policy} that came to its end"
        sides.append(ended)
    return _first_pair(*sides)


def _relaxed(group: Sequence[AnswerFacts], strategy: Relaxed, config: Pair) -> tuple[list[Ranked], None] | str:
    """The first pair of answers to the constrained and the original prompt with different texts."""
    if derived_from(group[0].prompt_id, PART) is None:
        return "made of no other prompt"
    drawn = _in_order_of_chance(group, config.seed)
    chosen, rejected = ([one for one in drawn if one.relaxed == relaxed] for relaxed in (False, True))
    if not rejected:
        return "no answer to the prompt that it was made of"
    if config.truncated == "drop":
        chosen, rejected = ([one for one in side if one.ended] for side in (chosen, rejected))
        if not chosen or not rejected:
            return "no answer of one side that came to its end"
    if strategy.verified:
        chosen = [one for one in chosen if one.value == 1]
        if not chosen:
            return "no answer follows the constraints"
        rejected = [one for one in rejected if one.value is not None and one.value < 1]
        if not rejected:
            return "answers without the constraints follow them, too"
    return _first_pair(chosen, rejected)


def _first_pair(better: Sequence[AnswerFacts], worse: Sequence[AnswerFacts]) -> tuple[list[Ranked], None] | str:
    """The first pair with different texts."""
    first = next(((one, other) for one in better for other in worse if one.text != other.text), None)
    return ([first], None) if first else "identical texts"


def _in_order_of_chance(answers: Sequence[AnswerFacts], seed: int) -> list[AnswerFacts]:
    return sorted(answers, key=lambda one: digest([seed, one.id]))


def fits(better: AnswerFacts, worse: AnswerFacts, config: Pair) -> bool:
    """Whether the first answer is better and good enough, with a gap within the bounds."""
    gap = value_of(better) - value_of(worse)
    good = config.min_best is None or value_of(better) >= config.min_best
    return good and gap > 0 and gap >= config.min_gap and (config.max_gap is None or gap <= config.max_gap)


def best_and_worst(drawn: Sequence[AnswerFacts], config: Pair) -> list[Ranked]:
    """The first of the best answers, and the first of the worst."""
    pair = max(drawn, key=value_of), min(drawn, key=value_of)
    return [pair] if fits(*pair, config) else []


def best_and_one_lower(drawn: Sequence[AnswerFacts], config: Pair) -> list[Ranked]:
    """The first of the best answers, and a random lower one within the bounds. A lower answer with the same text as the best one, on which
    the judge contradicted itself, is taken only if there is no other."""
    best = max(drawn, key=value_of)
    lower = [one for one in drawn if fits(best, one, config)]
    return [(best, next((one for one in lower if one.text != best.text), lower[0]))] if lower else []


def one_of_top_and_bottom(drawn: Sequence[AnswerFacts], config: Pair) -> list[Ranked]:
    """A uniformly drawn pair of the k best with the k worst, among those that fit."""
    assert isinstance(config.strategy, TopVsBottom)
    ordered, k = sorted(drawn, key=value_of, reverse=True), config.strategy.k
    fitting = [(top, bottom) for top in ordered[:k] for bottom in ordered[-k:] if fits(top, bottom, config)]
    different = [pair for pair in fitting if pair[0].text != pair[1].text]
    return sorted(different or fitting, key=lambda pair: _chance(pair, config))[:1]


def every_pair(drawn: Sequence[AnswerFacts], config: Pair) -> list[Ranked]:
    """Pairs of different texts that fit, in random order."""
    assert isinstance(config.strategy, AllPairs)
    fitting = [pair for pair in combinations(drawn, 2) if fits(*pair, config)]
    fitting = [pair for pair in fitting if not pair[0].blank] or fitting  # only blank ones: the caller has a reason for that
    return sorted(fitting, key=lambda pair: _chance(pair, config))[: config.strategy.per_prompt]


def all_by_rank(drawn: Sequence[AnswerFacts], config: Pair) -> list[Ranked]:
    """Every text once, best first."""
    return [tuple(drawn)] if fits(drawn[0], drawn[-1], config) else []


def _texts(drawn: Sequence[AnswerFacts]) -> list[AnswerFacts]:
    """Every text once, with its best score, best first."""
    by_text = {one.text: one for one in sorted(drawn, key=value_of)}
    return sorted(by_text.values(), key=value_of, reverse=True)


def _chance(pair: Ranked, config: Pair) -> str:
    return digest([config.seed, "pair", *(one.id for one in pair)])


STRATEGIES: dict[str, Callable[[Sequence[AnswerFacts], Pair], list[Ranked]]] = {
    "best_vs_worst": best_and_worst,
    "best_vs_random_lower": best_and_one_lower,
    "top_vs_bottom": one_of_top_and_bottom,
    "all_pairs": every_pair,
    "ranked": all_by_rank,
}
"""Strategy → function from a prompt's answers, in random order, to its preferences; empty if no gap is within the bounds. Precondition: the
best score exceeds the worst by at least `min_gap`."""
OF_TEXTS = ("all_pairs", "ranked")
"""Strategies that use each distinct text once."""


# --- a budget ----------------------------------------------------------------------------------------------------------


def within(budget: Budget, found: Sequence[Preferred], seed: int) -> list[Preferred]:
    """The most informative preferences within the budget, in input order."""

    def place(one: Preferred) -> tuple[float, str]:
        return -INFORMATION[budget.choose](one), digest([seed, "budget", one.id])

    kept = {one.id for one in sorted(found, key=place)[: budget.pairs]}
    return [one for one in found if one.id in kept]


def disagreement(one: Preferred) -> float:
    """Variance over reward models of σ(r_w - r_l); 0 if one could not score, or if there are fewer than two."""
    first, last = one.ranked[0].rewards, one.ranked[-1].rewards
    if len(first) < 2 or len(last) < 2:
        return 0.0
    return pvariance(0.5 * (1 + math.tanh(0.5 * (r_w - r_l))) for r_w, r_l in zip(first, last, strict=True))


INFORMATION: dict[str, Callable[[Preferred], float]] = {
    "disagreement": disagreement,
    "smallest_gap": lambda one: -(one.gap or 0.0),
    "largest_gap": lambda one: one.gap or 0.0,
    "random": lambda one: 0.0,
}
"""Criterion of a budget → information of a preference; the most informative ones are kept."""
