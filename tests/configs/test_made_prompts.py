"""What a recipe may make of prompts, told when it is loaded: constraints, relaxed pairs, prompts that models write, the gate."""

import re
import shutil

import pytest
from pydantic import ValidationError
from recipe_lab import STAND, Recipe

from pedigree.configs.base.project import Project
from pedigree.configs.judging import synthesis
from pedigree.configs.judging.synthesis import Synthesize
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.methods.language_model import ByEndpoint
from pedigree.configs.rehearsal.shrinking import reduced, rehearsed
from pedigree.pipelines.estimate.amounts import amounts_of
from pedigree.stages.prepare_data.kind import RULE_TOKENS
from pedigree.stages.synthesize.kind import REQUEST_TOKENS

SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 99, seed: 1}"
DRAW = "sampling: {max_tokens: 4}, samples_per_prompt: 2, prompts: {count: 20}"
RECIPE = f"""\
stages:
  suite: {{kind: prepare_data, record: item, task: sums, sources: [{SUMS}]}}
  raw: {{kind: prepare_data, record: prompt, sources: [{SUMS}]}}
  prompts: {{kind: decontaminate, in: {{data: raw, benchmarks: [suite]}}}}
  base: {{kind: source_model, source: {{type: packaged, asset: smollm2-135m-instruct}}}}
  hard: {{kind: constrain, in: {{prompts: prompts}}, max_constraints: 3, min_rows: 50}}
  plain_answers: {{kind: sample, in: {{policies: [base], prompts: prompts}}, {DRAW}}}
  hard_answers: {{kind: sample, in: {{policies: [base], prompts: hard}}, {DRAW}}}
  relaxed: {{kind: pair, in: {{completions: hard_answers, relaxed: plain_answers}}, strategy: relaxed}}
  mine: {{kind: synthesize, in: {{prompts: prompts, writer: base}}, method: {{type: self_instruct, requests: 300}}, by: {{type: policy}}}}
  people: {{kind: synthesize, in: {{prompts: raw}}, method: {{type: persona, task: math, prompts: 3}}, min_rows: 20,
    by: {{type: endpoint, base_url: "https://writer.example/v1", model: m}}}}
  made: {{kind: decontaminate, in: {{data: mine, benchmarks: [suite]}}}}
  made_answers: {{kind: sample, in: {{policies: [base], prompts: made}}, {DRAW}}}
  best: {{kind: pair, in: {{judgments: judged}}}}
  judged: {{kind: judge, in: {{completions: made_answers}}}}
  dpo:
    kind: preference_train
    in: {{policy: base, preferences: [relaxed, best]}}
    loss: {{type: dpo}}
    global_batch: 4
    max_length: 32
    optimizer: {{learning_rate: 1e-5}}
  scores: {{kind: evaluate, in: {{policies: [dpo], suites: [suite]}}, sampling: {{max_tokens: 4}}}}
"""
MADE = Recipe(RECIPE)


def test_prompts_with_constraints_are_as_clean_as_those_that_they_were_made_of(tmp_path):
    assert MADE.load(tmp_path).find("hard").output == "prompt"
    (found,) = MADE.complaints(tmp_path, ("constrain, in: {prompts: prompts}", "constrain, in: {prompts: raw}"))
    assert found.startswith("stage dpo: trains on made/relaxed, which is not decontaminated against made/suite")
    asked = "plain_answers: {{kind: sample, in: {{policies: [base], prompts: {}}}"
    (found,) = MADE.complaints(tmp_path, (asked.format("prompts"), asked.format("raw")))
    assert found.startswith("stage dpo: trains on made/relaxed")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (", relaxed: plain_answers}", "}", "this config requires input 'relaxed': name a stage with output completion"),
        ("strategy: relaxed}", "strategy: best_vs_worst}", "requires input 'judgments'"),
        ("strategy: relaxed}", "strategy: {type: delta, strong: a, weak: b}}", "delta reads completions: remove the input relaxed (plain"),
        ("strategy: relaxed}", "strategy: relaxed, min_gap: 1}", "strategy relaxed compares no scores, so min_gap has no effect"),
        ("strategy: relaxed}", "strategy: relaxed, budget: {pairs: 2, choose: largest_gap}}", "relaxed has no scores for choose: larg"),
        ("loss: {type: dpo}", "loss: {type: sppo_soft}", "preferences relaxed has strategy relaxed and no win rates"),
    ],
)
def test_relaxed_pairs_that_cannot_be_made_are_refused(tmp_path, old, new, problem):
    (found,) = MADE.complaints(tmp_path, (old, new))
    assert problem in found


