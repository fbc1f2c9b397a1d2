"""What a recipe may have a language model compare with benchmarks, told when it is loaded: judges, the gate, unseen suites, estimates."""

import pytest
from pydantic import ValidationError
from recipe_lab import STAND, Recipe

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.judging import rephrased
from pedigree.configs.judging.rephrased import FindRephrased
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.methods.language_model import ByEndpoint
from pedigree.configs.rehearsal.shrinking import rehearsed
from pedigree.pipelines.estimate.amounts import amounts_of
from pedigree.pipelines.run import checks

SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 40, seed: 1}"
TRAIN = "global_batch: 4, max_length: 32, optimizer: {learning_rate: 1e-5}"
RECIPE = f"""\
stages:
  suite: {{kind: prepare_data, record: item, task: sums, sources: [{SUMS}]}}
  raw: {{kind: prepare_data, record: conversation, sources: [{SUMS}], order: {{by: length}}}}
  clean: {{kind: decontaminate, in: {{data: raw, benchmarks: [suite]}}}}
  base: {{kind: source_model, source: {{type: packaged, asset: smollm2-135m-instruct}}}}
  asked: {{kind: find_rephrased, in: {{data: clean, benchmarks: [suite], judge: base}}, by: {{type: policy}}, neighbours: 3}}
  last:
    kind: find_rephrased
    in: {{data: asked, benchmarks: [suite]}}
    by: {{type: endpoint, base_url: "https://judge.example/v1", model: m}}
    max_contaminated_share: 0.02
    waivers: [{{benchmark: suite, items: all, because: ours}}]
  sft: {{kind: sft, in: {{policy: base, data: [last]}}, order: given, {TRAIN}}}
  scores: {{kind: evaluate, in: {{policies: [sft], suites: [suite]}}, sampling: {{max_tokens: 4}}}}
"""


MADE = Recipe(RECIPE)


def test_rows_stay_as_clean_as_they_were_and_what_a_model_says_makes_them_no_cleaner(tmp_path):
    assert MADE.load(tmp_path).find("last").output == "conversation"
    (found,) = MADE.complaints(tmp_path, ("in: {data: clean, ", "in: {data: raw, "))
    assert found.startswith("stage sft: trains on made/last, which is not decontaminated against made/suite")


def test_an_order_of_rows_is_kept_on_the_way_and_that_of_items_is_no_matter(tmp_path):
    (found,) = MADE.complaints(tmp_path, ("order: given, ", ""))
    assert found.startswith("stage raw: orders its rows, but sft shuffles them")
    moved = (", order: {by: length}}", "}"), ("record: item, ", "record: item, order: by_source, "), ("order: given, ", "")
    assert MADE.load(tmp_path, *moved).find("sft")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (", judge: base}", "}", "this config requires input 'judge'"),
        ("benchmarks: [suite]}\n    by", "benchmarks: [suite], judge: base}\n    by", "judge is base, but `by` is an endpoint"),
        ("neighbours: 3", "neighbours: 0", "neighbours: must be at least 1, not 0"),
        ("neighbours: 3", "turns: [assistant]", "omit user, where copies of benchmark items occur: add user"),
        ("max_contaminated_share: 0.02", "remove: false", "waivers has no effect, because remove is false"),
        ("neighbours: 3", "wording: mine", "unknown key"),
    ],
)
def test_what_nobody_could_judge_or_has_no_effect_is_refused(tmp_path, old, new, problem):
    assert problem in MADE.complaints(tmp_path, (old, new))[0]


def test_an_unseen_suite_has_no_waiver_here_either(tmp_path):
    source = "{type: arithmetic, operations: [add], digits: [3], count: 9, seed: 2}"
    unseen = f"  secret: {{kind: prepare_data, record: item, task: s, split: unseen, sources: [{source}]}}"
    changes = (
        ("  raw:", f"{unseen}\n  raw:"),
        ("data: raw, benchmarks: [suite]", "data: raw, benchmarks: [suite, secret]"),
        ("data: asked, benchmarks: [suite]", "data: asked, benchmarks: [secret]"),
        ("{benchmark: suite, ", "{benchmark: secret, "),
    )
    (found,) = MADE.complaints(tmp_path, *changes)
    assert "keeps rows that overlap with the unseen suite made/secret: remove the waiver" in found


def test_the_question_and_the_vectors_are_identity(monkeypatch):
    given = {"by": {"type": "policy"}}
    before = FindRephrased.model_validate(given).model_dump(mode="json")
    assert FindRephrased.model_validate(before).model_dump(mode="json") == before
    assert set(before["embedder_sha256"]) == {"vectors", "tokenizer"}
    monkeypatch.setattr(rephrased, "FRAME", rephrased.FRAME + " Please.")
    assert FindRephrased.model_validate(given).wording_sha256 != before["wording_sha256"]
    with pytest.raises(ValidationError, match="has changed"):
        FindRephrased.model_validate(before)


def test_a_plan_knows_at_most_how_much_is_asked_and_how_many_rows_stay(tmp_path):
    graph, project = MADE.load(tmp_path), Project(tmp_path)
    asked, trained = (amounts_of(project, graph, graph.find(name)) for name in ("asked", "sft"))
    assert asked.requests and (asked.requests.value, asked.requests.how) == (3 * 40, "at most")
    assert asked.plan and (asked.plan.answer, asked.plan.together) == (256, 64)
    assert trained.rows and (trained.rows.value, trained.rows.how) == (40, "at most")


def test_the_vectors_and_the_engine_are_asked_for_before_anything_runs(tmp_path, monkeypatch):
    graph = MADE.load(tmp_path)

    def missing(name):
        raise PedigreeError(f"{name} is not here")

    monkeypatch.setattr(checks.assets, "verified", missing)
    with pytest.raises(ConfigError, match="stages asked, last: wordllama-256 is not here: run `"):
        checks.refuse_missing_assets(graph, graph.nodes, Execution(slots=1))
    monkeypatch.setattr(checks, "find_spec", lambda package: None if package == "vllm" else package)
    with pytest.raises(ConfigError, match="asked, scores: needs vllm, not installed"):
        checks.refuse_missing_engines(graph, ["made/asked", "made/last", "made/scores"], Execution(slots=1))


def test_a_rehearsal_asks_a_made_endpoint_and_keeps_waivers_of_whole_suites(tmp_path):
    text, changes = rehearsed(MADE.load(tmp_path), "cpu", STAND)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "made.yaml").write_text(text)
    graph = load_recipe(tmp_path / "small", "made")
    configs = [graph.find(name).config for name in ("asked", "last")]
    assert graph.find("asked").parents == ("made/clean", "made/suite")
    for config in configs:
        assert isinstance(config, FindRephrased) and isinstance(config.by, ByEndpoint) and config.by.base_url == STAND.judge_url
    assert configs[0].neighbours == 3 and configs[1].max_contaminated_share == 1.0 and len(configs[1].waivers) == 1
    told = {(change.where, change.setting): change.reason for change in changes}
    assert told["made/asked", "in.judge"] == told["made/asked", "by"] == told["made/last", "by.base_url"] == "judges"
    assert told["made/last", "max_contaminated_share"] == "thresholds" and told["made/last", "sampling.max_tokens"] == "lengths"
