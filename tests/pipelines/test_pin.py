"""`pedigree pin`, and runs that are refused before they begin: revisions that are still open, repositories that cannot be had."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_child import HubChild
from hub_server import Hub, Repo, hub_server
from projects import CODE, fresh_project

from pedigree.pipelines.cli import main as cli

PARENT = """\
description: The whole recipe.   # as published
stages:
  suite: {kind: prepare_data, record: item, task: a, sources: [{type: arithmetic, operations: [add], digits: [1], count: 3, seed: 1}]}
  raw:
    kind: prepare_data
    record: conversation
    sources:
      - {type: hub, repo: lab/rows, revision: pin me, split: train}
  base: {kind: source_model, source: {type: hub, repo: lab/model, revision: "pin me"}}   # 8B
"""
CHILD = """\
description: The same with more rows.
extends: whole
stages:
  # another set
  more: {kind: prepare_data, record: conversation, sources: [{type: hub, repo: lab/more, revision: pin me, split: train}]}
"""
ROWS = b'{"instruction": "Say one.", "output": "one"}\n'


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_server() as hub:
        hub.commit("datasets/lab/rows", {"train.jsonl": ROWS})
        hub.commit("datasets/lab/rows", {"train.jsonl": ROWS * 2})
        hub.commit("datasets/lab/more", {"train.jsonl": ROWS})
        hub.commit("models/lab/model", {"config.json": b"{}"})
        yield hub


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = fresh_project(tmp_path / "project")
    (root / "configs" / "recipes" / "whole.yaml").write_text(PARENT)
    (root / "configs" / "recipes" / "child.yaml").write_text(CHILD)
    return root


def read(project: Path, name: str) -> str:
    return (project / "configs" / "recipes" / f"{name}.yaml").read_text()


def typed(project: Path, url: str, *words: str, **environment: str) -> tuple[int, str]:
    """(exit code, output) of a command in a process that knows this hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(project.parent / "home"), "PYTHONPATH": os.pathsep.join([str(CODE), *sys.path[1:]])}
    command = [sys.executable, "-m", "pedigree.pipelines.cli", *words]
    done = subprocess.run(command, cwd=project, env=kept | settings | environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_open_revision_gets_the_newest_commit_and_the_rest_stays(project, hub):
    code, said = typed(project, hub.url, "pin", "child")
    rows, more, model = (hub.repos[name].head for name in ("datasets/lab/rows", "datasets/lab/more", "models/lab/model"))
    assert code == 0, said
    assert read(project, "whole") == PARENT.replace("rows, revision: pin me", f"rows, revision: {rows}").replace('"pin me"', model)
    assert read(project, "child") == CHILD.replace("pin me", more)
    for line in (f"configs/recipes/whole.yaml:8: lab/rows: {rows}", f"child.yaml:5: lab/more: {more}", "3 revisions pinned"):
        assert line in said
    code, said = typed(project, "http://127.0.0.1:9", "pin", "child")  # nobody is asked again
    assert (code, said) == (0, "nothing to pin: child specifies a commit for every hub repository\n")


def test_the_commit_of_one_repository_is_never_given_to_another(project, hub):
    """Which a child names without a revision, so that it inherits what is written for its parent's."""
    child = "extends: whole\nstages:\n  raw:\n    sources:\n      - {type: hub, repo: lab/more, revision: pin me, split: train}\n"
    for repo in ("lab/other", "lab/more"):  # which nobody else names, and one that is open elsewhere too
        (project / "configs" / "recipes" / "child.yaml").write_text(f"{child}  base: {{source: {{repo: {repo}}}}}\n")
        (project / "configs" / "recipes" / "whole.yaml").write_text(PARENT.replace("lab/model", "lab/first"))
        code, said = typed(project, hub.url, "pin", "child")
        assert code == 2 and f"child.yaml:6: {repo} has no revision of its own here" in said, said
        assert "write `revision: pin me` next to its `repo`" in said and "pin me" in read(project, "whole")


def test_what_cannot_be_told_stays_open_and_the_rest_is_written(project, hub, monkeypatch):
    monkeypatch.setitem(hub.repos, "models/lab/model", Repo(hub.repos["models/lab/model"].commits, gated=True))
    code, said = typed(project, hub.url, "pin", "whole")
    rows = hub.repos["datasets/lab/rows"].head
    assert code == 1 and read(project, "whole") == PARENT.replace("rows, revision: pin me", f"rows, revision: {rows}")
    assert "lab/model: not pinned: hub model lab/model is gated: request access at" in said
    assert "1 revision pinned, 1 not pinned" in said


@pytest.mark.parametrize(
    ("environment", "says"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE disables the hub: unset it"), ({}, "http://127.0.0.1:9 cannot be reached")],
)
def test_without_a_hub_it_says_why_and_writes_nothing(project, environment, says):
    code, said = typed(project, "http://127.0.0.1:9", "pin", "whole", **environment)
    assert code == 1 and says in said and "0 revisions pinned, 2 not pinned" in said and read(project, "whole") == PARENT


def test_a_mirror_is_asked_instead_of_the_hub(project, tmp_path):
    for place, commit in (("datasets/lab/rows", "c" * 40), ("models/lab/model", "d" * 40)):
        (tmp_path / "mirror" / place).mkdir(parents=True)
        (tmp_path / "mirror" / place / "REVISION").write_text(commit)
    code, said = typed(project, "http://127.0.0.1:9", "pin", "whole", PEDIGREE_HUB=str(tmp_path / "mirror"))
    assert code == 0, said
    assert read(project, "whole") == PARENT.replace("rows, revision: pin me", f"rows, revision: {'c' * 40}").replace('"pin me"', "d" * 40)


def test_a_linked_recipe_stays_a_link_and_keeps_its_mode(project, hub, tmp_path):
    place = project / "configs" / "recipes" / "whole.yaml"
    (elsewhere := tmp_path / "shared.yaml").write_text(PARENT)
    elsewhere.chmod(0o640)
    place.unlink()
    place.symlink_to(elsewhere)
    assert typed(project, hub.url, "pin", "whole")[0] == 0
    assert place.is_symlink() and "pin me" not in elsewhere.read_text() and elsewhere.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in place.parent.iterdir() if path.name.startswith(".")] == []


@pytest.fixture
def type_(monkeypatch, capsys):
    """Types a command in a project, in this process; returns (exit code, output)."""

    def typed(root: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(root)
        monkeypatch.setattr(sys, "argv", ["pedigree", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return typed


def test_a_recipe_with_open_revisions_is_checked_and_planned_and_not_run(project, type_):
    assert type_(project, "validate", "child")[0] == 0
    code, said = type_(project, "plan", "child")
    assert code == 0 and "Not pinned yet: lab/rows, lab/model, lab/more." in said and "Run `pedigree pin child` to write" in said
    code, said = type_(project, "run", "child")
    assert code == 2
    for line in ("raw: hub data set lab/rows has no revision yet (`pin me`); `pedigree pin child` writes", "base: hub model lab/model"):
        assert line in said
    assert not list(project.rglob("scratch/*")) and not list((project / "artifacts").rglob("record.json"))


def test_plain_dvc_and_a_selection_that_needs_it_are_refused_too(project, type_):
    type_(project, "compile", "whole")
    code, said = type_(project, "stage", "whole/raw")
    assert code == 2 and "whole: raw: hub data set lab/rows has no revision yet" in said
    code, said = type_(project, "run", "whole", "--only", "raw")
    assert code == 2 and "lab/rows" in said and "lab/model" not in said


def test_what_cannot_be_had_is_told_before_anything_runs(project, hub, monkeypatch):
    """All of it at once, with the stages that need it."""
    assert typed(project, hub.url, "pin", "child")[0] == 0
    monkeypatch.setitem(hub.repos, "datasets/lab/rows", Repo(moved_to="lab/newer"))
    monkeypatch.setitem(hub.repos, "datasets/lab/newer", Repo(hub.repos["datasets/lab/more"].commits | {"e" * 40: {}}))
    monkeypatch.setitem(hub.repos, "datasets/lab/more", Repo(hub.repos["datasets/lab/more"].commits, gated=True))
    monkeypatch.delitem(hub.repos, "models/lab/model")
    code, said = typed(project, hub.url, "run", "child")
    assert code == 2, said
    for line in (
        "child: raw: hub data set lab/rows has no commit",  # which the repository of its new name lacks
        "child: more: hub data set lab/more is gated",
        "child: base: hub model lab/model does not exist",
    ):
        assert line in said
    assert not list((project / "artifacts").rglob("record.json"))


@pytest.mark.slow
def test_rows_of_the_hub_go_through_a_run(project, hub, tmp_path):
    """Up to the record, from a hub, a mirror, and a mirror that proves nothing, which the record says."""
    assert typed(project, hub.url, "pin", "whole")[0] == 0
    code, said = typed(project, hub.url, "run", "whole", "--only", "raw")
    assert code == 0, said
    record = project / "artifacts" / "whole" / "raw" / "record.json"
    proved = record.read_text()
    child = HubChild(hub.url, tmp_path / "other")
    mirror = tmp_path / "mirror"
    child.ask("download", "lab/rows", hub.repos["datasets/lab/rows"].head, str(mirror / "datasets/lab/rows"), "dataset")
    child.close()

    def again() -> str:
        code, said = typed(project, "http://127.0.0.1:9", "run", "whole", "--only", "raw", "--force", "raw", PEDIGREE_HUB=str(mirror))
        assert code == 0, said
        return record.read_text()

    assert again() == proved  # where it lay is no identity
    shutil.rmtree(mirror / "datasets/lab/rows/.cache")
    assert "was read from a mirror that does not say" not in proved and "was read from a mirror that does not say" in again()
