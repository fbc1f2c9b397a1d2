"""Every name of an artifact or model leads to its pedigree: today's, that of a commit or version, that of an ancestor that is gone."""

import json
import shutil
import subprocess
from copy import copy as shallow
from pathlib import Path

import pytest
from commands import InProcessCommand
from dvc.repo import Repo
from dvc.repo.artifacts import Artifacts
from handmade import made_at
from running_lab import REPOSITORY, Lab

from pedigree.configs.language.compile import write_compiled
from pedigree.configs.language.recipe import load_recipes
from pedigree.data.artifacts.artifacts import ArtifactError, open_artifact, scan
from pedigree.pipelines.ledger.lock_files import recorded_at
from pedigree.pipelines.lineage.ancestry import Pedigree, read_pedigree, walk
from pedigree.pipelines.lineage.difference import compare
from pedigree.pipelines.lineage.find import artifact_folder, find_pedigree
from pedigree.pipelines.lineage.named_models import find_named, named_models, versions
from pedigree.pipelines.publish.catalog import registry
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.reproduce.reproduction import read_subject
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import run_graph

COMMIT = "git add -A && git -c user.name=t -c user.email=t@t commit -qm"
TAG = "git -c user.name=t -c user.email=t@t tag -a -m version"  # DVC passes over tags without a message
MODELS = """
models:
  start: {stage: base, desc: where it begins, labels: [tiny]}
  the-end: {stage: tuned}
"""
STAGES = """
  base:
    kind: source_model
    in: {corpus: [cleaner]}
    source: {type: random_llama, layers: 1, hidden: 8, heads: 1, kv_heads: 1, ffn: 8, vocabulary: 300, context: 16}
  tuned:
    kind: sft
    in: {policy: base, data: cleaner}
    global_batch: 5
    max_length: 8
    optimizer: {learning_rate: 0.1}
"""


