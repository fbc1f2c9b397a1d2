"""Git is asked in the project's folder, whatever repository a hook that calls us stands in."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from handmade import project_at

from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project
from pedigree.pipelines.ledger.git import run_git
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_files import recorded_at
from pedigree.pipelines.lineage.named_models import named_models, versions
from pedigree.pipelines.maintain.gc import collect
from pedigree.pipelines.publish.commits import check_commit
from pedigree.pipelines.reproduce.trust import is_own

MD5 = "a" * 31
LOCK = "schema: '2.0'\nstages:\n  raw:\n    cmd: pedigree stage lab/raw\n    outs:\n" + "".join(
    f"    - path: raw/{part}\n      hash: md5\n      md5: {MD5}{number}\n"
    for number, part in enumerate(("record.json", "run.json", "lineage.json"))
)
COMPILED = "artifacts:\n  best:\n    path: raw/payload\n    type: model\n"


def type_git(folder: Path, *words: str) -> str:
    known = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "user.name=lab", "-c", "user.email=lab@example.org", *words]
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose one commit knows a `dvc.lock` and a named model, asked from a hook of another repository that is in a merge."""
    project = project_at(tmp_path / "project")
    folder = project.recipe_folder("lab")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dvc.lock").write_text(LOCK)
    (folder / "dvc.yaml").write_text(COMPILED)
    type_git(project.root, "init", "-q", "-b", "main")
    type_git(project.root, "config", "user.name", "lab")
    type_git(project.root, "config", "user.email", "lab@example.org")
    type_git(project.root, "add", "-f", "artifacts/lab/dvc.lock", "artifacts/lab/dvc.yaml")
    type_git(project.root, "commit", "-qm", "made")
    type_git(project.root, "tag", "artifacts/lab=best@v1.0.0")
    (folder / "dvc.lock").unlink()
    other = tmp_path / "other"
    other.mkdir()
    type_git(other, "init", "-q", "-b", "main")
    type_git(other, "commit", "-q", "--allow-empty", "-m", "other")
    (other / ".git" / "MERGE_HEAD").write_text(type_git(other, "rev-parse", "HEAD") + "\n")
    for name, value in (("DIR", other / ".git"), ("WORK_TREE", other), ("INDEX_FILE", other / ".git/index"), ("PREFIX", "")):
        monkeypatch.setenv(f"GIT_{name}", str(value))
    return project


def test_a_hook_of_another_repository_does_not_lead_git_there(project: Project) -> None:
    ledger = Ledger(project)
    assert [entry.part for entry in recorded_at(project, "HEAD")] == ["lineage.json", "record.json", "run.json"]
    assert is_own(ledger, {"record.json": f"{MD5}0", "run.json": f"{MD5}1", "lineage.json": f"{MD5}2"})
    (model,) = named_models(project, "HEAD")
    assert versions(project, model) == ["v1.0.0"]
    with pytest.raises(UsageProblem, match=r"the lineage of lab/raw .artifacts/lab/dvc.lock at "):
        collect(project)
    check_commit(project)


def test_who_commits_may_stand_in_the_environment(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("name", "email"):
        type_git(project.root, "config", "--unset", f"user.{name}")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "lab")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "lab@example.org")
    check_commit(project)


def test_without_git_there_is_no_repository_and_no_bug(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("git") is None
    assert versions(project, named_models(project)[0]) == []
    with pytest.raises(UsageProblem, match=r"git cannot list its branches .git cannot be run: install it.*--workspace"):
        collect(project)
    assert collect(project, workspace=True).artifacts == 0


def test_a_git_that_does_not_end_is_named(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 3600\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PedigreeError, match="`git status` did not finish within 1 s"):
        run_git(project.root, "status", timeout_s=1)
