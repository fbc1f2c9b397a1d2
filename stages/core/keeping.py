"""Which answers to a prompt are good enough to be imitated: pure functions of what is known of answers but their words.

Scores and hashes of (seed, answer id) decide: neither the order of rows nor other prompts change what is kept.
"""

from collections.abc import Sequence

from configs.frozen import digest
from configs.keeping import AllAbove, BestAnswers, BestOfN
from data.answers import Said


def worth_imitating(group: Sequence[Said], config: BestAnswers) -> list[Said] | str:
    """The answers of one prompt that are kept, best first, or why there are none.

    Of equal texts one is kept. Among equally good answers a hash decides: taking the first, or the longest, would be a bias.
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
    good = [one for one in whole if is_good(one, config)]
    if not good:
        return "no answer above min_score"
    drawn = sorted(good, key=lambda one: digest([config.seed, one.id]))
    match config.keep:
        case BestOfN():
            return [max(drawn, key=score)]
        case AllAbove(max_per_prompt=most):
            different = {one.text: one for one in reversed(drawn)}  # of equal texts the first that is drawn
            kept = [one for one in drawn if different[one.text] is one][:most]
            return sorted(kept, key=score, reverse=True)


def is_good(one: Said, config: BestAnswers) -> bool:
    """Whether an answer that has a score reaches the least that is asked for."""
    return config.keep.min_score is None or score(one) >= config.keep.min_score


def score(one: Said) -> float:
    """The score of an answer that has one."""
    assert one.value is not None
    return one.value


def pass_rate(group: Sequence[Said], config: BestAnswers) -> float | None:
    """The share of a prompt's scored answers that are good enough, however they ended; None where none is scored."""
    scored = [one for one in group if one.value is not None]
    return sum(is_good(one, config) for one in scored) / len(scored) if scored else None