@pytest.mark.parametrize(("verified", "fits"), [("true", True), ("false", False)])
def test_a_margin_is_of_pairs_that_a_verifier_scored(tmp_path, verified, fits):
    reward = "rm: {kind: reward_model, in: {policy: base, preferences: [relaxed]}, global_batch: 4, max_length: 32"
    changes = (
        ("strategy: relaxed}", f"strategy: {{type: relaxed, verified: {verified}}}}}"),
        ("  scores:", f"  {reward}, loss: {{type: bradley_terry, margin_weight: 0.5}}, optimizer: {{learning_rate: 1e-5}}}}\n  scores:"),
    )
    if fits:
        assert MADE.load(tmp_path, *changes)
    else:
        assert re.search(r"margin_weight 0\.5 .* relaxed has strategy relaxed without scores", MADE.complaints(tmp_path, *changes)[0])


@pytest.mark.parametrize("made", ["mine", "people"])
def test_what_a_model_has_written_must_be_decontaminated_whatever_it_was_shown(tmp_path, made):
    """Also what it wrote after the example of prompts that were."""
    assert MADE.load(tmp_path).find("dpo")
    (found,) = MADE.complaints(tmp_path, ("prompts: made}, ", f"prompts: {made}}}, "))
    assert found.startswith("stage dpo: trains on made/best, which is not decontaminated against made/suite")


def test_prompts_with_constraints_made_of_written_ones_are_not_clean_either(tmp_path):
    (found,) = MADE.complaints(tmp_path, ("constrain, in: {prompts: prompts}", "constrain, in: {prompts: mine}"))
    assert "trains on made/relaxed, which is not decontaminated" in found


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("in: {prompts: prompts, writer: base}", "in: {prompts: prompts}", "this config requires input 'writer'"),
        ("in: {prompts: raw}, method", "in: {prompts: raw, writer: base}, method", "writer is base, but `by` is an endpoint"),
        (
            "task: math",
            "task: maths",
            "task of persona 'maths' is not one of code, instruction_following, knowledge, math; did you mean math?",
        ),
        ("{type: persona, task: math, prompts: 3", "{type: rewrite, task: math", "task of rewrite 'math' is not one of breadth, const"),
        ("requests: 300}", "requests: 300, max_rouge_l: 1.5}", "max_rouge_l: must be less than 1, not 1.5"),
    ],
)
def test_prompts_that_nobody_could_write_are_refused(tmp_path, old, new, problem):
    assert problem in MADE.complaints(tmp_path, (old, new))[0]


def test_every_word_that_a_writer_is_asked_with_is_identity(tmp_path, monkeypatch):
    config = {"method": {"type": "persona", "task": "math"}, "by": {"type": "policy"}}
    before = Synthesize.model_validate(config).model_dump(mode="json")
    assert Synthesize.model_validate(before).model_dump(mode="json") == before
    shutil.copytree(synthesis.WRITING, tmp_path / "writing")
    monkeypatch.setattr(synthesis, "WRITING", tmp_path / "writing")
    file = tmp_path / "writing" / "persona" / "math.yaml"
    file.write_text(file.read_text().replace("several steps", "some steps"))
    after = Synthesize.model_validate(config).model_dump(mode="json")
    assert after["wording_sha256"]["task"] != before["wording_sha256"]["task"]
    assert after["wording_sha256"]["frame"] == before["wording_sha256"]["frame"]
    monkeypatch.setattr(synthesis, "FRAME", synthesis.FRAME + " Please.")
    assert Synthesize.model_validate(config).wording_sha256["frame"] != before["wording_sha256"]["frame"]
    with pytest.raises(ValidationError, match="has changed"):
        Synthesize.model_validate(before)
    (tmp_path / "writing" / "persona" / "odd.yaml").write_text("version: 1\n")
    with pytest.raises(ValueError, match=r"(?s)persona/odd.yaml:1: words: required"):
        synthesis.load_writing("persona", "odd")


