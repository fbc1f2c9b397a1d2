"""The folder that travels."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from handmade import build, everything, project_at

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts.artifacts import ArtifactError, content_hash, open_artifact, scan, write_json
from pedigree.data.records import columns
from pedigree.data.records.records import save
from pedigree.pipelines.lineage.ancestry import is_exported, read_pedigree
from pedigree.pipelines.publish.attribution import Origin
from pedigree.pipelines.publish.card import card
from pedigree.pipelines.publish.export import _prove, export


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = project_at(tmp_path_factory.mktemp("export"))
    everything(made, "demo")
    return made


@pytest.fixture
def copy(project, tmp_path):
    return shutil.copytree(project.artifact("demo/sft"), tmp_path / "sft")


def record_anew(folder):
    """The payload was changed: its record is to fit."""
    files = scan(folder / "payload")
    record = json.loads((folder / "record.json").read_text())
    write_json(folder / "record.json", record | {"files": [entry.model_dump() for entry in files], "content": content_hash(files)})


def metadata(readme: str) -> dict:
    return yaml.safe_load(readme.split("---\n")[1])


def test_a_model_has_a_card_whose_front_matter_names_only_what_the_hub_has(project, tmp_path):
    folder = export(project.artifact("demo/rlvr"), "demo/rlvr", tmp_path / "model")
    card = (folder / "README.md").read_text()
    assert metadata(card) == {
        "library_name": "transformers",
        "license": "other",
        "license_link": "README.md#licenses",
        "license_name": "apache-2.0 AND cc-by-nc-4.0",
        "pipeline_tag": "text-generation",
        "tags": ["pedigree", "rlvr"],
    }
    assert all(f"| {name} |" in card for name in ("smollm2-135m-instruct", "alpaca-en-demo"))
    record = json.loads((folder / "pedigree" / "record.json").read_text())
    assert record["content"] in card and record["key"] in card
    assert {"model.safetensors", "config.json"} <= {path.name for path in folder.iterdir()}


def test_a_damaged_artifact_does_not_leave_the_project(copy, tmp_path):
    (copy / "payload" / "model.safetensors").write_text("WEIGHTS of sft")  # as long as before
    with pytest.raises(ArtifactError, match="another sha256"):
        export(copy, "demo/sft", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_payload_that_has_a_readme_is_refused_whole(copy, tmp_path):
    (copy / "payload" / "README.md").write_text("mine")
    record_anew(copy)
    with pytest.raises(UsageProblem, match=r"README\.md"):
        export(copy, "demo/sft", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_read_only_files_of_a_cache_come_out_writable(copy, tmp_path):
    (copy / "payload" / "model.safetensors").chmod(0o444)
    folder = export(copy, "demo/sft", tmp_path / "out")
    assert (folder / "model.safetensors").stat().st_mode & 0o200


def test_a_copy_that_went_wrong_is_found_and_named(project, tmp_path):
    artifact = open_artifact(project.artifact("demo/sft"))
    shutil.copytree(artifact.payload, tmp_path / "copy")
    _prove(tmp_path / "copy", artifact)
    (tmp_path / "copy" / "model.safetensors").write_text("cut off")
    with pytest.raises(ArtifactError, match=r"differs from the record in model\.safetensors"):
        _prove(tmp_path / "copy", artifact)


def test_a_reward_model_of_which_others_would_read_other_scores_does_not_leave(project, tmp_path):
    """Trained before version 0.2; its statistics name no token."""
    made = shutil.copytree(project.artifact("demo/reward"), tmp_path / "reward")
    (made / "payload" / "reward_stats.json").write_text('{"mean": 0.0, "std": 1.0}')
    record_anew(made)
    with pytest.raises(UsageProblem, match=r"demo/reward .* earlier version .* conversation's last token .* Train it again"):
        export(made, "demo/reward", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "count", "files"), [("conversation", 2, 1), ("conversation", 5, 3), ("report", 5, 1)])
def test_rows_that_left_are_what_others_load_from_the_folder(project, tmp_path, monkeypatch, kind, count, files):
    from datasets import load_dataset

    made = shutil.copytree(project.artifact("demo/conversations"), tmp_path / "chat")
    monkeypatch.setattr(columns, "ROWS_PER_FILE", 2)
    said = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    shutil.rmtree(made / "payload")
    save(made, kind, [{"id": f"row {number}", "source": "arithmetic", "messages": said} for number in range(count)])
    record_anew(made)
    folder = export(made, "demo/conversations", tmp_path / "out")
    loaded = load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert len([*folder.glob("rows*")]) == files and list(loaded) == ["train"]  # pyright: ignore[reportArgumentType]
    assert [row["id"] for row in loaded["train"]] == [f"row {number}" for number in range(count)]  # pyright: ignore


def licensed(project, *licences):
    """The license in the front matter of a card for origins with these licenses."""
    given = [Origin(f"source {number}", "data", (licence,)) for number, licence in enumerate(licences)]
    found = metadata(card(read_pedigree(project.artifact("demo/sft")), "demo/sft", (), given))
    return found["license"], found.get("license_name")


def test_a_license_that_the_hub_does_not_know_stands_under_other(project):
    """Issue 4218 of huggingface_hub lists the identifiers; `hf upload` refuses a card with another one."""
    assert licensed(project, "apache-2.0", "apache-2.0") == ("apache-2.0", None)
    assert licensed(project, "odc-by-1.0") == ("odc-by", None) and licensed(project, "odbl-1.0") == ("odbl", None)
    for name in ("gpl-3.0-or-later", "qwen-research", "cc-by-nc-nd-2.0", "LicenseRef-ours", "MIT OR Apache-2.0"):
        assert licensed(project, name) == ("other", name)
    assert licensed(project, "MIT OR Apache-2.0", "cc0-1.0") == ("other", "cc0-1.0 AND (MIT OR Apache-2.0)")


ON_POLICY = """
execution: cpu
stages:
  rows: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 2}]}
  prompts: {kind: prepare_data, record: prompt, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 3}]}
  suite: {kind: prepare_data, record: item, task: t, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 4}]}
  clean: {kind: decontaminate, in: {data: rows, benchmarks: [suite]}}
  asked: {kind: decontaminate, in: {data: prompts, benchmarks: [suite]}}
  base: {kind: source_model, source: {type: hub, repo: lab/base, revision: REVISION}}
  other: {kind: source_model, source: {type: hub, repo: lab/other, revision: REVISION}}
  judging: {kind: source_model, source: {type: hub, repo: lab/judge, revision: REVISION}}
  sft: {kind: sft, in: {policy: base, data: [clean]}, global_batch: 2, max_length: 8, optimizer: {learning_rate: 1e-4}}
  answers:
    kind: sample
    in: {policies: [sft, other], prompts: asked}
    sampling: {max_tokens: 8}
    samples_per_prompt: 1
    prompts: {count: 1}
  judged: {kind: judge, in: {completions: answers, judge: judging}, rating: {rubrics: [honesty], by: {type: policy}}, rating_weight: 1.0}
  pairs: {kind: pair, in: {judgments: judged}, strategy: ranked}
  dpo:
    kind: preference_train
    in: {policy: sft, preferences: [pairs], reference: other}
    loss: {type: dpo}
    global_batch: 2
    max_length: 8
    optimizer: {learning_rate: 1e-4}
  merged: {kind: merge, in: {policies: [dpo, other]}, method: {type: linear}}
