"""A project that is moved, copied, or mounted at another path while work is unfinished: the work goes on where its folder is, and a copy
has nothing to do with what goes on in the original."""

import json
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elsewhere import can_be_elsewhere, hasty
from running_lab import CLEAN, Lab, outcomes, read, running_scratch, status
from waiting import InThread, deadline, until

from pedigree.configs.base.problems import UsageProblem
from pedigree.pipelines.cli.running_jobs import cancel
from pedigree.pipelines.jobs.lease import holder_of
from pedigree.pipelines.jobs.live import live_jobs
from pedigree.pipelines.jobs.processes import kill_all, processes_of
from pedigree.pipelines.lineage.verify import verify_project
from pedigree.pipelines.run.runs import run_graph

RUNNER = """
import os, signal, threading, time
from pathlib import Path
from pedigree.configs.base.project import Project
from pedigree.pipelines.run.opening import Request, open_run
from pedigree.pipelines.run.runs import run_graph

def die():
    while not Path("go.waiting").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=die, daemon=True).start()
run_graph(open_run(Project.find(), Request("lab")))
"""


@pytest.fixture
def lab(finished: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Its recipe has run; `clean` is to be made again, and will have the same rows."""
    of_clean = "in: {data: raw, benchmarks: [suite]}"
    finished.edit("configs/recipes/lab.yaml", of_clean, f"{of_clean}\n    ngram: 7")
    finished.forget_runs()
    shutil.rmtree(finished.root / ".pedigree/leases")
    hasty(finished, monkeypatch)
    return finished


def scratch_of_clean(lab: Lab) -> Path:
    (found,) = [spec.parent for spec in lab.root.glob(".pedigree/scratch/*/spec.json") if "lab/clean" in spec.read_text()]
    return found


def move(lab: Lab) -> None:
    lab.root = lab.root.rename(lab.root.with_name("moved"))


def is_sound(lab: Lab) -> bool:
    return status(lab) == CLEAN and not verify_project(lab.project).problems


@contextmanager
def other_mount(lab: Lab, *namespaces: str) -> Iterator[Path]:
    """A runner that sees the project at another path, killed while its job of `clean` works; the job's scratch folder, as seen here."""
    lab.knobs(clean={"hold": "go"})
    other = lab.root.with_name("other")
    other.mkdir()
    python = shlex.join([sys.executable, "-c", RUNNER])
    inside = f"mount --bind {lab.root} {other} && cd {other} && {python}; echo left; read end"
    process = subprocess.Popen(["unshare", "--user", "--map-root-user", "--mount", *namespaces, "sh", "-c", inside], text=True,
                               env=lab.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert process.stdout and process.stdout.readline() == "left\n"
        yield scratch_of_clean(lab)
    finally:
        process.communicate("\n")


OTHER_MACHINE = ("--pid", "--fork", "--mount-proc", "--kill-child")
needs_mounts = pytest.mark.skipif(not can_be_elsewhere(), reason="unprivileged namespaces are not allowed here")


@needs_mounts
@pytest.mark.parametrize(
    "namespaces", [(), pytest.param(OTHER_MACHINE, marks=pytest.mark.nightly)], ids=["this machine", "another machine"]
)
def test_a_job_of_a_runner_that_has_mounted_the_project_elsewhere_is_waited_for_and_its_result_taken(lab: Lab, namespaces: Any) -> None:
    with other_mount(lab, *namespaces):
        attached = threading.Event()

        def watch(address: str, state: str, detail: str = "", **_: Any) -> None:
            if address == "lab/clean" and state == "running" and ("re-attached" in detail or "another machine" in detail):
                attached.set()

        thread = InThread(run_graph, lab.run(watch=watch))
        until(attached.is_set, 30, alive=thread.alive)
        (lab.root / "go").touch()
        ends = thread.join()
    assert [str(getattr(end, "outcome", end)) for end in ends] == ["unchanged", "unchanged", "attached", "unchanged"]
    assert lab.runs().count("clean") == 1 and is_sound(lab)


@needs_mounts
@pytest.mark.parametrize("forced", [(), pytest.param(("clean",), marks=pytest.mark.nightly)], ids=["again", "forced"])
def test_work_of_a_machine_that_is_gone_and_had_mounted_the_project_elsewhere_is_gone_on_with(lab: Lab, forced: Any) -> None:
    with other_mount(lab, *OTHER_MACHINE) as scratch:
        (scratch / "checkpoints/step-7").mkdir(parents=True)
    (lab.root / "go").touch()
    assert outcomes(lab, forced=forced)["clean"] == "ran" and is_sound(lab)
    assert read(lab, "clean", "run.json")["attempts"][-1]["resumed_from"] == (None if forced else "step-7")


@needs_mounts
@pytest.mark.nightly
def test_a_job_is_ended_from_wherever_the_project_is_mounted(lab: Lab) -> None:
    with other_mount(lab) as scratch:
        assert [job.address for job in cancel(lab.project, "clean")] == ["lab/clean"]
        assert not list(processes_of(scratch)) and not live_jobs(lab.project)


def interrupted(lab: Lab) -> Path:
    """`clean` was ended from outside when it had checkpoints: its scratch folder."""
    lab.knobs(clean={"seconds": 600})
    runner = lab.orchestrator("run_graph(run)")
    until(lambda: (found := running_scratch(lab, "clean")) and (found / "inputs.json").exists())
    runner.kill()
    runner.communicate()
    scratch = scratch_of_clean(lab)
    kill_all(scratch)
    lab.knobs()
    return scratch


@pytest.mark.parametrize("rebooted", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["same boot", "rebooted"])
def test_work_that_was_interrupted_goes_on_where_the_project_was_moved(lab: Lab, rebooted: bool) -> None:
    scratch = interrupted(lab)
    if rebooted:
        for path in (scratch / "job.json", *lab.root.glob(".pedigree/leases/*/*.json")):
            told = json.loads(path.read_text())
            (told["told"] if "told" in told else told)["process"]["machine"] = "before the reboot"
            path.write_text(json.dumps(told))
    move(lab)
    assert outcomes(lab)["clean"] == "ran" and is_sound(lab)
    assert read(lab, "clean", "run.json")["attempts"][-1]["resumed_from"].startswith("step-")


@pytest.mark.nightly
def test_a_result_that_nobody_took_is_taken_where_the_project_was_moved(lab: Lab) -> None:
    lab.knobs(clean={"hold": "go"})
    runner = lab.orchestrator("run_graph(run)")
    until((lab.root / "go.waiting").exists)
    runner.kill()
    runner.communicate()
    scratch = scratch_of_clean(lab)
    (lab.root / "go").touch()
    until(lambda: (scratch / "done.json").exists() and not list(processes_of(scratch)))
    move(lab)
    assert outcomes(lab)["clean"] == "attached" and lab.runs().count("clean") == 1 and is_sound(lab)


def test_a_project_that_is_moved_under_its_run_is_gone_on_with_by_one_writer(lab: Lab) -> None:
    """What was started at the old path can write nothing more there, and ends; the new run waits for that."""
    lab.knobs(clean={"hold": "go"})
    runner = lab.orchestrator("for end in run_graph(run): print(end)")
    until((lab.root / "go.waiting").exists)
    move(lab)
    (lab.root / "go").touch()
    assert outcomes(lab)["clean"] == "ran" and is_sound(lab)
    assert "lab/clean failed" in runner.communicate(timeout=deadline(30))[0]


@pytest.mark.parametrize("with_leases", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["all of it", "without leases"])
def test_a_copy_leaves_the_original_alone(lab: Lab, with_leases: bool) -> None:
    lab.knobs(clean={"hold": "go"})
    runner = lab.orchestrator("for end in run_graph(run): print(end)")
    until((lab.root / "go.waiting").exists)
    scratch = scratch_of_clean(lab)
    original, copy = lab.root, lab.root.with_name("copy")
    subprocess.run(["cp", "-a", original, copy], check=False, capture_output=True)  # files vanish while a job works
    if not with_leases:
        subprocess.run(["rm", "-r", copy / ".pedigree/leases"], check=True)
    lab.root = copy
    assert live_jobs(lab.project) == []
    for lease in copy.glob(".pedigree/leases/*"):
        assert holder_of(lease) is None and (holder_of(original / ".pedigree/leases" / lease.name) is None) == (
            "clean" not in lease.name and lease.name != scratch.name
        )
    for name in ("lab", "clean"):
        with pytest.raises(UsageProblem, match="no running job matches"):
            cancel(lab.project, name)
    (copy / "go").touch()
    assert outcomes(lab)["clean"] == "ran" and is_sound(lab)
    lab.root = original
    assert runner.poll() is None and list(processes_of(scratch))
    (original / "go").touch()
    said = runner.communicate(timeout=deadline(60))[0]
    assert "failed" not in said and lab.runs().count("clean") == 1 and is_sound(lab)
