"""Packaged assets are missed before the first job, not by the job that opens them days later."""

from pathlib import Path

import pytest

from pedigree.configs.base.document import ConfigError
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts import assets
from pedigree.pipelines.run import checks
from pedigree.pipelines.run.needed_assets import missing_assets

pytestmark = pytest.mark.unit
RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
HERE = Execution(slots=1)


@pytest.fixture(autouse=True)
def nothing_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "cache"))
    assets.verified.cache_clear()
    yield
    assets.verified.cache_clear()


def needs(folder: Path, recipe: str, execution: Execution = HERE) -> dict[str, list[str]]:
    """Asset → names of the stages that miss it."""
    graph, found = load_recipe(folder, recipe), {}
    for node, name, _ in missing_assets(graph, graph.nodes, execution):
        found.setdefault(name, []).append(node.name)
    return found


def test_a_recipe_without_packaged_rows_needs_none():
    assert needs(RECIPES, "tiny") == {}


def test_tulu_needs_the_splitter_of_ifeval_wherever_answers_to_its_prompts_are_scored():
    """Its suites name the verifier in a form, its prompts in a column of the hub's rows, which are not here yet."""
    found = needs(RECIPES, "tulu3_8b")
    assert {"rlvr_ppo", "scores"} <= set(found["punkt"]) and not {"sft", "dpo", "ifeval"} & set(found["punkt"])
    assert found["ifeval"] == ["ifeval"] and found["humaneval"] == ["humaneval"]


ROWS = """stages:
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  raw: {kind: prepare_data, record: prompt, sources: [SOURCE]}
  made: {kind: RULE}
  said: {kind: sample, in: {prompts: made, policies: [base]}, prompts: {count: 4}, samples_per_prompt: 2, sampling: {max_tokens: 8}}
  judged: {kind: judge, in: {completions: said}}
"""
SUMS = "{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 1}"
KEPT = "prepare_data, record: prompt, in: {rows: [raw]}, sources: [{type: artifact, input: raw}]"
ADDED = "constrain, in: {prompts: raw}"


@pytest.mark.parametrize(
    ("source", "rule", "splits"),
    [
        (SUMS, KEPT, False),
        (SUMS, ADDED, True),
        ("{type: packaged, asset: ifeval}", ADDED, True),
        (
            "{type: files, path: raw.jsonl, verifier: gsm}",
            "prepare_data, record: prompt, in: {rows: [raw]}, sources: [{type: artifact, input: raw}]",
            False,
        ),
        (
            "{type: files, path: raw.jsonl}",
            "prepare_data, record: prompt, in: {rows: [raw]}, sources: [{type: artifact, input: raw}]",
            True,
        ),
    ],
)
def test_the_splitter_is_needed_where_a_row_may_name_ifeval(tmp_path, source, rule, splits):
    (tmp_path / "made.yaml").write_text(ROWS.replace("SOURCE", source).replace("RULE", rule))
    found = needs(tmp_path, "made")
    assert found.get("punkt", []) == (["judged"] if splits else []) and found["smollm2-135m-instruct"] == ["base"]


def test_one_command_fetches_all_that_is_missing(tmp_path):
    (tmp_path / "made.yaml").write_text(ROWS.replace("SOURCE", SUMS).replace("RULE", ADDED))
    graph = load_recipe(tmp_path, "made")
    checks.refuse_missing_assets(graph, ["made/raw", "made/made", "made/said"], HERE)
    checks.refuse_missing_assets(graph, list(graph.nodes), HERE, lambda: ["made/base", "made/judged"])  # the cache has them
    with pytest.raises(ConfigError) as caught:
        checks.refuse_missing_assets(graph, list(graph.nodes), HERE)
    first, second = (problem.message for problem in caught.value.problems)
    remedy = assets.remedy(["smollm2-135m-instruct", "punkt"])
    assert first.startswith("stage base: asset smollm2-135m-instruct is not on this machine (") and first.endswith(f": {remedy}")
    assert second.startswith("stage judged: asset punkt is not on this machine (") and second.endswith(f": {remedy}")


def test_an_image_of_pods_has_assets_of_its_own():
    launcher = {"type": "kubernetes", "image": "pedigree", "volumes": {"work": "/work"}}
    python = {"python": "/bin/python"}
    pods, own = (Execution.model_validate({"slots": 1, "placement": {"launcher": launcher | more}}) for more in ({}, python))
    assert needs(RECIPES, "tulu3_8b", pods)["humaneval"] == ["humaneval"]
    assert needs(RECIPES, "tulu3_8b", own) == {}
