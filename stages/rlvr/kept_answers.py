"""Which answers of a group are trained on: a pure function of their rewards."""

import math
from collections.abc import Sequence

from pedigree.configs.methods.policy_gradient import Keep


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
