"""The recipe as it is rehearsed: the same graph, and nothing in it otherwise but what the list of changes says."""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.shrink import Reduced, StandIns, model_repo, rehearsed_name
from pedigree.configs.judging.pools import Sample
from pedigree.configs.language.execution import Execution, batch_problem, fitted
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe, load_recipes
from pedigree.configs.language.recipe_files import recipe_names
from pedigree.configs.rehearsal.families import ModelFamily, families, family_of
from pedigree.configs.rehearsal.shrinking import OF_MACHINE, rehearsed, rehearsed_profile
from pedigree.configs.rows.datasets import PrepareData

ROOT = Path(__file__).parents[2]
RECIPES, PROFILES = ROOT / "configs" / "recipes", ROOT / "configs" / "execution"
COMMIT = "a" * 40
EVERYTHING = StandIns(defaultdict(lambda: COMMIT), defaultdict(lambda: "b" * 64), "http://127.0.0.1:1/v1")


def rehearsal_of(folder: Path, name: str, *overrides: str, recipes: Path = RECIPES) -> tuple[Graph, Graph, list[Reduced]]:
    """(the real graph, the rehearsed one, the changes)."""
    graphs = load_recipes(recipes, name, overrides)
    written = {graph.recipe: graph.written for graph in graphs}
    changes: list[Reduced] = []
    for graph in graphs:
        text, changed = rehearsed(graph, "cpu", EVERYTHING, written.get(graph.extends, ()))
        (folder / f"{rehearsed_name(graph.recipe)}.yaml").write_text(text)
        changes += changed
    return graphs[-1], load_recipe(folder, rehearsed_name(graphs[-1].recipe)), changes


def rehearsal_of_text(folder: Path, text: str) -> tuple[Graph, Graph, list[Reduced]]:
    (folder / "real").mkdir()
    (folder / "real" / "made.yaml").write_text(text)
    return rehearsal_of(folder, "made", recipes=folder / "real")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Graph, Graph, list[Reduced]]]:
    """`rehearsal_of` a recipe that is shipped, loaded once."""
    return cache(lambda name: rehearsal_of(tmp_path_factory.mktemp(name), name))


def fields_of(value: Any, place: str = "") -> dict[str, Any]:
    """Path with dots → value, of everything in a config's dump."""
    if isinstance(value, dict) and value:
        return {path: inner for key, one in value.items() for path, inner in fields_of(one, f"{place}.{key}" if place else key).items()}
    if isinstance(value, list) and value:
        return {path: inner for number, one in enumerate(value) for path, inner in fields_of(one, f"{place}.{number}").items()}
    return {place: value}


