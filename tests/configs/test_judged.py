"""What a recipe may make of judged answers, told when it is loaded: rounds of imitation, the gate on decontamination, ports, estimates."""

import re

import pytest
from recipe_lab import STAND, Recipe

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.project import Project
from pedigree.configs.judging.pairing import Pair
from pedigree.configs.judging.selection import BestAnswers, SelectPrompts
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.rehearsal.shrinking import reduced
from pedigree.pipelines.estimate.amounts import amounts_of

SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 99, seed: 1}"
RATE = "optimizer: {learning_rate: 1e-5}"
RECIPE = f"""\
stages:
  suite: {{kind: prepare_data, record: item, task: sums, sources: [{SUMS}]}}
  raw: {{kind: prepare_data, record: prompt, sources: [{SUMS}]}}
  prompts: {{kind: decontaminate, in: {{data: raw, benchmarks: [suite]}}}}
  base: {{kind: source_model, source: {{type: packaged, asset: smollm2-135m-instruct}}}}
  other: {{kind: source_model, source: {{type: packaged, asset: smollm2-135m-instruct}}, dtype: bf16}}
  raft:
    rounds: 2
    first: base
    stages:
      sample:
        kind: sample
        in: {{policies: [previous], prompts: prompts}}
        sampling: {{max_tokens: 4}}
        samples_per_prompt: 8
        prompts: {{count: 20, index: $round}}
      judge: {{kind: judge, in: {{completions: sample}}}}
      good: {{kind: best_answers, in: {{judgments: judge}}, keep: {{type: all_above, min_score: 1, max_per_prompt: 3}}}}
      sft: {{kind: sft, in: {{policy: previous, data: [good@all]}}, global_batch: 4, max_length: 32, {RATE}}}
  hard: {{kind: select_prompts, in: {{prompts: prompts, judgments: judge_2}}, max_mean: 0.5}}
  rlvr:
    kind: rlvr
    in: {{policy: raft, prompts: hard}}
    algorithm: {{type: grpo}}
    steps: 1
    prompts_per_step: 2
    samples_per_prompt: 2
    sampling: {{max_tokens: 4}}
    max_prompt_length: 8
    {RATE}
  pool: {{kind: sample, in: {{policies: [base, other], prompts: prompts}}, sampling: {{max_tokens: 4}}, samples_per_prompt: 2,
    prompts: {{count: 10}}}}
  judged: {{kind: judge, in: {{completions: pool}}}}
  pairs: {{kind: pair, in: {{judgments: judged}}}}
  dpo: {{kind: preference_train, in: {{policy: base, preferences: [pairs]}}, loss: {{type: dpo}}, global_batch: 4, max_length: 32, {RATE}}}
  scores: {{kind: evaluate, in: {{policies: [raft], suites: [suite]}}, sampling: {{max_tokens: 4}}}}
"""
PAIRS = "in: {judgments: judged}}"
MADE = Recipe(RECIPE)


def test_rounds_of_imitation_train_on_what_the_round_before_said(tmp_path):
    graph = MADE.load(tmp_path)
    assert {graph.find(name).output for name in ("good_1", "good_2")} == {"conversation"} and graph.find("hard").output == "prompt"
    assert graph.find("sft_2").parents == ("made/sft_1", "made/good_1", "made/good_2")
    assert graph.find("sample_2").parents == ("made/sft_1", "made/prompts")


def test_imitated_answers_are_as_clean_as_the_prompts_that_they_answer(tmp_path):
    found = MADE.complaints(tmp_path, ("policies: [previous], prompts: prompts", "policies: [previous], prompts: raw"))
    assert [message.split(",")[0] for message in found] == [
        "stage sft_1: trains on made/good_1",  # sft_2 does, too, by the same line of the file
        "stage sft_2: trains on made/good_2",
        "stage rlvr: trains on made/hard",  # judged were rows that nobody has checked, too
    ]
    assert all("is not decontaminated against made/suite" in message for message in found)


def test_chosen_prompts_are_as_clean_as_those_that_they_were_chosen_from(tmp_path):
    (found,) = MADE.complaints(tmp_path, ("in: {prompts: prompts, judgments", "in: {prompts: raw, judgments"))
    assert found.startswith("stage rlvr: trains on made/hard, which is not decontaminated against made/suite")


def test_a_delta_is_as_clean_as_its_prompts(tmp_path):
    delta = "strategy: {type: delta, strong: base, weak: other}"
    text = RECIPE.replace("policies: [base, other], prompts: prompts", "policies: [base, other], prompts: raw")
    (tmp_path / "made.yaml").write_text(text.replace(PAIRS, f"in: {{completions: pool}}, {delta}}}"))
    with pytest.raises(ConfigError, match=r"stage dpo: trains on made/pairs, which is not decontaminated against made/suite"):
        load_recipe(tmp_path, "made")


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ("}", "this config requires input 'judgments': name a stage with output judgment"),
        ("strategy: {type: delta, strong: a, weak: b}, in: {judgments: judged}}", "requires input 'completions'"),
        ("in: {judgments: judged, completions: pool}}", "strategy best_vs_worst reads judgments: remove the input completions (pool)"),
        ("strategy: {type: delta, strong: a, weak: b}, in: {judgments: judged, completions: pool}}", "delta reads completions: remove the"),
        (
            "by: reward, in: {judgments: judged}}",
            "by reward: judgments judged contains no rewards, because its reward_weight is 0: raise it there",
        ),
        ("by: rating, in: {judgments: judged}}", "by rating: judgments judged contains no ratings: set rating there"),
        ("budget: {pairs: 9, choose: disagreement}, in: {judgments: judged}}", "disagreement requires reward models, but judgments"),
        ("strategy: best_vs_second, in: {judgments: judged}}", "strategy: type 'best_vs_second' is not one of best_vs_worst, "),
        ("strategy: {k: 2}, in: {judgments: judged}}", "strategy: `type` is missing: write {type: ...}"),
        ("strategy: {type: ranked, k: 2}, in: {judgments: judged}}", "strategy.ranked.k: unknown key"),
        ("strategy: top_vs_bottom, in: {judgments: judged}}", "strategy.top_vs_bottom.k: required, but missing"),
    ],
)
def test_pairs_that_cannot_be_made_are_refused(tmp_path, new, problem):
    (found,) = MADE.complaints(tmp_path, (f"pairs: {{kind: pair, {PAIRS}", f"pairs: {{kind: pair, {new}"))
    assert problem in found and found.startswith("stage pairs: ")


