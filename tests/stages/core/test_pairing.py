"""Which answers are compared, and which preferences a budget keeps: by hand, by chance, and by nothing that they do not depend on."""

import math
import random
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from answers_lab import said
from pydantic import ValidationError

from pedigree.configs.judging.pairing import Pair
from pedigree.data.records.answer_pool import AnswerFacts
from pedigree.stages.pair.pair_selection import Preferred, disagreement, preferences
from pedigree.stages.pair.run import chosen

EVERY = [
    {"strategy": "best_vs_worst"},
    {"strategy": "best_vs_random_lower", "max_gap": 2.0},
    {"strategy": {"type": "top_vs_bottom", "k": 2}},
    {"strategy": {"type": "all_pairs", "per_prompt": 2}},
    {"strategy": "ranked"},
    {"strategy": {"type": "delta", "strong": "m0", "weak": "m1"}},
    {"strategy": "best_vs_worst", "ties": "keep", "length_penalty": 0.01},
]


def made(group: list[AnswerFacts], **config: Any) -> Any:
    return preferences(group, Pair.model_validate(config))


def sides(group: list[AnswerFacts], **config: Any) -> list[tuple[str, ...]]:
    """The policies of each preference, best first."""
    found = made(group, **config)
    assert not isinstance(found, str), found
    return [tuple(one.policy for one in preferred.ranked) for preferred in found]


def drawn(group: list[AnswerFacts], seeds: int, **config: Any) -> Counter:
    return Counter(pair for seed in range(seeds) for pair in sides(group, seed=seed, **config))


FIVE = [said(label, value) for label, value in zip("abcde", (5.0, 4.0, 3.0, 2.0, 1.0), strict=True)]


# --- what is compared ----------------------------------------------------------------------------------------------------


def test_a_character_costs_what_the_penalty_says():
    # 2 - 0.001 · 1500 = 0.5 and 1 - 0.001 · 100 = 0.9: the shorter one is better
    group = [said("long", 2.0, length=1500), said("short", 1.0, length=100)]
    assert sides(group) == [("long", "short")] and sides(group, length_penalty=0.001) == [("short", "long")]
    (one,) = made(group, length_penalty=0.001)
    assert [answer.value for answer in one.ranked] == pytest.approx([0.9, 0.5]) and one.gap == pytest.approx(0.4)
    assert made(group, length_penalty=0.001, min_gap=0.5) == "gap below min_gap"


def test_what_any_model_tells_apart_is_out_of_bounds():
    assert made(FIVE, max_gap=3.5) == "gap above max_gap" and sides(FIVE, max_gap=4.0) == [("a", "e")]
    assert set(drawn(FIVE, 60, strategy="best_vs_random_lower", min_gap=2.0, max_gap=3.0)) == {("a", "c"), ("a", "d")}
    assert made(FIVE, strategy="ranked", max_gap=3.0) == "gap above max_gap"
    every = sides(FIVE, strategy={"type": "all_pairs"}, min_gap=3.0, max_gap=3.0)
    assert sorted(every) == [("a", "d"), ("b", "e")]


def test_nothing_below_the_least_is_chosen():
    assert made(FIVE, min_best=5.5) == "best below min_best" and sides(FIVE, min_best=5.0) == [("a", "e")]
    assert {better for better, _ in sides(FIVE, strategy={"type": "all_pairs"}, min_best=4.0)} == {"a", "b"}
    assert set(drawn(FIVE, 60, strategy={"type": "top_vs_bottom", "k": 4}, min_best=5.0)) == {("a", other) for other in "bcde"}


def test_one_of_the_best_meets_one_of_the_worst_each_as_often():
    found = drawn(FIVE, 400, strategy={"type": "top_vs_bottom", "k": 2})
    assert set(found) == {("a", "d"), ("a", "e"), ("b", "d"), ("b", "e")}
    assert min(found.values()) > 74  # 100 are due, with a deviation of 8.7
    assert sides(FIVE, strategy={"type": "top_vs_bottom", "k": 1}) == sides(FIVE) == [("a", "e")]


