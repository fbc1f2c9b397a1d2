"""Which round a name means, in every round, and what is said where it means none."""

from pathlib import Path

import pytest

from pedigree.configs.base.document import Problem, YamlDocument
from pedigree.configs.judging.pools import Sample
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.rounds import Round, RoundError, unroll

STAGES = ("sample", "pair", "dpo")


def at(index: int) -> Round:
    return Round(index, 3, STAGES, "sft")


@pytest.mark.parametrize(
    ("reference", "rounds"),
    [
        ("pair", ["pair_1", "pair_2", "pair_3"]),
        ("previous", ["sft", "dpo_1", "dpo_2"]),
        ("reward", ["reward", "reward", "reward"]),  # of outside
        ("other/dpo", ["other/dpo"] * 3),
        ("pair@$round", ["pair_1", "pair_2", "pair_3"]),
        ("dpo@$round-1", ["sft", "dpo_1", "dpo_2"]),
        ("dpo@$round-2", ["sft", "sft", "dpo_1"]),
        ("dpo@1", ["sft", "dpo_1", "dpo_1"]),
        ("dpo@2", ["sft", "dpo_1", "dpo_2"]),
        ("pair@1", ["pair_1", "pair_1", "pair_1"]),
        ("pair@all", [["pair_1"], ["pair_1", "pair_2"], ["pair_1", "pair_2", "pair_3"]]),
        ("pair@$round-1..$round", [["pair_1"], ["pair_1", "pair_2"], ["pair_2", "pair_3"]]),
        ("dpo@1..$round-1", [[], ["dpo_1"], ["dpo_1", "dpo_2"]]),
    ],
)
def test_a_name_means_in_each_round(reference, rounds):
    assert [at(index).resolve(reference) for index in (1, 2, 3)] == rounds


@pytest.mark.parametrize(
    ("index", "reference", "problem"),
    [
        (1, "pair@$round-1", "'pair@$round-1' in round 1 is round 0, which does not exist: only dpo, the last stage of the group"),
        (1, "pair@0", "is round 0, which does not exist"),
        (1, "pair@2", "'pair@2' in round 1 is round 2, which is later"),
        (1, "dpo@4", "'dpo@4' in round 1 is round 4, of 3"),
        (2, "pair@1..3", "'pair@1..3' in round 2 is round 3, which is later"),
        (2, "pair@last", "'last' is not a round; after @ write all, a number"),
        (2, "pair@$round+1", "'$round+1' is not a round"),
        (2, "pair@", "'' is not a round"),
        (2, "per@1", "per is not a stage of this group, which has sample, pair, dpo"),
        (2, "previous@1", "previous is not a stage of this group"),
    ],
)
def test_a_name_that_means_no_round_says_so(index, reference, problem):
    with pytest.raises(RoundError) as caught:
        at(index).resolve(reference)
    assert problem in str(caught.value)


def unrolled(inputs):
    problems: list[Problem] = []
    stages = {"pair": {"kind": "pair"}, "dpo": {"kind": "preference_train", "in": inputs, "seed": "$round"}}
    found = unroll(YamlDocument("a.yaml", {}, {}), "online", {"rounds": 2, "first": "sft", "stages": stages}, problems)
    return found, [problem.message for problem in problems]


def test_ranges_join_the_list_around_them_and_the_template_stays_as_it_is():
    found, problems = unrolled({"policy": "previous", "preferences": ["offline", "pair@all"], "other": {"old": "dpo@$round-1"}})
    assert not problems and list(found) == ["pair_1", "dpo_1", "pair_2", "dpo_2"]
    assert found["dpo_1"] == ("dpo", {"kind": "preference_train", "seed": 1, "in": {
        "policy": "sft", "preferences": ["offline", "pair_1"], "other": {"old": "sft"}}})  # fmt: skip
    assert found["dpo_2"][1]["in"] == {"policy": "dpo_1", "preferences": ["offline", "pair_1", "pair_2"], "other": {"old": "dpo_1"}}


def test_a_number_may_count_rounds_from_zero():
    """`prompts: {count: 8, index: $round-1}` begins with the first 8 prompts."""
    stages = {"sample": {"kind": "sample", "in": {}, "prompts": {"count": 8, "index": "$round-1"}, "seed": "$round"}}
    found = unroll(YamlDocument("a.yaml", {}, {}), "online", {"rounds": 2, "first": "sft", "stages": stages}, [])
    assert [(body["prompts"]["index"], body["seed"]) for _, body in found.values()] == [(0, 1), (1, 2)]


def test_a_range_has_no_label():
    _, problems = unrolled({"preferences": {"all": "pair@all"}})
    assert problems[0].startswith("stage dpo_1: input 'preferences' names 'pair@all' under the label all, but it means several stages")


CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = [path for folder in ("recipes", "starters") for path in sorted((CONFIGS / folder).glob("*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_windows_of_each_pool_of_a_shipped_recipe_begin_with_its_first_prompts_and_leave_none_out(path):
    """As the documentation says that rounds do: a recipe is what users begin with."""
    pools: dict[str, set[int]] = {}
    for node in load_recipe(path.parent, path.stem).nodes.values():
        if isinstance(node.config, Sample):
            (pool,) = (edge.source for edge in node.edges if edge.port == "prompts")
            window = node.config.prompts
            pools.setdefault(pool, set()).update(range(window.index * window.count, (window.index + 1) * window.count))
    for pool, used in pools.items():
        assert used == set(range(len(used))), pool