""".replace("REVISION", "a" * 40)


def test_the_base_models_of_a_card_are_those_of_its_weights(tmp_path):
    """Models that answered, judged or served as the reference of a training are in its table of licenses only."""
    project = project_at(tmp_path / "lab")
    (project.recipes / "lab.yaml").write_text(ON_POLICY)
    graph = load_recipe(project.recipes, "lab")
    for node in graph.nodes.values():
        weights = {"model.safetensors": node.name, "config.json": "{}"}
        build(project, graph, node, weights if node.output == "policy" else {"rows.jsonl": '{"id": "a"}\n'}, {}, {})
    cards = {name: (export(project.artifact(f"lab/{name}"), name, tmp_path / name) / "README.md").read_text() for name in ("dpo", "merged")}
    assert metadata(cards["dpo"])["base_model"] == "lab/base" and "| lab/judge |" in cards["dpo"]
    assert metadata(cards["merged"])["base_model"] == ["lab/base", "lab/other"]


@pytest.mark.parametrize("target", [".", "../here", "{}"])
def test_the_working_directory_is_filled_and_not_replaced(project, tmp_path, monkeypatch, target):
    """As is a mount point, which nobody can rename over, and a folder whose parent is another user's."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = os.stat(".").st_ino
    export(project.artifact("demo/sft"), "demo/sft", Path(target.format(here)))
    assert here.stat().st_ino == before and is_exported(here)
    assert {"README.md", "model.safetensors", "pedigree"} <= set(os.listdir(".")) and not [
        name for name in os.listdir(".") if name[0] == "."
    ]
    assert os.listdir(tmp_path) == ["here"]
