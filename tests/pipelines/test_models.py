"""Named models: found by name today, at a commit and at a version, by us and by plain DVC; listed with what is known of them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dvc.repo import Repo
from handmade import everything, project_at
from running_lab import REPOSITORY, Lab

from pedigree.configs.language.compile import write_compiled
from pedigree.data.artifacts.artifacts import ArtifactError, open_artifact, scan
from pedigree.pipelines.lineage.find import artifact_folder, find_pedigree
from pedigree.pipelines.lineage.named_models import find_named, named_models, versions
from pedigree.pipelines.publish.catalog import registry
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

    def pedigree(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pedigree.pipelines.cli", *arguments],
            cwd=lab.root,
            env=lab.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pedigree("export", "the-end@first", str(lab.root.parent / "old"))
    assert find_pedigree(None, str(lab.root.parent / "old")).id == old
    assert pedigree("verify", "the-end@first", "the-end").startswith("all as recorded: 2 artifacts")
    assert json.loads(pedigree("models", "--json"))[1]["versions"] == ["v1.0.0", "v1.9.0", "v1.10.0"]
    lines = [line.split() for line in pedigree("models").splitlines()]
    assert lines[0][:4] == ["model", "artifact", "state", "id"] and lines[2][:3] == ["the-end", "lab/tuned", "current"]


def test_names_that_lead_nowhere_are_named(lab: Lab) -> None:
    with pytest.raises(ArtifactError, match=r"at first 'nobody' is not in any dvc.lock"):
        find_pedigree(lab.project, "nobody@first")
    with pytest.raises(ArtifactError, match=r"'v9.9.9' is not a commit, branch or tag"):
        find_pedigree(lab.project, "the-end@v9.9.9")


def test_states_follow_the_artifact(lab: Lab, tmp_path: Path) -> None:
    copy = object.__new__(Lab)
    copy.code, copy.root = lab.code, tmp_path / "copy"
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
    with pytest.raises(ArtifactError, match="the-end is the model of lab/tuned, which is not available: `pedigree run lab`"):
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
    dvc = f"{sys.executable} -m dvc"
    assert "payload/model.safetensors" in lab.shell(f"{dvc} ls . artifacts/lab/tuned --dvc-only -R").stdout
    for version, revision in (("v1.0.0", "first"), ("v1.10.0", "HEAD")):
        lab.shell(f"{dvc} artifacts get . artifacts/lab:the-end --rev {version} -o {tmp_path / version}")
        record = find_pedigree(lab.project, f"the-end@{revision}").record
        assert scan(tmp_path / version) == record.files
    found = Repo(str(lab.root)).artifacts.read()["artifacts/lab/dvc.yaml"]
    assert found["start"].to_dict() == {"path": "base/payload", "type": "model", "desc": "where it begins", "labels": ["tiny"]}


def test_two_recipes_with_one_name_are_told_apart_and_scores_are_shown(tmp_path: Path) -> None:
    project = project_at(tmp_path)
    graph = everything(project)
    (project.recipes / "longer.yaml").write_text("description: more\nextends: tiny\nstages: {rlvr: {steps: 5}}\n")
    from pedigree.configs.language.recipe import load_recipes

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
    assert f"arithmetic {mean:.3f} [{mean - 0.05:.3f}, {mean + 0.1:.3f}]" in rows["tiny/rlvr"].scored()
