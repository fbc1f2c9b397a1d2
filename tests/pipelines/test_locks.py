"""`dvc.lock` of concurrent branches: merged stage by stage, or resolved by hand, and nothing that was made is run again."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import InProcessCommand
from running_lab import REPOSITORY, Lab

from pedigree.pipelines.ledger.lock_merge import COMMAND, DRIVER, merge_locks

LOCK = "artifacts/lab/dvc.lock"
IDENTITY = "git -c user.name=l -c user.email=l@example.org"


def lock(**stages: tuple[str, str, str]) -> str:
    """A `dvc.lock`: stage=(parameter, hash of its payload, hash of its run.json)."""
    text = "schema: '2.0'\nstages:\n"
    for name, (parameter, payload, run) in stages.items():
        text += (
            f"  {name}:\n    cmd: pedigree stage lab/{name}\n    params:\n      params.yaml:\n        {name}:\n          p: {parameter}\n"
        )
        text += "    outs:\n"
        for part, md5 in (("payload", payload), ("record.json", f"r{payload}"), ("run.json", run)):
            text += f"    - path: {name}/{part}\n      hash: md5\n      md5: {md5}\n"
    return text


OLD, MINE, YOURS = ("1", "aa", "t1"), ("2", "bb", "t2"), ("3", "cc", "t3")


def test_stages_that_one_branch_each_changed_or_added_are_all_kept() -> None:
    base = lock(a=OLD, b=OLD, c=OLD)
    merged = merge_locks(base, lock(a=MINE, b=OLD, c=OLD, x=MINE), lock(a=OLD, b=YOURS, c=OLD, y=YOURS))
    assert merged.text == lock(a=MINE, b=YOURS, c=OLD, x=MINE, y=YOURS) and not merged.conflicts and not merged.dropped
    assert merge_locks("", lock(x=MINE), lock(y=YOURS)).text == lock(x=MINE, y=YOURS)


@pytest.mark.parametrize(
    ("before", "mine", "yours", "kept"),
    [
        (OLD, MINE, MINE, MINE),
        (OLD, ("2", "bb", "t2"), ("2", "bb", "t9"), ("2", "bb", "t2")),  # made on two machines: equal results, other times
        (OLD, ("1", "xx", "t4"), YOURS, YOURS),  # forced again on one branch, changed on the other: the change is what is asked for
        (OLD, MINE, ("1", "xx", "t4"), MINE),
        (("1e-08", "aa", "t1"), ("1.0e-08", "xx", "t4"), YOURS, YOURS),  # one number in YAML 1.2; in 1.1 the first is a text
    ],
)
def test_what_both_changed_is_taken_where_only_one_can_be_right(before, mine, yours, kept) -> None:
    assert merge_locks(lock(a=before), lock(a=mine), lock(a=yours)).text == lock(a=kept)


def test_a_stage_whose_inputs_both_changed_is_left_to_the_next_run() -> None:
    merged = merge_locks(lock(a=OLD, b=OLD), lock(a=MINE, b=OLD), lock(a=YOURS, b=OLD))
    assert merged.text == lock(b=OLD) and merged.dropped == ("a",) and not merged.conflicts


def test_two_results_of_equal_inputs_are_a_conflict_that_nobody_decides_in_silence() -> None:
    mine, yours = ("2", "bb", "t2"), ("2", "zz", "t2")
    merged = merge_locks(lock(a=OLD, b=OLD), lock(a=mine, b=OLD), lock(a=yours, b=OLD))
    assert merged.conflicts == ("a",)
    entries = [lock(a=one).split("stages:\n")[1] for one in (mine, yours)]
    assert f"<<<<<<< ours\n{entries[0]}=======\n{entries[1]}>>>>>>> theirs\n" in merged.text
    assert merged.text.endswith(lock(b=OLD).split("stages:\n")[1])


def test_an_entry_that_one_branch_deleted_goes_unless_the_other_changed_it() -> None:
    assert merge_locks(lock(a=OLD, b=OLD), lock(b=OLD), lock(a=OLD, b=OLD)).text == lock(b=OLD)
    assert merge_locks(lock(a=OLD, b=OLD), lock(b=OLD), lock(a=YOURS, b=OLD)).text == lock(b=OLD, a=YOURS)


STRANGE = {
    "marks": "<<<<<<< ours\n",
    "in one line": "schema: '2.0'\nstages:\n  a: {cmd: x}\n",
    "a list": "stages: [1]\n",
    "more below": lock(a=OLD) + "datasets: []\n",
    "a time after the last": lock(a=("9999-12-31 23:59:59.9999999", "aa", "t1")),
    "a stage twice": lock(a=OLD) + lock(a=MINE).split("stages:\n")[1],
    "aliases": "schema: '2.0'\nstages:\n  a:\n    cmd: &x y\n  b:\n    cmd: *x\n",
}


@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_what_is_not_laid_out_as_dvc_writes_it_is_not_guessed_at(text: str) -> None:
    with pytest.raises(ValueError):
        merge_locks(lock(a=OLD), lock(a=OLD), text)


def test_git_uses_the_driver_or_merges_lines_where_there_is_no_environment(tmp_path: Path) -> None:
    def git(*arguments: str, check: bool = True) -> str:
        environment = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(tmp_path)}
        identity = ["-c", "user.name=l", "-c", "user.email=l@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    git("init", "-q", "-b", "main")
    environment_of_setup = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "pedigree.pipelines.ledger.lock_merge"]
    tell = subprocess.run(command, cwd=tmp_path, env=environment_of_setup, check=False)
    assert tell.returncode == 0 and git("config", f"merge.{DRIVER}.driver").strip() == COMMAND
    (tmp_path / ".gitattributes").write_text((REPOSITORY / ".gitattributes").read_text())
    for branch, text in (("main", lock(a=OLD)), ("mine", lock(a=OLD, x=MINE)), ("yours", lock(a=OLD, y=YOURS))):
        git("checkout", "-q", "-B", branch, *(["main"] if branch != "main" else []))
        (tmp_path / "dvc.lock").write_text(text)
        git("add", "-A")
        git("commit", "-qm", branch)
    assert "CONFLICT" in git("merge", "mine", check=False) and "<<<<<<<" in (tmp_path / "dvc.lock").read_text()
    git("merge", "--abort")
    shim = tmp_path / ".venv/bin/pedigree"
    shim.parent.mkdir(parents=True)
    shim.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m pedigree.pipelines.cli "$@"\n')
    shim.chmod(0o755)
    git("merge", "-q", "mine", "-m", "merged")
    assert (tmp_path / "dvc.lock").read_text() == lock(a=OLD, y=YOURS, x=MINE)


# --- with real runs ----------------------------------------------------------------------------------------------------


def branch(lab: Lab, name: str, old: str, new: str) -> None:
    """A branch from `main` on which the recipe is changed, run and committed."""
    lab.shell(f"git checkout -q -b {name} main")
    lab.edit("configs/recipes/lab.yaml", old, new)
    InProcessCommand(lab)("run", "lab")
    lab.shell(f"git add -A && {IDENTITY} commit -qm {name}")
    lab.forget_runs()


def more(name: str) -> str:
    return f"    ngram: 5\n  {name}: {{kind: decontaminate, in: {{data: clean, benchmarks: [suite]}}, ngram: {5 + len(name)}}}\n"


@pytest.fixture
def made(finished: Lab) -> Lab:
    """A lab with its recipe run and committed on `main`."""
    finished.shell(f"echo runs.log >> .git/info/exclude && git branch -M main && git add -A && {IDENTITY} commit -qm made")
    return finished


def test_two_branches_that_add_stages_merge_and_either_side_of_the_lock_will_do(made: Lab) -> None:
    pedigree = InProcessCommand(made)
    branch(made, "one", "    ngram: 5\n", more("x"))
    branch(made, "two", "    ngram: 5\n", more("yy"))
    assert made.shell("git status --porcelain").stdout == ""
    made.shell(f"{IDENTITY} merge one; true")
    conflicts = set(made.shell("git diff --name-only --diff-filter=U").stdout.split())
    assert conflicts == {"configs/recipes/lab.yaml", LOCK, "artifacts/lab/dvc.yaml", "artifacts/lab/params.yaml"}
    both = made.shell("git show main:configs/recipes/lab.yaml").stdout.replace("    ngram: 5\n", more("x") + more("yy").partition("\n")[2])
    made.write("configs/recipes/lab.yaml", both)

    said = pedigree("run", "lab", code=2)
    number = (made.root / LOCK).read_text().splitlines().index("<<<<<<< HEAD") + 1
    assert said.startswith(f"{LOCK}:{number}: ") and f"git checkout --ours -- {LOCK}" in said and said.count("\n") == 1
    assert "<<<<<<<" not in (made.root / "artifacts/lab/dvc.yaml").read_text() + (made.root / "artifacts/lab/params.yaml").read_text()

    for side in ("ours", "theirs"):
        made.shell(f"git checkout -q --{side} -- {LOCK}")
        made.shell("rm -rf artifacts/lab/x artifacts/lab/yy")
        pedigree("run", "lab")
        assert made.runs() == []
        assert {"x", "yy"} <= yaml.safe_load((made.root / LOCK).read_text())["stages"].keys()
    made.shell(f"git add -A && {IDENTITY} commit -qm merged")
    assert "up to date, nothing to do" in pedigree("run", "lab") and made.runs() == []


def test_where_both_branches_changed_one_stage_the_recipe_decides_and_nothing_is_run_again(made: Lab) -> None:
    branch(made, "one", "ngram: 5", "ngram: 6")
    branch(made, "two", "ngram: 5", "ngram: 7")
    made.shell(f"{IDENTITY} merge one; git checkout -q --theirs -- configs/recipes/lab.yaml; git checkout -q --ours -- {LOCK}")
    InProcessCommand(made)("run", "lab")
    entry = yaml.safe_load((made.root / LOCK).read_text())["stages"]["cleaner"]
    assert made.runs() == [] and entry["params"]["params.yaml"]["cleaner"]["config"]["ngram"] == 6


def test_the_driver_merges_real_locks(made: Lab) -> None:
    branch(made, "one", "    ngram: 5\n", more("x"))
    branch(made, "two", "    ngram: 5\n", more("yy"))
    made.write(".gitattributes", (REPOSITORY / ".gitattributes").read_text())
    made.shell(f"git config merge.{DRIVER}.driver '{sys.executable} -m pedigree.pipelines.cli merge-lock %O %A %B'")
    made.shell(f"{IDENTITY} merge one; true")
    assert LOCK not in made.shell("git diff --name-only --diff-filter=U").stdout
    merged = yaml.safe_load((made.root / LOCK).read_text())["stages"]
    sides = [yaml.safe_load(made.shell(f"git show {side}:{LOCK}").stdout)["stages"] for side in ("one", "two")]
    assert merged == sides[0] | sides[1] and {"x", "yy"} <= merged.keys()


def test_a_recipe_that_conflicts_is_named_with_its_line(made: Lab) -> None:
    made.edit("configs/recipes/lab.yaml", "    ngram: 5\n", "<<<<<<< HEAD\n    ngram: 5\n=======\n    ngram: 6\n>>>>>>> one\n")
    assert "lab.yaml:" in InProcessCommand(made)("plan", "lab", code=2)
