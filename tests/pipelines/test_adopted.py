"""The export of one project as the base model of another: its lineage goes on in the new records, and is what its files are."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from handmade import THEIRS, WEIGHTS, build, exported, in_lines, project_at

from pedigree.configs.base.document import ConfigError
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.stated_sources import licences_of
from pedigree.data.artifacts.artifacts import ADOPTED, ArtifactError, open_artifact, read_json, read_lineage, stage_key, write_json
from pedigree.data.artifacts.chain import lineage_problems
from pedigree.data.artifacts.exports import checked_records, is_export
from pedigree.data.artifacts.source_files import KnownHashes
from pedigree.pipelines.lineage.ancestry import read_pedigree, walk
from pedigree.pipelines.lineage.inheritance import adopted, lineage_of, write_origin
from pedigree.pipelines.publish.attribution import origins
from pedigree.pipelines.publish.card import card
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.reproduce.rebuild import members_of
from pedigree.pipelines.reproduce.reproduction import _subject
from pedigree.pipelines.run.checks import refuse_contradictions
from pedigree.pipelines.run.opening import load_execution

pytestmark = pytest.mark.unit

OURS = """
execution: cpu
stages:
  base: {kind: source_model, source: {type: folder, path: PLACE}}
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return exported(tmp_path)


def ours(tmp_path: Path, theirs: Path) -> Path:
    """The artifact of a project that imported the export."""
    project = project_at(tmp_path / "ours")
    (project.recipes / "lab.yaml").write_text(OURS.replace("PLACE", str(theirs)))
    graph = load_recipe(project.recipes, "lab")
    build(project, graph, graph.nodes["lab/base"], WEIGHTS, {}, {})
    folder = project.artifact("lab/base")
    for name, data in checked_records(theirs, KnownHashes().files(theirs)).items():
        (folder / "evidence" / ADOPTED / "pedigree").mkdir(parents=True, exist_ok=True)
        (folder / "evidence" / ADOPTED / "pedigree" / name).write_bytes(data)
    record = open_artifact(folder).record
    files = {"outside/exported": KnownHashes().sha256(theirs)}
    key = stage_key(record.kind, record.version, record.config, [], files)
    made = record.model_copy(update={"inputs": adopted(folder), "source_files": files, "key": key})
    write_json(folder / "record.json", made.model_dump(mode="json"))
    write_origin(folder, read_json(folder / "run.json") | {"schema_version": 2, "address": "lab/base"}, [folder / "evidence" / ADOPTED])
    return folder


def test_the_lineage_of_an_export_goes_on_in_the_project_that_adopts_it(tmp_path: Path, theirs: Path) -> None:
    folder = ours(tmp_path, theirs)
    found = read_pedigree(folder)
    assert [one.address for one in walk(found)][:3] == ["lab/base", "lab/sft", "lab/base"]
    assert [one.role for one in walk(found)][1] == ADOPTED
    assert lineage_problems(found.record, read_lineage(folder / "lineage.json")) == []
    assert {one.record.kind for one in found.parents_first()} == {"prepare_data", "decontaminate", "source_model", "sft"}
    assert "base_model: lab/model" in card(found, "lab/base", (), origins(found))
    again = read_pedigree(export(folder, "lab/base", tmp_path / "again"))
    assert again.entries.keys() == found.entries.keys()


def test_their_licenses_are_passed_on_and_ours_are_not_taken_for_theirs(tmp_path: Path, theirs: Path) -> None:
    """Both projects have a recipe `lab` and a file rows.jsonl, which are not the same."""
    folder = ours(tmp_path, theirs)
    project = project_at(tmp_path / "third")
    (project.recipes / "lab.yaml").write_text(THEIRS.replace("cc-by-nc-4.0", "mit"))
    found = {one.name: one.licences for one in origins(read_pedigree(folder), project)}
    assert found == {"lab/model": ("llama3.1",), "rows.jsonl (of another project)": ("cc-by-nc-4.0",)}