def test_best_and_worst_that_overlap_still_make_no_tie_and_no_pair_read_backwards():
    group = [said("a", 2.0), said("b", 1.0), said("c", 1.0)]
    assert set(drawn(group, 60, strategy={"type": "top_vs_bottom", "k": 9})) == {("a", "b"), ("a", "c")}


def test_all_pairs_are_those_that_differ():
    group = [said("a", 3.0), said("b", 2.0), said("c", 2.0), said("d", 1.0)]
    every = sides(group, strategy={"type": "all_pairs"})
    assert sorted(every) == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]
    some = made(group, strategy={"type": "all_pairs", "per_prompt": 2})
    assert [one.id for one in some] == ["q/all_pairs/0", "q/all_pairs/1"]
    assert [tuple(answer.policy for answer in one.ranked) for one in some] == every[:2]
    first = drawn(group, 400, strategy={"type": "all_pairs", "per_prompt": 1})
    assert len(first) == 5 and min(first.values()) > 56  # 80 are due, with a deviation of 8


@pytest.mark.parametrize("strategy", ["ranked", {"type": "all_pairs"}])
def test_a_text_that_was_judged_twice_is_no_better_than_itself(strategy):
    """It counts with its best score, so that here all texts are equally good: a list of them would teach a preference that nobody has."""
    group = [said("a", 1.0), said("b", 0.0, text="same"), said("c", 1.0, text="same")]
    assert made(group, strategy=strategy) == "tie" and made(group[1:], strategy=strategy) == "identical texts"
    assert sides([*group, said("d", 0.5)], strategy=strategy)[0][-1] == "d"


def test_an_empty_answer_takes_no_pair_from_those_that_say_something():
    group = [said("empty", 9.0, blank=True), *FIVE]
    every = {"type": "all_pairs", "per_prompt": 10}
    assert sorted(sides(group, strategy=every)) == sorted(sides(FIVE, strategy=every)) and len(sides(FIVE, strategy=every)) == 10
    assert made([group[0], FIVE[0]], strategy=every) == "empty best answer"


def test_ties_are_kept_as_what_they_are():
    group = [said("a", 1.0), said("b", 1.0), said("c", 1.0, text="q by a")]
    assert made(group) == "tie"
    found = drawn(group, 60, ties="keep")
    assert all({"b"} < set(pair) for pair in found) and len(found) > 2  # never the same words twice, in either order
    assert {one.strength for one in made(group, ties="keep")} == {0.5}
    assert made(group[::2], ties="keep") == "identical texts" and made(FIVE, ties="keep")[0].strength is None
    assert made(group, ties="keep", min_best=2.0) == "best below min_best"


# --- two policies --------------------------------------------------------------------------------------------------------

DELTA = {"type": "delta", "strong": "large", "weak": "small"}


def test_the_stronger_policy_is_right_without_a_judge():
    group = [said("small", None), said("large", None), said("other", None)]
    assert sides(group, strategy=DELTA) == [("large", "small")]
    (one,) = made(group, strategy=DELTA)
    assert (one.id, one.gap, one.strength) == ("q/delta", None, None)


def test_of_several_answers_of_a_policy_chance_takes_one():
    both = ("large", "small")
    group = [said(label, None)._replace(id=f"q/{label}/{index}", text=bytes([index])) for label in both for index in (1, 2, 3)]

    def taken(seed: int, order: list[AnswerFacts]) -> tuple[str, ...]:
        return tuple(one.id for one in made(order, strategy=DELTA, seed=seed)[0].ranked)

    found = Counter(name for seed in range(90) for name in taken(seed, group))
    assert len(found) == 6 and min(found.values()) > 12  # 30 are due, with a deviation of 4.5
    assert all(taken(seed, group[::-1]) == taken(seed, group) for seed in range(20))