def test_a_plan_knows_at_most_how_many_there_will_be(tmp_path):
    graph = MADE.load(tmp_path)
    asked = amounts_of(Project(tmp_path), graph, graph.find("mine"))
    assert asked.requests and asked.requests.value == 300 and asked.plan and asked.plan.answer == 1024
    for stage, rows in (("hard", 99), ("people", 99 * 3), ("made", 300 * 4), ("dpo", 40)):
        found = amounts_of(Project(tmp_path), graph, graph.find(stage)).rows
        assert found and (found.value, found.how) == (rows, "at most")


@pytest.mark.parametrize("shots", [1, 50])
def test_a_plan_counts_every_example_that_a_writer_is_shown_also_before_they_are_here(tmp_path, shots):
    graph = MADE.load(tmp_path, ("requests: 300}", f"requests: 300, shots: {shots}}}"))
    asked = amounts_of(Project(tmp_path), graph, graph.find("mine"))
    assert asked.prompt and (asked.prompt.value, asked.prompt.how) == (shots * RULE_TOKENS["prompt"] + REQUEST_TOKENS, "estimated")


def test_a_rehearsal_asks_for_few_and_verifies_nothing_that_a_made_model_says(tmp_path):
    graph = MADE.load(tmp_path)
    small = {name: reduced(graph.find(name), graph.nodes, STAND)[0] for name in ("hard", "relaxed")}
    assert small["hard"]["min_rows"] == 1 and small["hard"]["max_constraints"] == 3
    assert small["relaxed"]["strategy"] == {"type": "relaxed", "verified": False}


def test_a_rehearsal_of_a_margin_between_verified_answers_can_be_loaded(tmp_path):
    reward = "rm: {kind: reward_model, in: {policy: base, preferences: [relaxed]}, global_batch: 4, max_length: 32"
    loss = "loss: {type: bradley_terry, margin_weight: 0.5, centering: 0.01}"
    real = MADE.load(tmp_path, ("  scores:", f"  {reward}, {loss}, optimizer: {{learning_rate: 1e-5}}}}\n  scores:"))
    text, changes = rehearsed(real, "cpu", STAND)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "made.yaml").write_text(text)
    small = load_recipe(tmp_path / "small", "made").find("rm").config.model_dump()
    assert small["loss"] == {"type": "bradley_terry", "margin_weight": 0.0, "centering": 0.01}
    assert ("made/rm", "loss.margin_weight", "thresholds") in [(one.where, one.setting, one.reason) for one in changes]


def test_a_rehearsal_has_prompts_written_by_a_made_endpoint_whoever_writes_in_the_recipe(tmp_path):
    text, changes = rehearsed(MADE.load(tmp_path), "cpu", STAND)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "made.yaml").write_text(text)
    graph = load_recipe(tmp_path / "small", "made")
    mine, people = graph.find("mine"), graph.find("people")
    assert mine.parents == ("made/prompts",) and people.parents == ("made/raw",)
    for node in (mine, people):
        assert isinstance(node.config, Synthesize) and isinstance(node.config.by, ByEndpoint)
        assert node.config.by.base_url == STAND.judge_url
    told = {(change.where, change.setting): change.reason for change in changes}
    assert told["made/mine", "in.writer"] == told["made/mine", "by"] == told["made/people", "by.base_url"] == "judges"
    assert told["made/mine", "method.requests"] == "data" and told["made/people", "min_rows"] == "thresholds"