def changed_fields(real: Graph, small: Graph) -> set[tuple[str, str]]:
    found = set()
    for node in real.nodes.values():
        there = small.nodes[f"{rehearsed_name(node.recipe)}/{node.name}"]
        before, now = (fields_of(one.config.model_dump(mode="json", exclude_computed_fields=True)) for one in (node, there))
        found |= {(node.address, path) for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
    return found


def same_graph(real: Graph, small: Graph) -> None:
    def told(graph: Graph) -> list[Any]:
        return sorted(
            (rehearsed_name(node.address), node.kind, node.output, [(e.port, e.label, rehearsed_name(e.source)) for e in node.edges])
            for node in graph.nodes.values()
        )

    assert told(small) == told(real)


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_the_graph_is_the_same_and_every_difference_is_told(shipped, name):
    real, small, changes = shipped(name)
    same_graph(real, small)
    told = {(change.where, change.setting) for change in changes}
    untold = {(where, path) for where, path in changed_fields(real, small)
              if not any(where == there and (path == field or path.startswith(f"{field}.")) for there, field in told)}  # fmt: skip
    assert not untold
    assert all(change.real != change.rehearsed for change in changes)


def test_what_makes_a_recipe_what_it_is_stays(shipped):
    real, small, changes = shipped("tulu3_8b")
    kept = {
        "sft": ("loss_reduction", "too_long", "max_length", "seed", "train_on"),
        "dpo": ("loss", "too_long", "max_length", "seed"),
        "rlvr_ppo": ("reward", "max_prompt_length", "samples_per_prompt", "seed"),
        "conversations": ("turns", "ngram", "threshold"),
    }
    for stage, fields in kept.items():
        for name in fields:
            assert getattr(small.find(stage).config, name) == getattr(real.find(stage).config, name), (stage, name)
    ppo, was = (graph.find("rlvr_ppo").config.model_dump() for graph in (small, real))
    assert ppo["algorithm"] | {"critic": was["algorithm"]["critic"]} == was["algorithm"]
    assert {change.setting for change in changes if change.where == "tulu3_8b/sft"} == {
        "global_batch", "optimizer.learning_rate", "optimizer.warmup_ratio"
    }  # fmt: skip
    base: Any = small.find("base").config
    assert base.source.revision == COMMIT and base.chat_template == "tulu" and base.dtype == "bf16"


def test_a_rehearsal_has_other_identities_than_any_real_run(shipped):
    """Whatever comes from outside has another revision, so that no key can be that of a real stage."""
    real, small, _ = shipped("tulu3_8b")
    assert small.find("base").spec != real.find("base").spec and not {node.spec for node in small.own} & {node.spec for node in real.own}


def test_a_variant_is_a_recipe_that_extends_what_it_varies(tmp_path):
    real, small, _ = rehearsal_of(tmp_path, "tiny", "dpo_2.loss.beta=2.0")
    assert small.recipe == rehearsed_name(real.recipe) != "tiny" and "+" not in small.recipe
    same_graph(real, small)
    assert small.find("dpo_2").config.model_dump()["loss"]["beta"] == 2.0
    assert small.nodes["tiny/sft"].recipe == "tiny"  # shared, as the real one shares it


def test_stages_that_a_recipe_leaves_out_stay_out(shipped):
    _, small, _ = shipped("tulu31_8b")
    assert "tulu3_8b/sft" in small.nodes and not {node.name for node in small.nodes.values()} & {"reward", "rlvr_ppo"}


def test_ids_of_real_rows_are_no_ids_of_made_ones(tmp_path):
    filters = 'chat_raw.filters=[{"type": "exact_duplicates"}, {"type": "ids", "ids": ["arithmetic-0123456789abcdef"]}]'
    real, small, reduced = rehearsal_of(tmp_path, "tiny", filters)
    config = small.find("chat_raw").config
    assert isinstance(config, PrepareData) and [one.type for one in config.filters] == ["exact_duplicates"]
    assert [(one.setting, one.reason) for one in reduced if one.where == f"{real.recipe}/chat_raw" and one.setting == "filters"] == [
        ("filters", "data")
    ]


def test_every_source_of_rows_has_a_stand_in(tmp_path):
    sources = """
      - {type: hub, repo: o/n, revision: pin me, split: train, count: 900, max_bad_rows: 0.001}
      - {type: files, path: rows.jsonl}
      - {type: stored, name: logs, url: "s3://bucket/logs.jsonl", sha256: "%s"}
      - {type: packaged, asset: alpaca-en-demo}
      - {type: arithmetic, operations: [add], digits: [1], count: 1000, seed: 1}
    """ % ("c" * 64)
    _, small, _ = rehearsal_of_text(tmp_path, f"stages:\n  rows:\n    kind: prepare_data\n    record: conversation\n    sources: {sources}")
    hub, files, stored, packaged, ruled = small.find("rows").config.model_dump()["sources"]
    assert hub["revision"] == COMMIT and hub["count"] == 3 and 0 < hub["max_bad_rows"] < 1
    assert files["path"] == "rows.jsonl" and stored["sha256"] == "b" * 64
    assert packaged["count"] == 8 and ruled["count"] == 48


def test_a_mixture_is_made_of_the_few_rows_that_there_are(tmp_path):
    """Whatever it says of amounts: none is too few, and filters may leave less."""
    _, small, _ = rehearsal_of_text(
        tmp_path,
        """
stages:
  parts:
    kind: prepare_data
    record: conversation
    total: 1000
    draw: after_filters
    sources:
      - {type: hub, repo: o/n, revision: pin me, split: train, share: 0.5, repeat: true, weights: {a: 1, b: 2}}
      - {type: packaged, asset: alpaca-en-demo, share: 0.4}
      - {type: files, path: rows.jsonl, count: 100}
  again:
    kind: prepare_data
    in: {rows: [parts]}
    record: conversation
    sources: [{type: artifact, input: parts, count: 500}, {type: packaged, asset: alpaca-en-demo, epochs: 0.5}]
""",
    )
    said = {name: small.find(name).config for name in ("parts", "again")}
    assert said["parts"].total is None and not said["parts"].sources[0].weights
    drawn = [(source.count, source.share, source.epochs, source.repeat) for config in said.values() for source in config.sources]
    everything, eight = (None, None, None, False), (8, None, None)
    assert drawn == [everything, (*eight, True), (*eight, True), everything, (*eight, False)]


def test_made_rows_need_not_be_as_expected(tmp_path):
    _, small, changes = rehearsal_of_text(
        tmp_path,
        """
stages:
  rows:
    kind: prepare_data
    record: conversation
    sources: [{type: hub, repo: o/n, revision: pin me, split: train}]
    expectations:
      - {expect: table_row_count_to_be_between, min_value: 900000}
      - {expect: column_values_to_not_match_regex, column: text, regex: a, severity: warn}
""",
    )
    assert [one["severity"] for one in small.find("rows").config.model_dump()["expectations"]] == ["warn", "warn"]
    assert [change.reason for change in changes if change.setting == "expectations.0.severity"] == ["thresholds"]
    assert not any(change.setting.startswith("expectations.1") for change in changes)


def test_an_endpoint_becomes_a_made_one(tmp_path):
    _, small, changes = rehearsal_of_text(
        tmp_path,
        """
stages:
  pool: {kind: prepare_data, record: prompt, sources: [{type: arithmetic, operations: [add], digits: [1], count: 8, seed: 1}]}
  base: {kind: source_model, source: {type: hub, repo: allenai/OLMo-2-0425-1B, revision: pin me}, chat_template: tulu}
  said: {kind: sample, in: {policies: [base], prompts: pool}, sampling: {max_tokens: 512}, samples_per_prompt: 8, prompts: {count: 8}}
  rated:
    kind: judge
    in: {completions: said}
    rating_weight: 1.0
    rating: {rubrics: [honesty], by: {type: endpoint, base_url: "https://api.openai.com/v1", model: m}}
""",
    )
    assert small.find("rated").config.model_dump()["rating"]["by"]["base_url"] == EVERYTHING.judge_url
    assert {change.reason for change in changes if change.where == "made/rated"} == {"judges", "lengths", "thresholds"}


@pytest.mark.parametrize(("temperature", "samples", "rehearsed_samples"), [("1.0", 8, 2), ("[0.5, 1.0]", 8, 2), ("[0.5, 0.8, 1.0]", 9, 3)])
def test_all_temperatures_of_a_pool_are_rehearsed(tmp_path, temperature, samples, rehearsed_samples):
    real, small, _ = rehearsal_of_text(
        tmp_path,
        f"""
stages:
  pool: {{kind: prepare_data, record: prompt, sources: [{{type: arithmetic, operations: [add], digits: [1], count: 8, seed: 1}}]}}
  base: {{kind: source_model, source: {{type: hub, repo: allenai/OLMo-2-0425-1B, revision: pin me}}, chat_template: tulu}}
  said:
    kind: sample
    in: {{policies: [base], prompts: pool}}
    sampling: {{temperature: {temperature}, max_tokens: 512}}
    samples_per_prompt: {samples}
    prompts: {{count: 8}}
""",
    )
    found, was = small.find("said").config, real.find("said").config
    assert isinstance(found, Sample) and isinstance(was, Sample)
    assert found.samples_per_prompt == rehearsed_samples and found.sampling.temperature == was.sampling.temperature


def profile_of_two_cores(name: str) -> Execution:
    """Two for each slot."""
    cores = 16 if name == "gpu8" else 2
    return Execution.model_validate(fitted(yaml.safe_load((PROFILES / f"{name}.yaml").read_text()), cores=cores, memory=None))


@pytest.mark.parametrize("name", ["cpu", "gpu", "gpu8"])
def test_a_profile_keeps_how_it_trains_and_loses_its_gpus(tmp_path, name):
    real = profile_of_two_cores(name)
    text, changes = rehearsed_profile(real, name, 2, tmp_path)
    small = Execution.model_validate(yaml.safe_load(text))
    for kind in ("sft", "preference_train", "rlvr", "evaluate"):
        (was, _), (numerics, placement) = real.of(kind, kind), small.of(kind, kind)
        kept = ("zero_stage", "packing", "gradient_checkpointing", "logprob_chunk")
        assert [getattr(numerics, field) for field in kept] == [getattr(was, field) for field in kept]
        assert numerics.device == "cpu" and numerics.world_size == min(2, was.world_size) == placement.slots
        assert numerics.tensor_parallel == 1 and not numerics.offload_optimizer
    assert (name == "cpu") == (not any(change.setting == "device" for change in changes))
    told = {change.setting: (change.real, change.rehearsed) for change in changes if change.where == name and change.reason == "machine"}
    assert told["threads"] == (real.numerics.threads, 1) == (2, 1)
    assert told["sampler_memory_gb"] == (real.placement.sampler_memory_gb, 0.5)
    assert told["checkpoint_every_steps"] == (None, 1) and placement.checkpoint_every_steps == 1


def test_the_list_of_what_a_rehearsal_changes_in_a_profile_is_complete():
    """Whatever a stage runs with otherwise than by the real profile stands in the list, but for what the machine decides."""
    overrides = {"kinds": {"sample": {"placement": {"sampler_memory_gb": 4}}}, "stages": {"it": {"numerics": {"threads": 5}}}}
    real = Execution.model_validate({"slots": 9, "placement": {"retries": 3, "launcher": {"type": "slurm"}}, **overrides})
    text, changes = rehearsed_profile(real, "it", 2, Path())
    small = Execution.model_validate(yaml.safe_load(text))
    for kind, stage in (("sample", "other"), ("sft", "it"), ("sft", "other")):
        for was, now in zip(real.of(kind, stage), small.of(kind, stage), strict=True):
            differing = {field for field, value in was if getattr(now, field) != value} - {*OF_MACHINE}
            assert differing <= {change.setting for change in changes}
        assert small.of(kind, stage)[1].launcher.type == "local"  # a rehearsal waits for no queue
    assert Reduced("it: sample", "sampler_memory_gb", 4, 0.5, "machine") in changes
    assert Reduced("it: it", "threads", 5, 1, "machine") in changes


def test_the_environment_of_commands_is_still_that_of_the_real_project(tmp_path):
    own = {name: {"placement": {"environment": given}} for name, given in (("near", "envs/b"), ("far", "/envs/c"))}
    real = Execution.model_validate({"slots": 1, "placement": {"environment": ".venv-trl"}, "stages": own})
    small = Execution.model_validate(yaml.safe_load(rehearsed_profile(real, "it", 2, tmp_path)[0]))
    found = [small.of("external", stage)[1].environment for stage in ("other", "near", "far")]
    assert found == [str(tmp_path / ".venv-trl"), str(tmp_path / "envs/b"), "/envs/c"]


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_every_rehearsed_batch_can_be_shared_by_two_ranks(shipped, name):
    _, small, _ = shipped(name)
    for profile in ("cpu", "gpu8"):
        real = profile_of_two_cores(profile)
        made = Execution.model_validate(yaml.safe_load(rehearsed_profile(real, profile, 2, ROOT)[0]))
        assert not [problem for node in small.nodes.values() if (problem := batch_problem(node.config, made.of(node.kind, node.name)[0]))]


# --- families of models ------------------------------------------------------------------------------------------------


KNOWN = families([ROOT / "configs" / "rehearsal" / "models"])


def test_every_model_of_the_flagship_has_a_family():
    graphs = [load_recipe(RECIPES, name) for name in ("olmo2_1b", "tulu3_8b", "tulu31_8b", "tulu3_8b_onpolicy")]
    repos = {
        model_repo(node.address, node.config.source) for graph in graphs for node in graph.nodes.values() if node.kind == "source_model"
    }
    assert repos >= {"allenai/OLMo-2-0425-1B", "meta-llama/Llama-3.1-8B"}
    assert not [repo for repo in repos if family_of(repo, KNOWN) is None]


def test_the_family_with_the_narrowest_pattern_is_taken():
    base, chat = (family_of(f"meta-llama/Llama-3.1-8B{ending}", KNOWN) for ending in ("", "-Instruct"))
    assert base and chat and base.tokenizer.eos == "<|end_of_text|>" and chat.tokenizer.eos == "<|eot_id|>"


def test_the_projects_own_description_goes_before_ours(tmp_path):
    (tmp_path / "llama-3.yaml").write_text(
        "{repos: [meta-llama/Llama-3.1-8B], model_type: llama, heads: 2, kv_heads: 1, tokenizer: {split: x, control: [e], eos: e}}"
    )
    found = family_of("meta-llama/Llama-3.1-8B", families([tmp_path, ROOT / "configs" / "rehearsal" / "models"]))
    assert found is not None and found.heads == 2


def test_a_family_that_cannot_be_is_refused_with_its_file(tmp_path):
    tokenizer = "{split: x, control: [a], eos: e}"
    (tmp_path / "strange.yaml").write_text(f"{{repos: [a/b], model_type: x, heads: 1, kv_heads: 1, tokenizer: {tokenizer}}}")
    with pytest.raises(ConfigError, match=r"strange.yaml.*e must be among the control tokens"):
        families([tmp_path])
    with pytest.raises(ValueError, match="split"):
        ModelFamily.model_validate(
            {"repos": ["a/b"], "model_type": "x", "heads": 1, "kv_heads": 1, "tokenizer": {"control": ["e"], "eos": "e"}}
        )


def test_filters_by_tokens_and_columns_let_made_rows_pass_and_those_by_licences_stay(tmp_path):
    filters = [
        {"type": "tokens", "min": 100, "max": 4096},
        {"type": "values", "column": "quality", "min": 0.5},
        {"type": "licences", "allow": ["odc-by"]},
    ]
    settings = [f"conversations_raw.filters={json.dumps(filters)}", "conversations_raw.in.tokenizer=base"]
    real, small, reduced = rehearsal_of(tmp_path, "tulu3_8b", *settings)
    was, now = (graph.find("conversations_raw").config.model_dump(mode="json")["filters"] for graph in (real, small))
    assert now == [{"type": "tokens", "min": 1, "max": None}, was[2]] and was[2]["stated"]
    assert [one.setting for one in reduced if one.where == f"{real.recipe}/conversations_raw" and one.setting == "filters"] == ["filters"]