def test_a_delta_needs_both_policies_and_two_texts():
    assert made([said("large", None)], strategy=DELTA) == "no answer of small"
    assert made([said("small", None)], strategy=DELTA) == "no answer of large"
    same = [said("large", None, text="x"), said("small", None, text="x")]
    assert made(same, strategy=DELTA) == "identical texts"
    assert made([*same, said("small", None, text="y", length=99)], strategy=DELTA)[0].ranked[1].length == 99
    cut = [said("large", None), said("small", None, ended=False)]
    assert sides(cut, strategy=DELTA) and made(cut, strategy=DELTA, truncated="drop") == "no answer of small that came to its end"
    assert made([said("large", None, blank=True), said("small", None)], strategy=DELTA) == "empty best answer"


# --- noise, names and invariance -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [one for one in EVERY if one["strategy"] != "ranked"], ids=lambda config: str(config["strategy"]))
def test_label_noise_exchanges_the_words_of_every_kind_of_pair(config):
    groups = {f"q{n}": [said("m0", 2.0, f"q{n}"), said("m1", 1.0, f"q{n}")] for n in range(400)}
    clean, _ = chosen(groups, Pair.model_validate(config))
    noisy, _ = chosen(groups, Pair.model_validate(config | {"label_noise": 0.25}))
    assert [one.ranked for one in noisy] == [one.ranked for one in clean] and len(noisy) == 400
    assert all(one.ranking == (one.ranked[::-1] if one.exchanged else one.ranked) for one in noisy)
    assert 66 < sum(one.exchanged for one in noisy) < 134  # 100 are due, with a deviation of 8.7


def made_up(seed: int) -> list[AnswerFacts]:
    """Answers of four of six policies to each prompt, some without a score, some cut off, some alike."""
    draw = random.Random(seed)
    scores = [None, 0.0, 0.25, 0.5, 1.0, 2.0, 3.0]
    return [
        said(label, draw.choice(scores), f"q{n:03}", ended=draw.random() < 0.8, length=draw.randrange(1, 90), blank=draw.random() < 0.1,
             text=draw.choice([f"q{n} by {label}", "yes"]), rewards=(draw.random(), draw.random()))
        for n in range(60)
        for label in draw.sample([f"m{number}" for number in range(6)], 4)
    ]  # fmt: skip


def outcome(rows: list[AnswerFacts], config: Pair) -> list[Preferred]:
    by_prompt = sorted(rows, key=lambda one: one.prompt_id)
    return chosen({name: list(group) for name, group in groupby(by_prompt, lambda one: one.prompt_id)}, config)[0]


@pytest.mark.parametrize("truncated", ["keep", "drop"])
@pytest.mark.parametrize("given", EVERY, ids=lambda config: str(config["strategy"]))
def test_neither_the_order_of_rows_nor_other_prompts_change_a_preference(given, truncated):
    config, rows, draw = Pair.model_validate(given | {"truncated": truncated}), made_up(1), random.Random(2)
    whole = outcome(rows, config)
    assert outcome(draw.sample(rows, len(rows)), config) == whole and len(whole) > 4
    gone = set(draw.sample([f"q{n:03}" for n in range(60)], 25))
    left = [row for row in rows if row.prompt_id not in gone]
    assert outcome(left, config) == [one for one in whole if one.ranked[0].prompt_id not in gone]
    assert all(one.ended for preferred in whole for one in preferred.ranked) == (truncated == "drop")


