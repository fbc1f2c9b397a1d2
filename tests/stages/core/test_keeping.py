"""Which answers are worth imitating: by hand, by chance among equals, and by nothing that they do not depend on."""

import random
from collections import Counter
from typing import Any

import pytest
from answers_lab import said
from pydantic import ValidationError

from pedigree.configs.judging.selection import Above, BestAnswers, SelectPrompts, TopShare
from pedigree.data.records.answer_pool import AnswerFacts
from pedigree.stages.core.keeping import Scored, histogram, left_out, pass_rate, worth_imitating


def config(keep: Any, **more: Any) -> BestAnswers:
    return BestAnswers.model_validate({"keep": keep} | more)


def kept(group: list[AnswerFacts], keep: Any, **more: Any) -> Any:
    found = worth_imitating(group, config(keep, **more))
    return found if isinstance(found, str) else [one.policy for one in found]


GROUP = [said("a", 0.5), said("b", 1.0), said("c", 1.0), said("d", 0.0), said("e", None)]


def above(least: float, most: int | None = None) -> dict[str, Any]:
    return {"type": "all_above", "min_score": least, "max_per_prompt": most}


def test_the_best_of_n_is_one_of_the_best_and_chance_says_which():
    found = Counter(kept(GROUP, "best_of_n", seed=seed)[0] for seed in range(100))
    assert set(found) == {"b", "c"} and min(found.values()) > 30  # 50 are due, with a deviation of 5
    assert kept([said("a", -3.0), said("b", -2.0)], "best_of_n") == ["b"]
    assert kept(GROUP[:1], {"type": "best_of_n", "min_score": 0.75}) == "no answer above min_score"


def test_every_answer_from_the_least_score_on_is_kept_the_best_first():
    assert sorted(kept(GROUP, above(0.5))) == ["a", "b", "c"] and kept(GROUP, above(0.5))[-1] == "a"
    assert set(kept(GROUP, above(1.0))) == {"b", "c"} and kept(GROUP[3:], above(0.5)) == "no answer above min_score"


def test_at_most_so_many_are_drawn_whatever_their_score():
    """Those that are good enough are alike: taking the best scored would train on what a reward model likes by error."""
    found = Counter(name for seed in range(100) for name in kept(GROUP, above(0.5, 2), seed=seed))
    assert set(found) == {"a", "b", "c"} and sum(found.values()) == 200 and min(found.values()) > 47  # 67 are due, with a deviation of 4.7


def test_equal_texts_are_kept_once():
    same = [said("a", 1.0, text="x"), said("b", 1.0, text="x"), said("c", 1.0, text="y")]
    assert all(len(kept(same, above(1.0), seed=seed)) == 2 for seed in range(20))
    assert {name for seed in range(20) for name in kept(same, above(1.0), seed=seed)} == {"a", "b", "c"}


def test_answers_that_are_none_are_not_imitated():
    assert kept([said("a", None)], "best_of_n") == "no scored answer"
    cut = [said("a", 1.0, ended=False), said("b", 0.5)]
    assert kept(cut, "best_of_n") == ["b"] and kept(cut, "best_of_n", truncated="keep") == ["a"]
    assert kept(cut[:1], "best_of_n") == "no answer that came to its end"
    assert kept([said("a", 1.0, blank=True)], "best_of_n") == "empty answers"
    malformed = [said("a", 1.0, malformed=True), said("b", 0.5)]
    assert kept(malformed, "best_of_n") == ["b"] and kept(malformed[:1], "best_of_n") == "no well-formed conversation"


@pytest.mark.parametrize("keep", ["best_of_n", above(0.5, 2)])
def test_the_order_of_answers_changes_nothing(keep):
    draw = random.Random(3)
    for seed in range(20):
        assert kept(draw.sample(GROUP, 5), keep, seed=seed) == kept(GROUP, keep, seed=seed)


def test_a_pass_rate_counts_what_was_scored_however_it_ended():
    group = [*GROUP, said("f", 1.0, ended=False)]  # 3 of 5
    assert pass_rate(group, config(above(1.0))) == 0.6 and pass_rate(GROUP[4:], config(above(1.0))) is None


def test_rates_are_counted_by_tenths_between_none_and_all():
    assert histogram([0.0, 0.0, 1.0, 0.3, 0.25, 0.99, 1 / 16]) == {"none": 2, "0.0": 1, "0.2": 1, "0.3": 1, "0.9": 1, "all": 1}
    assert histogram([tenth / 10 for tenth in range(11)]) == {"none": 1, **{f"0.{tenth}": 1 for tenth in range(1, 10)}, "all": 1}
    assert histogram([]) == {}


def test_what_would_keep_everything_or_nothing_is_refused():
    with pytest.raises(ValidationError, match="min_mean and max_mean are both unset, so every prompt is kept"):
        SelectPrompts()
    with pytest.raises(ValidationError, match=r"max_mean 0.2 is below min_mean 0.5: raise it"):
        SelectPrompts(min_mean=0.5, max_mean=0.2)
    with pytest.raises(ValidationError, match="min_score\n  Field required"):
        config("all_above")


def left(scores: str, keep: Any, order: int = 1) -> str:
    """Which rows stay, by id; a row is e.g. `a1`: of source a, with score 1; `-` is none."""
    rows = [Scored(f"{number}{one}", one[0], None if one[1:] == "-" else float(one[1:])) for number, one in enumerate(scores.split())]
    reasons = left_out(rows[::order], keep)
    return " ".join(sorted(row.id for row, reason in zip(rows[::order], reasons, strict=True) if reason is None))


def test_a_share_is_of_what_has_a_score_and_of_each_source_where_it_says_so():
    rows = "a9 a8 a7 a- a- b3 b2 b1 b0"  # seven have a score
    assert left(rows, TopShare(type="top_share", share=0.3)) == "0a9 1a8 2a7"
    assert left(rows, TopShare(type="top_share", share=0.3, per_source=True)) == "0a9 5b3 6b2"
    assert left("a1 a2 a3 a4 a5 a6 a7 a8 a9 a10", TopShare(type="top_share", share=0.1)) == "9a10"  # a tenth, and no row more


def test_of_equal_rows_a_hash_decides_and_not_their_order():
    rows, kept = " ".join(["a1"] * 20), set()
    for seed in range(5):
        keep = TopShare(type="top_share", share=0.2, seed=seed)
        assert left(rows, keep) == left(rows, keep, order=-1) and len(left(rows, keep).split()) == 4
        kept.add(left(rows, keep))
    assert len(kept) == 5


def test_above_takes_the_bound_itself_and_nothing_without_a_score():
    assert left("a1 a2 a- b3", Above(type="above", min_score=2)) == "1a2 3b3"
    assert left_out([Scored("x", "a", None), Scored("y", "a", 1.0)], Above(type="above", min_score=2)) == ["no score", "below min_score"]
