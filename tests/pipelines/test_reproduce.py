"""Making an artifact again from its records: in fresh clones, with real git, DVC and jobs."""

import getpass
import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from commands import InProcessCommand
from reproduction_lab import Clone
from waiting import deadline, until

from pedigree.configs.base.project import Project
from pedigree.configs.language.kinds import KINDS
from pedigree.pipelines.ledger.by_id import bring
from pedigree.pipelines.ledger.ledger import Ledger

ALL = ["clean", "cleaner", "raw", "suite"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose recipe has run, is committed and pushed."""
    clone = Clone.first(tmp_path_factory.mktemp("reproduce"))
    clone.write("diary of the author.txt", "dear diary\n")
    clone.pedigree("run", "lab")
    clone.commit()
    here(clone, "push", "lab")
    here(clone, "export", "lab/cleaner", str(clone.folder / "exported"))
    assert clone.ran() == ALL
    return clone


def here(clone: Clone, *arguments: str, code: int = 0) -> str:
    """A command that runs none of the clone's own code, in this process."""
    return InProcessCommand(cast("Any", clone))(*arguments, code=code)


def fresh(first: Clone, tmp_path: Path, remote: bool = True) -> Clone:
    """A clone of the repository in a folder of its own, with or without the DVC remote."""
    clone = first.another(f"clone-{tmp_path.name}")
    if not remote:
        clone.edit(".dvc/config", "remote = store", "")
    return clone


def contents(clone: Clone) -> dict[str, str]:
    found = sorted(clone.root.glob("artifacts/lab/*/record.json"))
    return {path.parent.name: json.loads(path.read_text())["content"] for path in found}


def test_a_clone_makes_everything_again_from_an_exported_folder_alone_and_says_so_in_a_record(first, tmp_path):
    clone = fresh(first, tmp_path, remote=False)
    shutil.copytree(first.folder / "exported", tmp_path / "moved")
    said = clone.pedigree("reproduce", str(tmp_path / "moved"))
    assert clone.ran() == ALL and "\nreproduced" in said
    assert clone.verdicts() == dict.fromkeys(ALL, "identical")
    report = clone.report()
    assert {stage["address"]: stage["reproduced"] for stage in report["stages"]} == {
        f"lab/{name}": content for name, content in contents(first).items()
    }
    assert report["passed"] and report["recorded"]["hardware"]["cpu"] == report["here"]["hardware"]["cpu"]
    assert not list((clone.root / ".pedigree/reproduce").glob("*/code/*")), "the work trees are left behind"
    assert clone.shell("git worktree list").stdout.count("\n") == 1
    assert not list(clone.root.glob("artifacts/lab/*/payload")), "the clone's own artifacts are not its business"
    text = json.dumps(report)
    assert str(clone.folder) not in text and socket.gethostname() not in text and f"/{getpass.getuser()}/" not in text


def test_a_record_that_was_changed_is_refused_by_name(first, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(first.folder / "exported", moved)
    lineage = json.loads((moved / "pedigree/lineage.json").read_text())
    (raw,) = [entry for entry in lineage["artifacts"].values() if entry["run"]["address"] == "lab/raw"]
    raw["record"]["config"]["sources"][0]["count"] = 6
    (moved / "pedigree/lineage.json").write_text(json.dumps(lineage))
    said = here(first, "reproduce", str(moved), code=2)
    assert "the record of lab/raw: its key is not the hash of its kind, version, config, inputs, and source files" in said
    assert first.ran() == []


@pytest.mark.nightly
def test_content_that_comes_out_otherwise_is_different_and_what_is_below_drifts(first, tmp_path):
    clone = fresh(first, tmp_path)
    said = clone.pedigree("reproduce", "lab/clean", code=1, LAB_NOISE="x")
    assert clone.verdicts() == {"raw": "different", "suite": "different", "clean": "drifted"}
    assert "rows.jsonl differs" in said and "inputs differ: data raw, benchmarks suite" in said and "not reproduced" in said
    clone.ran()
    clone.pedigree("reproduce", "lab/clean")  # afresh: nothing of the noisy one is taken
    assert clone.ran() == ["clean", "raw", "suite"]


def test_a_changed_tree_is_checked_out_with_its_patch_and_its_new_files(first, tmp_path):
    dirty = fresh(first, tmp_path)
    dirty.write("stages/core/extra.py", '"""New."""\n\nMORE = {"id": "é and %s"}\n')
    dirty.edit(
        "stages/decontaminate/run.py",
        "save(job.out",
        "from pedigree.stages.core.extra import MORE\n    rows.append(MORE)\n    save(job.out",
    )
    dirty.edit("configs/recipes/lab.yaml", "count: 5", "count: 4")
    dirty.pedigree("run", "lab", "--record-new-files", "--only", "raw", "--only", "suite", "--only", "clean")
    assert "é and %s" in (dirty.root / "artifacts/lab/clean/payload/rows.jsonl").read_text(), "the new file decides what is made"
    here(dirty, "export", "lab/clean", str(tmp_path / "dirty"))
    dirty.ran()
    lineage = (tmp_path / "dirty/pedigree/lineage.json").read_text()
    assert lineage.count("stages/core/extra.py b/stages/core/extra.py") == 1, "of two ancestors and the artifact itself"
    assert "diff --git" not in (tmp_path / "dirty/pedigree/run.json").read_text()
    clone = first.another(f"clean-{tmp_path.name}")
    said = here(clone, "reproduce", str(tmp_path / "dirty"), code=2)
    assert "this project did not make it" in said and "stages/decontaminate/run.py +2 -0" in said and "use --trust to run it" in said
    assert clone.ran() == [] and not list((clone.root / ".pedigree").glob("reproduce/*/*")), "it was only looked at"
    assert "patch of 3 files" in said and "rows.append(MORE)" not in said
    shown = here(clone, "reproduce", str(tmp_path / "dirty"), "--dry-run", "--show-patch")
    assert "| +    rows.append(MORE)" in shown and clone.ran() == []
    clone.pedigree("reproduce", str(tmp_path / "dirty"), "--trust")
    assert clone.verdicts()["clean"] == "identical"
    assert any(code["patch_sha256"] for code in clone.report()["code"])
    clone.ran()
    assert "the session is not interactive" in here(clone, "reproduce", str(tmp_path / "dirty"), "--here", code=2) and clone.ran() == []


@pytest.mark.nightly
def test_a_patch_that_was_not_kept_is_told_before_anything_runs(first, tmp_path):
    clone = fresh(first, tmp_path)
    clone.write("stages/core/extra.py", 'TOKEN = "ghp_' + "a1B2" * 9 + '"\n')
    clone.edit("configs/recipes/lab.yaml", "count: 5", "count: 4")
    clone.pedigree("run", "lab", "--only", "raw", "--record-new-files")
    clone.ran()
    run = (clone.root / "artifacts/lab/raw/run.json").read_text()
    assert "a1B2" not in run and "GitHub token" in run
    said = clone.pedigree("reproduce", "lab/raw", code=2)
    assert "whose patch was not stored" in said and "--here" in said and clone.ran() == []
    assert "GitHub token" in clone.pedigree("reproduce", "lab/raw", "--dry-run")


def test_new_files_are_no_part_of_a_record_unless_asked_for(first):
    folder = first.root / "artifacts/lab/raw"
    assert "diary" not in (folder / "lineage.json").read_text() + (folder / "run.json").read_text()
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    assert attempt["code"]["new_files"] == 1
    assert "without 1 unrecorded new file" in here(first, "reproduce", "lab/raw", "--dry-run")


@pytest.mark.nightly
def test_a_commit_that_no_branch_reaches_comes_out_of_the_remote(first, tmp_path):
    lost = fresh(first, tmp_path)
    lost.edit("stages/decontaminate/run.py", "save(job.out", 'rows.append({"id": "lost"})\n    save(job.out')
    commit = lost.commit()
    lost.edit("configs/recipes/lab.yaml", "count: 5", "count: 7")
    lost.commit()
    lost.pedigree("run", "lab")
    lost.pedigree("export", "lab/clean", str(tmp_path / "model"))
    lost.ran()
    clone = first.another(f"other-{tmp_path.name}")
    said = clone.pedigree("reproduce", str(tmp_path / "model"), "--trust", code=2)
    assert "pedigree push" in said and clone.ran() == []
    assert "sent" in lost.pedigree("push", "lab")
    assert "there already" in lost.pedigree("push", "lab")
    clone.pedigree("reproduce", str(tmp_path / "model"), "--trust")
    assert clone.verdicts() == {"raw": "identical", "suite": "identical", "clean": "identical"}
    assert clone.shell(f"git cat-file -t {commit}").stdout == "commit\n", "history came with it"


@pytest.mark.nightly
def test_each_stage_runs_under_the_code_that_made_it(first, tmp_path):
    made = fresh(first, tmp_path)
    nine = "raw.sources=[{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 2}]"
    made.pedigree("run", "lab", "--only", "raw", "--only", "suite", "--set", nine)
    made.edit("stages/prepare_data/run.py", "rows = [", 'rows = ["other", *[')
    made.edit("stages/prepare_data/run.py", "count)]", "count)]]")
    made.edit("stages/decontaminate/run.py", "save(job.out", 'rows.append({"id": "later"})\n    save(job.out')
    made.pedigree("run", "lab", "--set", nine)
    (folder,) = made.root.glob("artifacts/lab+*")
    made.pedigree("export", str(folder / "clean"), str(tmp_path / "model"))
    made.ran()
    clone = first.another(f"two-{tmp_path.name}")
    clone.pedigree("reproduce", str(tmp_path / "model"), "--trust")
    assert len(clone.report()["code"]) > 1 and set(clone.verdicts().values()) == {"identical"}
    clone.pedigree("reproduce", str(tmp_path / "model"), "--here", "--trust", code=1)
    assert clone.verdicts()["raw"] == "identical" and clone.verdicts()["clean"] == "different"


def test_a_dry_run_says_what_would_be_done_and_does_nothing(first, tmp_path):
    clone = fresh(first, tmp_path)
    said = here(clone, "reproduce", "lab/cleaner", "--dry-run", "--stage", "clean")
    assert [line.split()[:2] for line in said.splitlines() if line.startswith("lab/")] == [
        ["lab/raw", "restore"], ["lab/suite", "restore"], ["lab/clean", "run"], ["lab/cleaner", "leave"],
    ]  # fmt: skip
    assert clone.ran() == [] and not (clone.root / ".pedigree/reproductions").exists()
    assert clone.shell("git worktree list").stdout.count("\n") == 1


def test_another_environment_is_listed_and_refused_when_strict(first, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(first.folder / "exported", moved)
    run = json.loads((moved / "pedigree/run.json").read_text())
    run["environment"]["libraries"] |= {"torch": "1.0", "dvc": run["environment"]["libraries"]["dvc"]}
    run["environment"]["locks"]["cpu.txt"] = "0" * 64
    (moved / "pedigree/run.json").write_text(json.dumps(run))
    clone = fresh(first, tmp_path)
    said = here(clone, "reproduce", str(moved), "--strict", code=2)
    assert "torch 1.0 -> " in said and "lock cpu.txt 000000000000 -> " in said and "dvc" not in said
    assert clone.ran() == []
    assert "lab/raw" in here(clone, "reproduce", str(first.folder / "exported"), "--strict", "--stage", "raw", "--dry-run")


@pytest.mark.nightly
def test_the_curves_of_an_exported_model_come_out_of_the_remote(first, tmp_path):
    clone = fresh(first, tmp_path)
    said = clone.pedigree("reproduce", str(first.folder / "exported"), "--stage", "cleaner", code=1, LAB_NOISE="x")
    assert "curves diverge at step 1: rows 5 -> 6" in said


@pytest.mark.nightly
def test_one_stage_runs_alone_from_its_recorded_inputs(first, tmp_path):
    clone = fresh(first, tmp_path)
    clone.pedigree("reproduce", "lab/cleaner", "--stage", "clean")
    assert clone.ran() == ["clean"]
    assert clone.verdicts() == {"raw": "restored", "suite": "restored", "clean": "identical"}
    bare = first.another(f"bare-{tmp_path.name}")
    bare.edit(".dvc/config", "remote = store", "")
    said = here(bare, "reproduce", str(first.folder / "exported"), "--stage", "clean", code=2)
    assert "lab/raw" in said and "it is not in this project, its cache, or its remote" in said


@pytest.mark.nightly
def test_ancestors_that_are_nowhere_run_though_the_cache_was_asked(first, tmp_path):
    """Those of a remote are restored (`test_remote.py`)."""
    clone = fresh(first, tmp_path, remote=False)
    clone.pedigree("reproduce", str(first.folder / "exported"), "--from-cache")
    assert clone.ran() == ALL and set(clone.verdicts().values()) == {"identical"}


@pytest.mark.nightly
def test_a_damaged_copy_is_not_taken(first, tmp_path):
    clone = fresh(first, tmp_path, remote=False)
    shutil.copytree(first.root / "artifacts/lab", clone.root / "artifacts/lab", dirs_exist_ok=True)
    rows = clone.root / "artifacts/lab/raw/payload/rows.jsonl"
    rows.write_text(rows.read_text().replace("0", "7", 1))
    clone.pedigree("reproduce", "lab/cleaner", "--from-cache")
    assert clone.ran() == ["cleaner", "raw"]
    assert clone.verdicts()["raw"] == "identical" and clone.verdicts()["clean"] == "restored"


def test_an_interrupted_reproduction_goes_on(first, tmp_path):
    clone = fresh(first, tmp_path)
    command = [sys.executable, "-P", "-m", "pedigree.pipelines.cli", "reproduce", "lab/cleaner"]
    held = clone.environment | {"LAB_HOLDS": "clean"}  # it is to be at work when the signal comes
    running = subprocess.Popen(command, cwd=clone.root, env=held, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: clone.runs_log.exists() and "clean" in clone.runs_log.read_text(), alive=lambda: running.poll() is None)
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=deadline(60))
    assert running.returncode == 130 and "Run the same command again" in said
    assert clone.ran() == ["clean", "raw", "suite"] and not (clone.root / ".pedigree/reproductions").exists()
    clone.pedigree("reproduce", "lab/cleaner")
    assert clone.ran() == ["clean", "cleaner"] and clone.verdicts() == dict.fromkeys(ALL, "identical")


def test_code_that_makes_another_stage_is_named_before_anything_runs(first, tmp_path):
    clone = fresh(first, tmp_path)
    version = KINDS["decontaminate"].version
    text = (clone.root / "stages/decontaminate/kind.py").read_text()
    clone.write("stages/decontaminate/kind.py", text.replace(f"version={version},", f"version={version + 1},"))
    said = clone.pedigree("reproduce", "lab/cleaner", "--here", code=1)
    assert f"the code compiles it to a different stage: version: {version} -> {version + 1}" in said
    assert clone.verdicts() == {"raw": "not run", "suite": "not run", "clean": "different", "cleaner": "different"}
    assert clone.ran() == []


@pytest.mark.nightly
def test_a_failed_stage_leaves_what_is_below_it_unmade(first, tmp_path):
    clone = fresh(first, tmp_path)
    clone.edit("stages/decontaminate/run.py", "rows = load", "raise RuntimeError('broken')\n    rows = load")
    clone.pedigree("reproduce", "lab/cleaner", "--here", code=1)
    assert clone.verdicts() == {"raw": "identical", "suite": "identical", "clean": "failed", "cleaner": "not run"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lab/nothing",), "lab/nothing"),
        (("lab/cleaner", "--only", "models"), "the only valid value is `data`"),
        (("lab/cleaner", "--stage", "dirt"), "its stages are lab/raw, lab/suite, lab/clean, lab/cleaner"),
        (("lab/cleaner", "--stage", "clean", "--from-cache"), "omit --only and --from-cache"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(first, arguments, said):
    assert said in here(first, "reproduce", *arguments, code=1 if arguments == ("lab/nothing",) else 2)
    assert first.ran() == []


def test_every_file_out_of_the_remote_is_hashed_also_those_outside_the_record(first, tmp_path):
    shutil.copytree(first.folder / "store", tmp_path / "store")
    clone = fresh(first, tmp_path)
    clone.edit(".dvc/config", str(first.folder / "store"), str(tmp_path / "store"))
    ledger = Ledger(Project(clone.root))
    wanted = tmp_path / "wanted"
    assert bring(ledger, "lab/raw", wanted, parts=["run.json"]) and [path.name for path in wanted.iterdir()] == ["run.json"]
    for curve in [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.read_bytes().startswith(b"step,")]:
        curve.chmod(0o644)
        curve.write_bytes(curve.read_bytes().replace(b"1", b"2", 1))
    assert not bring(ledger, "lab/raw", tmp_path / "raw") and not list(tmp_path.glob("*raw*"))
    assert not bring(ledger, "lab/nothing", tmp_path / "raw")
