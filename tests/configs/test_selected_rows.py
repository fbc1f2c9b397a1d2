"""What a recipe may make of rows that models score, told when it is loaded: the gate on decontamination, order, scorers, estimates."""

import pytest
from recipe_lab import STAND, Recipe

from pedigree.configs.base.project import Project
from pedigree.configs.judging.selection import SelectRows
from pedigree.configs.rehearsal.shrinking import reduced
from pedigree.pipelines.estimate.amounts import amounts_of

SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 40, seed: 1}"
TRAIN = "global_batch: 4, max_length: 32, optimizer: {learning_rate: 1e-5}"
RECIPE = f"""\
stages:
  suite: {{kind: prepare_data, record: item, task: sums, sources: [{SUMS}]}}
  raw: {{kind: prepare_data, record: conversation, sources: [{SUMS}], order: {{by: length}}}}
  talks: {{kind: decontaminate, in: {{data: raw, benchmarks: [suite]}}}}
  raw_pairs: {{kind: prepare_data, record: preference, sources: [{SUMS}]}}
  pairs: {{kind: decontaminate, in: {{data: raw_pairs, benchmarks: [suite]}}}}
  base: {{kind: source_model, source: {{type: packaged, asset: smollm2-135m-instruct}}}}
  rm_1: {{kind: reward_model, in: {{policy: base, preferences: [pairs]}}, {TRAIN}}}
  rm_2: {{kind: reward_model, in: {{policy: base, preferences: [pairs]}}, seed: 2, {TRAIN}}}
  liked:
    kind: select_rows
    in: {{data: talks, reward_models: [rm_1, rm_2]}}
    reward_weight: 1.0
    ensemble: {{type: worst_case}}
    keep: {{type: top_share, share: 0.3}}
    min_rows: 5
  sft: {{kind: sft, in: {{policy: base, data: [liked]}}, order: given, {TRAIN}}}
  scores: {{kind: evaluate, in: {{policies: [sft], suites: [suite]}}, sampling: {{max_tokens: 4}}}}
"""
MADE = Recipe(RECIPE)


def test_selected_rows_are_as_clean_as_those_that_they_are_taken_from(tmp_path):
    assert MADE.load(tmp_path).find("liked").output == "conversation"
    (found,) = MADE.complaints(tmp_path, ("data: talks, reward", "data: raw, reward"))
    assert found.startswith("stage sft: trains on made/liked, which is not decontaminated against made/suite")


def test_pairs_stay_pairs(tmp_path):
    graph = MADE.load(tmp_path, ("data: talks, reward", "data: pairs, reward"), ("data: [liked]", "data: [talks]"))
    assert graph.find("liked").output == "preference"


def test_an_order_is_kept_on_the_way_to_the_training_that_keeps_it(tmp_path):
    (found,) = MADE.complaints(tmp_path, ("order: given, ", ""))
    assert found.startswith("stage raw: orders its rows, but sft shuffles them")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (", reward_models: [rm_1, rm_2]", "", "this config requires input 'reward_models'"),
        ("[rm_1, rm_2]", "[rm_1]", "ensemble worst_case needs at least 2 reward models, not 1 (rm_1)"),
        ("[rm_1, rm_2]}", "[rm_1, rm_2], judge: base}", "judge is base, but is not used: set rating"),
        ("share: 0.3}", "share: 1.0}", "less than 1"),
        ("{type: top_share, share: 0.3}", "{type: above, min_score: 1, per_source: true}", "keep.above.per_source: unknown key"),
    ],
)
def test_what_could_not_score_or_would_drop_nothing_is_refused(tmp_path, old, new, problem):
    (found,) = MADE.complaints(tmp_path, (old, new))
    assert found.startswith("stage liked: ") and problem in found


@pytest.mark.parametrize(
    ("keep", "rows"),
    [
        ("{type: top_share, share: 0.3}", 12),
        ("{type: top_share, share: 0.3, per_source: true}", 40),  # each source rounds up, and every row may have its own
        ("{type: above, min_score: 0.5}", 40),
    ],
)
def test_a_plan_knows_at_most_how_many_rows_stay_and_how_many_are_scored(tmp_path, keep, rows):
    graph, project = MADE.load(tmp_path, ("{type: top_share, share: 0.3}", keep)), Project(tmp_path)
    trained, scored = (amounts_of(project, graph, graph.find(name)).rows for name in ("sft", "liked"))
    assert trained and scored and (trained.value, trained.how, scored.value) == (rows, "at most", 40)


def test_a_rehearsal_keeps_enough_of_few_rows_whatever_a_made_model_thinks(tmp_path):
    graph = MADE.load(tmp_path)
    small = SelectRows.model_validate(reduced(graph.find("liked"), graph.nodes, STAND)[0])
    assert (small.keep.model_dump()["share"], small.min_rows, small.ensemble.type) == (0.75, 1, "worst_case")
    by = "{type: endpoint, base_url: 'https://api.openai.com/v1', model: m}"
    rated = f"rating_weight: 1.0\n    rating: {{rubrics: [honesty], by: {by}}}"
    graph = MADE.load(
        tmp_path,
        (", reward_models: [rm_1, rm_2]", ""),
        ("reward_weight: 1.0\n    ensemble: {type: worst_case}", rated),
        ("{type: top_share, share: 0.3}", "{type: above, min_score: 4.5}"),
    )
    small = SelectRows.model_validate(reduced(graph.find("liked"), graph.nodes, STAND)[0])
    assert small.rating and small.rating.by.model_dump()["base_url"] == STAND.judge_url
    assert small.keep.model_dump()["min_score"] == -1e6 and small.max_unscored_share == 0.5