def run(lab: Lab) -> None:
    ends = run_graph(lab.run())
    assert all(isinstance(end, Result) for end in ends), ends


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Two commits; the tag of a version stands at the first, in which `tuned` saw five rows, in the second six."""
    lab = Lab(tmp_path_factory.mktemp("models"))
    recipe = lab.root / "configs/recipes/lab.yaml"
    recipe.write_text(recipe.read_text() + STAGES + MODELS)
    run(lab)
    lab.shell(f"{COMMIT} one && git tag first && {TAG} artifacts/lab=the-end@v1.0.0")
    lab.edit("configs/recipes/lab.yaml", "count: 5", "count: 6")
    run(lab)
    lab.shell(f"{COMMIT} two && {TAG} artifacts/lab=the-end@v1.10.0 && {TAG} artifacts/lab=the-end@v1.9.0 first")
    return lab


def test_a_name_leads_to_todays_artifact_and_to_those_of_commits_and_versions(lab: Lab) -> None:
    project = lab.project
    now = open_artifact(project.artifact("lab/tuned")).record.id
    for name in ("the-end", "lab/the-end", "artifacts/lab:the-end"):
        assert find_pedigree(project, name).id == now
    old = find_pedigree(project, "lab/tuned@first").id
    assert old != now
    for name in ("the-end@first", "lab/the-end@first", "the-end@v1.0.0", "lab/the-end@v1.0.0", "artifacts/lab:the-end@v1.0.0"):
        assert find_pedigree(project, name).id == old, name
    assert find_pedigree(project, "the-end@HEAD").id == find_pedigree(project, "the-end@v1.10.0").id == now


def test_an_artifact_of_a_commit_is_exported_verified_and_reproduced_by_name(lab: Lab) -> None:
    project = lab.project
    old = find_pedigree(project, "the-end@first").id
    with artifact_folder(project, "the-end@v1.0.0") as (folder, address):
        assert open_artifact(folder, verify=True).record.id == old and address == "lab/tuned"
    assert not folder.exists() and not list(project.private.glob("committed-*"))
    assert read_subject(project, "the-end@first").root.id == old
    assert read_subject(project, "the-end").root.id == find_pedigree(project, "the-end").id

    pedigree = InProcessCommand(lab)
    pedigree("export", "the-end@first", str(lab.root.parent / "old"))
    assert find_pedigree(None, str(lab.root.parent / "old")).id == old
    assert pedigree("verify", "the-end@first", "the-end").startswith("all as recorded: 2 artifacts")
    assert json.loads(pedigree("models", "--json"))[1]["versions"] == ["v1.0.0", "v1.9.0", "v1.10.0"]
    lines = [line.split() for line in pedigree("models").splitlines()]
    assert lines[0][:4] == ["model", "artifact", "state", "id"] and lines[2][:3] == ["the-end", "lab/tuned", "current"]


def test_states_follow_the_artifact(lab: Lab, tmp_path: Path) -> None:
    copy = shallow(lab)
    copy.root = tmp_path / "copy"
    subprocess.run(["cp", "-r", lab.root, copy.root], check=True)

    def states() -> dict[str, str]:
        return {row.model.name: row.state for row in registry(copy.project)}

    assert states() == {"start": "current", "the-end": "current"}
    copy.edit("configs/recipes/lab.yaml", "global_batch: 5", "global_batch: 6")
    copy.run()
    assert states() == {"start": "current", "the-end": "stale"}
    recipe = (copy.root / "configs/recipes/lab.yaml").read_text()
    for broken in ("kind: nothing", "stages: [", None):
        (copy.root / "configs/recipes/lab.yaml").write_text(broken) if broken else (copy.root / "configs/recipes/lab.yaml").unlink()
        assert states() == {"start": "no recipe", "the-end": "no recipe"}, broken
    (copy.root / "configs/recipes/lab.yaml").write_text(recipe)
    shutil.rmtree(copy.project.artifact("lab/tuned"))
    (row,) = [row for row in registry(copy.project) if row.model.name == "the-end"]
    assert row.state == "recorded" and row.record and row.record.id == find_pedigree(lab.project, "the-end").id
    (copy.root / "artifacts/lab/dvc.lock").unlink()
    assert states() == {"start": "stale", "the-end": "not made"}
    with pytest.raises(
        ArtifactError, match=r"the-end is the model of lab/tuned, which is not available: .*run lab` .*, or `pedigree pull lab`"
    ):
        find_pedigree(copy.project, "the-end")


def test_a_variant_does_not_take_the_name_away(lab: Lab) -> None:
    before = {model.address for model in named_models(lab.project)}
    graph = lab.run("tuned.global_batch=3").graph
    try:
        models = named_models(lab.project)
        assert {model.address for model in models} == before | {f"{graph.recipe}/tuned"}
        plain, variant = find_named(models, "the-end"), find_named(models, f"{graph.recipe}/the-end")
        assert plain and plain.address == "lab/tuned" and variant and variant.address == f"{graph.recipe}/tuned"
    finally:
        shutil.rmtree(lab.project.recipe_folder(graph.recipe))


def test_plain_dvc_takes_the_compiled_file_and_gets_a_model_by_name_and_version(lab: Lab, tmp_path: Path) -> None:
    listed = Repo.ls(str(lab.root), "artifacts/lab/tuned", dvc_only=True, recursive=True)
    assert "payload/model.safetensors" in {entry["path"] for entry in listed}
    for version, revision in (("v1.0.0", "first"), ("v1.10.0", "HEAD")):
        Artifacts.get(str(lab.root), name="artifacts/lab:the-end", version=version, out=str(tmp_path / version))
        record = find_pedigree(lab.project, f"the-end@{revision}").record
        assert scan(tmp_path / version) == record.files
    found = Repo(str(lab.root)).artifacts.read()["artifacts/lab/dvc.yaml"]
    assert found["start"].to_dict() == {"path": "base/payload", "type": "model", "desc": "where it begins", "labels": ["tiny"]}


def test_two_recipes_with_one_name_are_told_apart_and_scores_are_shown(lab: Lab, tmp_path: Path) -> None:
    project, graph = made_at(tmp_path)
    (project.recipes / "longer.yaml").write_text("description: more\nextends: tiny\nstages: {rlvr: {steps: 5}}\n")
    write_compiled(project.root, load_recipes(project.recipes, "longer"))
    for name in (".dvc/config", ".gitignore"):
        shutil.copy(REPOSITORY / name, project.root / name)
    subprocess.run(["git", "init", "-q"], cwd=project.root, check=True)
    models = named_models(project)
    with pytest.raises(ArtifactError, match=r"'rlvr' matches several models; choose one of longer/rlvr, tiny/rlvr"):
        find_named(models, "rlvr")
    found = find_named(models, "tiny/rlvr")
    assert found and found.address == "tiny/rlvr" and versions(project, found) == []
    rows = {row.model.address: row for row in registry(project)}
    (scores,) = [node for node in graph.nodes.values() if node.kind == "evaluate" and "rlvr" in [edge.label for edge in node.edges]][:1]
    index = [edge.label for edge in scores.edges if edge.port == "policies"].index("rlvr")
    mean = 0.1 + 0.15 * index  # see `handmade`
    assert f"arithmetic {mean:.3f}" in rows["tiny/rlvr"].cells()[4]
    here = shallow(lab)
    here.root = project.root
    pedigree = InProcessCommand(here)
    made = pedigree("models")
    assert "tiny/rlvr" in made and "longer/rlvr" not in made and "2 more named models not made yet" in made
    assert "longer/rlvr" in pedigree("models", "--all")
    assert max(map(len, made.splitlines())) < 120, "a model takes one line"


def rows(pedigree: Pedigree) -> int:
    with pedigree.open_file("rows.jsonl") as stream:
        return len(stream.readlines())


def test_today_and_the_commit_have_a_pedigree_each(lab: Lab) -> None:
    now, before = find_pedigree(lab.project, "lab/cleaner"), find_pedigree(lab.project, "lab/cleaner@first")
    assert now.id != before.id and find_pedigree(lab.project, "cleaner@HEAD").id == now.id
    assert (rows(now), rows(before)) == (6, 5)
    names, others = ([found.address.partition("/")[2] for found in walk(pedigree)] for pedigree in (before, now))
    assert names == others == ["cleaner", "clean", "raw", "suite", "suite"]
    found = compare(before, now)
    assert found.rows and (found.rows.by, found.rows.added, found.rows.removed, found.rows.kept) == ("", 1, 0, 5)
    assert [(origin.path, origin.why) for origin in found.origins] == [("data < data", ["sources[0].count: 5 -> 6"])]


def test_stage_names_ids_and_contents_do(lab: Lab) -> None:
    now = find_pedigree(lab.project, "lab/clean")
    assert find_pedigree(lab.project, "clean").id == find_pedigree(lab.project, now.id[:10]).id == now.id


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lab/clean@nowhere", "'nowhere' is not a commit, branch or tag"),
        ("the-end@v9.9.9", "'v9.9.9' is not a commit, branch or tag"),
        ("lab/sft@first", "at first 'lab/sft' is not in any dvc.lock; recorded: lab/base, lab/clean, lab/cleaner, lab/raw, lab/suite"),
    ],
)
def test_names_that_lead_nowhere_are_named(lab: Lab, name: str, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        find_pedigree(lab.project, name)


def test_an_export_leads_to_the_pedigree_inside(lab: Lab, tmp_path: Path) -> None:
    artifact = lab.project.artifact("lab/cleaner")
    folder = export(artifact, "lab/cleaner", tmp_path / "travelled")
    pedigree = find_pedigree(None, str(folder))
    assert pedigree.id == read_pedigree(artifact).id and rows(pedigree) == 6
    assert pedigree.as_lineage() == read_pedigree(artifact).as_lineage()


def test_an_ancestor_that_was_replaced_is_known_by_its_id(lab: Lab) -> None:
    old = find_pedigree(lab.project, "lab/raw@first")
    with pytest.raises(ArtifactError, match="not an artifact folder"):
        find_pedigree(lab.project, old.id[:12])
    target = lab.root / "artifacts/other/cleaner"
    target.mkdir(parents=True)
    before = find_pedigree(lab.project, "lab/cleaner@first")
    ledger = lab.run().ledger
    for entry in recorded_at(lab.project, "first"):
        if entry.address == "lab/cleaner" and entry.part.endswith(".json"):
            with ledger.open_object(entry.md5) as stream:
                (target / entry.part).write_bytes(stream.read())
    (target / "payload").mkdir()
    with before.open_file("rows.jsonl") as stream:
        (target / "payload" / "rows.jsonl").write_bytes(stream.read())
    try:
        found = find_pedigree(lab.project, old.id[:12])
        assert (found.id, found.address) == (old.id, "lab/raw")
        with pytest.raises(ArtifactError, match="only the records"):
            found.open_file("rows.jsonl")
    finally:
        shutil.rmtree(lab.root / "artifacts/other")


def test_a_cache_that_lacks_it_or_is_damaged_says_so(lab: Lab, tmp_path: Path) -> None:
    ledger = lab.run().ledger
    entry = next(e for e in recorded_at(lab.project, "first") if (e.address, e.part) == ("lab/raw", "record.json"))
    place = ledger.cache.path(entry.md5)
    whole, config = place.read_bytes(), lab.root / ".dvc/config.local"
    kept_config = config.read_text()
    try:
        place.chmod(0o644)
        place.write_bytes(whole.replace(b"1", b"2", 1))
        with pytest.raises(ArtifactError, match=rf"this machine's cache does not hold an intact object {entry.md5}: add the DVC remote"):
            find_pedigree(lab.project, "lab/raw@first")
        config.write_text(f"{kept_config}    remote = away\n['remote \"away\"']\n    url = {tmp_path / 'remote'}\n")
        with pytest.raises(ArtifactError, match=rf"neither this machine's cache nor the remote 'away' holds an intact object {entry.md5}"):
            find_pedigree(lab.project, "lab/raw@first")
        kept = tmp_path / "remote/files/md5" / entry.md5[:2] / entry.md5[2:]
        kept.parent.mkdir(parents=True)
        kept.write_bytes(whole)
        assert find_pedigree(lab.project, "lab/raw@first").address == "lab/raw"
        kept.write_bytes(whole[:-2])
        with pytest.raises(ArtifactError, match=f"object {entry.md5} of the remote 'away' does not match its hash"):
            find_pedigree(lab.project, "lab/raw@first")
    finally:
        place.unlink(missing_ok=True)
        place.write_bytes(whole)
        config.write_text(kept_config)
