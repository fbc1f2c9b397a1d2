"""Which prompts a step draws, and which groups and answers it trains on. Pure functions of rewards, seed and position.

All prompts are in one endless order, reshuffled each epoch. A step draws from a position, and the next step continues after the last prompt
that this one needed. The position and the prompts set aside are the only state. They are in the checkpoint, so a resumed run draws the same
prompts.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from pedigree.configs.methods.policy_gradient import Keep, Resampling
from pedigree.stages.core.batches import step_rows


class Cursor(NamedTuple):
    """Where a step's prompts begin."""

    position: int
    """In the order of all prompts."""
    set_aside: Sequence[int] = ()
    """Rows that are not drawn, in ascending order."""


class Choice(NamedTuple):
    """What to do with the groups drawn so far."""

    kept: list[int]
    """Numbers of the groups to train on."""
    used: int
    """Groups whose prompts count as visited; the next step draws the others again."""
    more: int
    """Prompts to draw next; 0 if the step is complete."""


def differ(values: Sequence[float]) -> bool:
    """Whether the known values are unequal; NaN is unknown."""
    return len({value for value in values if not math.isnan(value)}) > 1


def choose(informative: Sequence[bool], known: Sequence[bool], wanted: int, batches: int, resampling: Resampling | None) -> Choice:
    """Keep the first `wanted` informative groups: 0 < |{i : o_i is right}| < G (DAPO, arXiv 2503.14476, eq. 11).

    While some are missing, so many prompts are drawn that the share of informative groups so far would complete the step. If the bound is
    reached, the step trains on those that it has: other groups would only dilute the mean, and a repeated group would count twice. Without
    any, the first groups that have a reward are kept, and the update does what it does without resampling.

    Args:
        informative: of each group in the order of its prompt.
        known: whether any answer of the group has a reward.
        batches: batches of rollouts generated so far.
    """
    if resampling is None:
        return Choice(list(range(len(informative))), len(informative), 0)
    found = [number for number, good in enumerate(informative) if good]
    if len(found) >= wanted:
        return Choice(found[:wanted], found[wanted - 1] + 1, 0)
    expected = math.ceil((wanted - len(found)) * len(informative) / max(1, len(found)))
    more = min(resampling.batch(wanted), expected) if batches < resampling.max_batches else 0
    rewarded = [number for number, some in enumerate(known) if some]
    return Choice(found or (rewarded or list(range(len(informative))))[:wanted], len(informative), more)


def upcoming(position: int, num_prompts: int, seed: int, set_aside: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """(position, row) of the prompts from a position, each row once: a step meets no prompt twice, not even across epochs."""
    drawn = {*set_aside}
    while len(drawn) < num_prompts:
        (row,) = step_rows(position, num_prompts, 1, seed)
        if row not in drawn:
            yield position, row
        drawn.add(row)
        position += 1


def solved(before: Collection[int], pass_rates: Mapping[int, float], threshold: float | None, num_prompts: int, wanted: int) -> list[int]:
    """Rows that later steps do not draw, in ascending order: those of `before`, and those whose answers reached the threshold in this step.
    If fewer than a step requires would be left, all are drawn again: they were solved by earlier weights, and an error would lose the run.

    Args:
        pass_rates: of the rows that the step needed; those that the next step draws again are no visit.
    """
    if threshold is None:
        return []
    found = {*before, *(row for row, rate in pass_rates.items() if rate >= threshold)}
    return sorted(found) if num_prompts - len(found) >= wanted else []


def kept(rewards: Sequence[float], keep: Keep) -> set[int]:
    """Numbers of the chosen answers. Of equal rewards, that of the later answer counts as higher; a missing one (NaN) is not chosen."""
    order = sorted((place for place, reward in enumerate(rewards) if not math.isnan(reward)), key=lambda place: rewards[place])
    size = min(keep.answers, len(order))
    ends = {"top": [0], "extremes": [size // 2], "variance": range(size + 1)}[keep.by]
    chosen = [[*order[:low], *order[len(order) - size + low :]] for low in ends]

    def preference(places: list[int]) -> tuple[float, int]:
        values, low = [rewards[place] for place in places], chosen.index(places)
        mean = math.fsum(values) / max(1, size)
        return math.fsum((value - mean) ** 2 for value in values), -abs(2 * low - size)

    return set(max(chosen, key=preference))


def success(scores: Sequence[float], rewards: Sequence[float]) -> int | None:
    """Number of the right answer (v = 1) with the highest reward, the first of equal ones; None if none is right and has a reward."""
    right = [place for place, score in enumerate(scores) if score >= 1 and not math.isnan(rewards[place])]
    return max(right, key=lambda place: rewards[place], default=None)


def replaceable(scores: Sequence[float], rewards: Sequence[float]) -> int | None:
    """Number of the last wrong answer (v < 1) that has a reward, if no answer is right; an unknown score (NaN) is neither."""
    wrong = [place for place, score in enumerate(scores) if score < 1 and not math.isnan(rewards[place])]
    return wrong[-1] if wrong and not any(score >= 1 for score in scores) else None


def without_others(rewards: Sequence[float], group_size: int, keep: Keep | None) -> list[float]:
    """The rewards of whole groups, NaN for answers that are not chosen: those are in no advantage, no divisor and no forward pass."""
    if keep is None:
        return [*rewards]
    found: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        chosen = kept(group, keep)
        found += [reward if place in chosen else math.nan for place, reward in enumerate(group)]
    return found