def test_rows_that_both_projects_have_keep_both_licenses(tmp_path: Path, theirs: Path) -> None:
    entries = {identifier: entry for identifier, entry in read_pedigree(theirs).entries.items() if entry[1].licences}
    (identifier,) = [name for name, (record, _) in entries.items() if record.kind == "prepare_data"]
    mine = project_at(tmp_path / "mine")
    (mine.recipes / "lab.yaml").write_text(THEIRS.replace("cc-by-nc-4.0", "mit"))
    graph = load_recipe(mine.recipes, "lab")
    build(mine, graph, graph.nodes["lab/rows"], {"rows.jsonl": in_lines([{"id": "a"}])}, {}, {})
    run = mine.artifact("lab/rows") / "run.json"
    write_json(run, read_json(run) | {"licences": licences_of(graph.nodes["lab/rows"].config)})
    found = lineage_of([theirs, mine.artifact("lab/rows")], {})["artifacts"]
    assert found[identifier]["run"]["licences"] == {"rows.jsonl": ["cc-by-nc-4.0", "mit"]}


def test_inherited_stages_are_named_and_not_reproduced(tmp_path: Path, theirs: Path) -> None:
    folder = ours(tmp_path, theirs)
    found = read_pedigree(folder)
    members = members_of(found.record, found.run, read_lineage(folder / "lineage.json"), {})
    assert [one.record.kind for one in members.values()] == ["source_model"]
    said = _subject(folder, None, None).inherited_text()
    assert said.startswith("5 stages of the project that a base model was exported from (lab/") and "only there" in said
    assert _subject(theirs / "pedigree", None, None).inherited_text() == ""


def forge(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


HOSTILE = {
    "other weights": (lambda at: (at / "model.safetensors").write_text("x"), "model.safetensors is not as recorded"),
    "lacking weights": (lambda at: (at / "model.safetensors").unlink(), "model.safetensors is not as recorded"),
    "another template": (lambda at: (at / "chat_template.jinja").write_text("x"), "chat_template.jinja was added"),
    "more weights": (lambda at: (at / "model.safetensors.index.json").write_text("{}"), "model.safetensors.index.json was added"),
    "no lineage": (lambda at: (at / "pedigree/lineage.json").unlink(), "its lineage is damaged"),
    "an empty run": (lambda at: (at / "pedigree/run.json").write_text(""), "its lineage is damaged"),
    "only a lineage": (lambda at: (at / "pedigree/record.json").unlink(), "its lineage is damaged"),
    "a cut lineage": (lambda at: forge(at / "pedigree/lineage.json", lambda it: it["artifacts"].popitem()), "it lacks "),
    "other settings": (lambda at: forge(at / "pedigree/record.json", lambda it: it["config"].update(seed=9)), "its key is not the hash"),
    "a way out": (lambda at: forge(at / "pedigree/record.json", lambda it: it["files"][0].update(path="../x")), "its lineage is damaged"),
    "a reward model": (lambda at: forge(at / "pedigree/record.json", lambda it: it.update(type="reward_model")), "exported reward_model"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_export_that_was_changed_is_refused_with_what_to_do(theirs: Path, case: str) -> None:
    change, says = HOSTILE[case]
    change(theirs)
    with pytest.raises(ArtifactError) as error:
        checked_records(theirs, KnownHashes().files(theirs))
    assert says in str(error.value) and ("delete pedigree/" in str(error.value) or "name the export of a policy" in str(error.value))


def test_what_does_not_make_the_model_may_change(theirs: Path) -> None:
    (theirs / "README.md").write_text("Our notes.")
    (theirs / "LICENSE").write_text("Ask.")
    (theirs / ".cache").mkdir()
    (theirs / ".cache/x.json").write_text("{}")
    assert len(checked_records(theirs, KnownHashes().files(theirs))) == 3
    shutil.rmtree(theirs / "pedigree")
    assert not is_export(theirs)


def test_a_changed_export_and_the_payload_of_an_artifact_are_refused_before_a_run(tmp_path: Path, theirs: Path) -> None:
    project = project_at(tmp_path / "new")

    def said(place: Path) -> str:
        (project.recipes / "lab.yaml").write_text(OURS.replace("PLACE", str(place)))
        graph = load_recipe(project.recipes, "lab")
        with pytest.raises(ConfigError) as error:
            refuse_contradictions(project, graph, load_execution(project, graph.execution), ["lab/base"])
        return str(error.value)

    assert f"{theirs}: model.safetensors is damaged" in said(theirs)  # its records are fine, and the model is made by hand
    (theirs / "config.json").write_text("[]")
    assert "changed since (config.json is not as recorded)" in said(theirs)
    of_artifact = tmp_path / "theirs/artifacts/lab/sft"
    assert "name the folder that `pedigree export` writes" in said(of_artifact)
    assert "name the folder that `pedigree export` writes" in said(of_artifact / "payload")
