"""The folder that travels."""

import json
import shutil

import pytest
import yaml
from handmade import everything, project_at

from pedigree.configs.base.problems import UsageProblem
from pedigree.data.artifacts.artifacts import ArtifactError, content_hash, open_artifact, scan, write_json
from pedigree.pipelines.publish.export import _prove, export


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = project_at(tmp_path_factory.mktemp("export"))
    everything(made, "demo")
    return made


@pytest.fixture
def copy(project, tmp_path):
    return shutil.copytree(project.artifact("demo/sft"), tmp_path / "sft")


def metadata(readme: str) -> dict:
    return yaml.safe_load(readme.split("---\n")[1])


def test_a_model_has_a_card_whose_front_matter_names_only_what_the_hub_has(project, tmp_path):
    folder = export(project.artifact("demo/rlvr"), "demo/rlvr", tmp_path / "model")
    card = (folder / "README.md").read_text()
    assert metadata(card) == {
        "library_name": "transformers",
        "license": "other",
        "license_link": "README.md#licenses",
        "license_name": "apache-2.0 AND cc-by-nc-4.0 AND unknown",
        "pipeline_tag": "text-generation",
        "tags": ["pedigree", "rlvr"],
    }
    assert all(f"| {name} |" in card for name in ("smollm2-135m-instruct", "alpaca-en-demo", "dpo-en-demo"))
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
    files = scan(copy / "payload")
    record = json.loads((copy / "record.json").read_text())
    write_json(copy / "record.json", record | {"files": [entry.model_dump() for entry in files], "content": content_hash(files)})
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