DELTA = "strategy: {type: delta, strong: base, weak: other}, in: {completions: pool}}"
REWARDS = f"rm: {{kind: reward_model, in: {{policy: base, preferences: [pairs]}}, global_batch: 4, max_length: 32, {RATE}, loss: "


@pytest.mark.parametrize(
    ("pairs", "dpo", "problem"),
    [
        (f"ties: keep, {PAIRS}", "loss: {type: kto}", "stage dpo: preferences pairs keeps ties .* but kto does not support uncertain"),
        (
            f"ties: keep, {PAIRS}",
            "loss: {type: sppo_hard}",
            "stage dpo: preferences pairs keeps ties .* sppo_hard does not support uncertain",
        ),
        (DELTA, "loss: {type: sppo_soft}", "stage dpo: preferences pairs has strategy delta and no win rates"),
        (DELTA, "loss: {type: dpo}", r"stage rm: margin_weight 0.5 .* preferences pairs has strategy delta without scores"),
        (f"ties: keep, {PAIRS}", "loss: {type: dpo}", None),
    ],
)
def test_preferences_that_a_loss_cannot_take_are_refused_when_the_recipe_is_loaded(tmp_path, pairs, dpo, problem):
    weight = 0.5 if problem and "margin_weight" in problem else 0.0
    text = RECIPE.replace(PAIRS, pairs).replace("loss: {type: dpo}", dpo)
    (tmp_path / "made.yaml").write_text(f"{text}  {REWARDS}{{type: bradley_terry, margin_weight: {weight}}}}}\n")
    if problem is None:
        assert load_recipe(tmp_path, "made")
        return
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path, "made")
    (found,) = caught.value.problems
    assert re.match(problem, found.message)


@pytest.mark.parametrize("kind", ["good: {kind: best_answers, ", "hard: {kind: select_prompts, "])
def test_nothing_is_kept_by_a_number_that_nobody_gives(tmp_path, kind):
    (said, *_) = MADE.complaints(tmp_path, (kind, f"{kind}by: rating, "))
    assert re.search(r"by rating: judgments judge_[12] contains no ratings: set rating there", said)


@pytest.mark.parametrize(
    ("old", "new", "stage", "rows"),
    [
        ("", "", "sft_1", 20 * 3),  # 3 of 8 answers to each of 20 prompts
        ("{type: all_above, min_score: 1, max_per_prompt: 3}", "{type: all_above, min_score: 1}", "sft_1", 20 * 8),
        ("{type: all_above, min_score: 1, max_per_prompt: 3}", "best_of_n", "sft_1", 20),
        ("", "", "sft_2", 2 * 20 * 3),
        ("", "", "rlvr", 20),
        ("", "", "dpo", 10),
        (PAIRS, f"strategy: {{type: all_pairs}}, {PAIRS}", "dpo", 10 * 6),  # of 2 policies with 2 answers each
        (PAIRS, f"strategy: {{type: all_pairs, per_prompt: 4}}, {PAIRS}", "dpo", 10 * 4),
        (PAIRS, f"budget: {{pairs: 7, choose: random}}, {PAIRS}", "dpo", 7),
        (PAIRS, "strategy: {type: delta, strong: base, weak: other}, in: {completions: pool}}", "dpo", 10),
    ],
)
def test_a_plan_knows_at_most_how_many_rows_there_will_be(tmp_path, old, new, stage, rows):
    graph = MADE.load(tmp_path, (old, new))
    found = amounts_of(Project(tmp_path), graph, graph.find(stage)).rows
    assert found and (found.value, found.how) == (rows, "at most")


def test_a_rehearsal_keeps_what_a_made_model_says(tmp_path):
    """It gets nothing right and is mostly cut off: with the real bounds nothing would be left to rehearse with."""
    graph = MADE.load(tmp_path, (PAIRS, f"min_gap: 1, max_gap: 2, min_best: 1, min_pairs: 5, truncated: drop, {PAIRS}"))
    small = {name: reduced(graph.find(name), graph.nodes, STAND) for name in ("good_1", "hard", "pairs")}
    good = BestAnswers.model_validate(small["good_1"][0])
    assert good.keep.min_score == -1e6 and good.truncated == "keep" and good.min_rows == 1
    hard = SelectPrompts.model_validate(small["hard"][0])
    assert (hard.min_mean, hard.max_mean) == (None, 1e6)
    pairs = Pair.model_validate(small["pairs"][0])
    assert (pairs.min_gap, pairs.max_gap, pairs.min_best, pairs.min_pairs, pairs.truncated) == (0, 1e6, -1e6, 1, "keep")
    assert {change.reason for _, changes in small.values() for change in changes} == {"thresholds"}
    assert sorted(change.setting for change in small["good_1"][1]) == ["keep.min_score", "truncated"]
