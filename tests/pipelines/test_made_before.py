"""What an earlier version made stays restorable and reproducible, and current unless its stage or a verifier has another version.

`made_at_41edb6e.tar.xz` holds what git and the DVC remote kept of a project whose recipe `small`, 14 stages of nine kinds, ran with
the code of commit 41edb6e on a CPU with AVX-512 and without bf16 units.
"""

import json
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import in_project
from in_process import InProcessLauncher
from projects import call, contents
from running_lab import CLEAN, status

from pedigree.configs.base.project import Project
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.provenance import hardware
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.runs import run_graph

pytestmark = pytest.mark.slow
STAGES = 14
DATA = {"suite", "chat_raw", "chat", "pairs_raw", "pairs"}
"""Those below `best` that neither a model nor an engine has touched: their bytes are the same on every machine."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the project, with nothing in it but what the remote gave back."""
    folder = tmp_path_factory.mktemp("made-before")
    with tarfile.open(Path(__file__).parent / "made_at_41edb6e.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has no filters
        archive.extractall(folder)
    root = folder / "project"
    for command in ("init -q", "add -A", "-c user.name=t -c user.email=t@t commit -qm made"):
        subprocess.run(["git", *command.split()], cwd=root, check=True)
    call(root, "dvc", "pull", "-q", "artifacts/small/dvc.yaml")
    return root


def verdicts(project: Path) -> dict[str, str]:
    """Of the newest reproduction, by stage."""
    newest = max((project / ".pedigree/reproductions").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return {stage["address"].partition("/")[2]: stage["verdict"] for stage in json.loads(newest.read_text())["stages"]}


def test_only_what_another_version_decided_is_due_and_every_hash_and_record_holds(project):
    shown = in_project(project)("plan", "small")
    due = {line.split()[0]: line for line in shown.splitlines() if line.split()[2:4] == ["will", "run"] or line.split()[2:3] == ["depends"]}
    again = {"chat", "prompts", "pairs", "base", "sft", "answers", "judged", "dpo", "scores", "best"}
    assert due.keys() == again and f"{len(again)} of {STAGES} stages to run" in shown
    assert all(f"version 3 -> {KINDS[kind].version}" in due[name] for name, kind in (("sft", "sft"), ("dpo", "preference_train")))
    assert all(f"version 6 -> {KINDS['decontaminate'].version}" in due[name] for name in ("chat", "prompts", "pairs"))
    assert status(SimpleNamespace(root=project)) == CLEAN  # pyright: ignore[reportArgumentType]
    assert f"all as recorded: {STAGES} artifacts" in in_project(project)("verify")


def test_a_pull_brings_what_this_version_would_make(project):
    """`dvc pull` brings the rest, as the fixture does."""
    shown = in_project(project)("pull", "small")
    assert "chat               neither the cache nor the remote has it as recipe, inputs and stage version now describe it" in shown
    assert f"4 of {STAGES} stages are available locally" in shown


def test_todays_code_makes_the_same_rows(project, tmp_path):
    subprocess.run(["cp", "-a", project, tmp_path / "again"], check=True)
    run = open_run(Project(tmp_path / "again"), Request("small"))
    run.launcher = InProcessLauncher(run.project)
    made = {f"small/{name}" for name in DATA}
    assert {(end.address, getattr(end, "outcome", end)) for end in run_graph(run, made, forced=made)} == {(name, "ran") for name in made}
    assert contents(run.project.root, "small") == contents(project, "small")


def test_the_recorded_code_still_makes_the_same_rows(project):
    call(project, "pedigree", "reproduce", "small/best", "--only", "data")
    assert verdicts(project) == dict.fromkeys(DATA, "identical")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_recorded_code_makes_the_same_models_on_the_same_cpu(project):
    """On another one sums are rounded otherwise, and the rows alone are the same."""
    record = json.loads((project / "artifacts/small/best/run.json").read_text())
    same = record["hardware"]["cpu"] == hardware()["cpu"]
    call(project, "pedigree", "reproduce", "small/best", check=same)
    found = verdicts(project)
    identical = {stage for stage, verdict in found.items() if verdict == "identical"}
    assert DATA | {"base", "sft", "dpo", "scores", "best"} <= found.keys()
    assert identical == found.keys() if same else identical >= DATA