def test_a_name_alone_is_short_for_a_strategy_without_arguments():
    short, long = Pair.model_validate({"strategy": "ranked"}), Pair.model_validate({"strategy": {"type": "ranked"}})
    assert short == long and short.model_dump() == long.model_dump()
    with pytest.raises(ValidationError, match="k\n  Field required"):
        Pair.model_validate({"strategy": "top_vs_bottom"})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"min_gap": 1.0, "max_gap": 0.5}, "max_gap 0.5 is below min_gap 1.0: raise it"),
        ({"ties": "keep", "strategy": "ranked"}, "ties: keep makes pairs of strength 0.5, but strategy is ranked"),
        ({"ties": "keep", "min_gap": 0.1}, "min_gap 0.1 drops close pairs, but ties: keep keeps the closest"),
        ({"budget": {"pairs": 3, "choose": "random"}, "min_pairs": 4}, "budget.pairs 3 is below min_pairs 4"),
        ({"strategy": DELTA, "min_gap": 0.5}, "strategy delta compares no scores, so min_gap has no effect"),
        ({"strategy": DELTA, "by": "reward"}, "strategy delta compares no scores, so by has no effect"),
        ({"strategy": DELTA, "budget": {"pairs": 3, "choose": "largest_gap"}}, "has no scores for choose: largest_gap"),
        ({"strategy": {"type": "delta", "strong": "a", "weak": "a"}}, "strong and weak are both a"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_numbers(config, problem):
    with pytest.raises(ValidationError, match=problem):
        Pair.model_validate(config)


# --- a budget ------------------------------------------------------------------------------------------------------------


def preferred(name: str, better: float, worse: float, ours: tuple[float, ...] = (), theirs: tuple[float, ...] = ()) -> list[AnswerFacts]:
    return [said("a", better, name, rewards=ours), said("b", worse, name, rewards=theirs)]


def test_disagreement_is_the_variance_of_what_members_think_of_the_pair():
    # σ(log 3) = 3/4 and σ(-log 3) = 1/4: a variance of 1/16. Both sure of it: 0
    (torn,) = made(preferred("q", 1.0, 0.0, (math.log(3), 0.0), (0.0, math.log(3))))
    (agreed,) = made(preferred("q", 1.0, 0.0, (3.0, 1.0), (2.0, 0.0)))
    assert disagreement(torn) == pytest.approx(1 / 16) and disagreement(agreed) == pytest.approx(0)
    (unknown,) = made(preferred("q", 1.0, 0.0, (1.0, 0.0), ()))
    assert disagreement(unknown) == 0  # a member could not score one of the answers


GROUPS = {
    "near": preferred("near", 1.0, 0.9, (1.0, 1.0), (0.0, 0.0)),
    "far": preferred("far", 3.0, 0.0, (1.0, 0.5), (0.0, 0.0)),
    "torn": preferred("torn", 2.0, 1.0, (4.0, 0.0), (0.0, 4.0)),
    "tied": preferred("tied", 1.0, 1.0),
}


@pytest.mark.parametrize(
    ("choose", "kept"), [("disagreement", {"far", "torn"}), ("smallest_gap", {"near", "torn"}), ("largest_gap", {"far", "torn"})]
)
def test_a_budget_keeps_the_most_informative_and_counts_the_others(choose, kept):
    found, drops = chosen(GROUPS, Pair.model_validate({"budget": {"pairs": 2, "choose": choose}}))
    assert {one.ranked[0].prompt_id for one in found} == kept and drops == {"tie": 1, "over budget": 1}
    assert [one.id for one in found] == [one.id for one in chosen(GROUPS, Pair())[0] if one.ranked[0].prompt_id in kept]
    assert chosen(GROUPS, Pair.model_validate({"budget": {"pairs": 3, "choose": choose}}))[1] == {"tie": 1}


def test_equal_information_is_decided_by_the_seed():
    groups = {f"q{n}": preferred(f"q{n}", 1.0, 0.0) for n in range(8)}

    def kept(seed: int, order: list[str]) -> set[str]:
        budget = Pair.model_validate({"budget": {"pairs": 2, "choose": "random"}, "seed": seed})
        return {one.ranked[0].prompt_id for one in chosen({name: groups[name] for name in order}, budget)[0]}

    names = list(groups)
    counts = Counter(name for seed in range(100) for name in kept(seed, names))
    assert len(counts) == 8 and min(counts.values()) > 9  # 25 are due, with a deviation of 4.3
    assert all(kept(seed, names[::-1]) == kept(seed, names) for seed in range(10))
