"""Runners on two machines with one disk. The other machine is a PID namespace of its own: our process numbers mean nothing there."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elsewhere import ListenersClock, hasty, needs_elsewhere, next_beat, python_elsewhere
from running_lab import Lab
from waiting import InThread, deadline, until

from pedigree.data.store import heartbeat
from pedigree.data.store.fence import OVERTAKEN
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.launcher import LocalLauncher
from pedigree.pipelines.run.ensure import ensure
from pedigree.stages.job.job import PULSES

pytestmark = needs_elsewhere
MACHINE = """
import os, signal, subprocess, sys
start = "from pedigree.configs.base.project import Project; from pedigree.pipelines.run.runs import run_graph"
start += "; from pedigree.pipelines.run.opening import Request, open_run"
code = start + "\\nrun = open_run(Project.find(), Request('lab')); run.keep_jobs = True; print(*run_graph(run, {'lab/raw'}), flush=True)"
runner = subprocess.Popen([sys.executable, "-c", code])
for line in sys.stdin:
    if line == "kill runner\\n":
        runner.kill()
        runner.wait()
    elif line == "interrupt runner\\n":
        runner.send_signal(signal.SIGINT)
        runner.wait()
    elif line == "await runner\\n":
        runner.wait()
    elif line == "stop job\\n":
        job = int(open(FILE).read())
        os.kill(job, signal.SIGSTOP)
    elif line == "go on\\n":
        os.kill(job, signal.SIGCONT)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]), flush=True)
    print("done", flush=True)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab in which silence is over after two seconds, here and in all processes that it starts."""
    lab = Lab(tmp_path)
    hasty(lab, monkeypatch)
    return lab


class Machine:
    """The other one: a runner whose job of `raw` is at work; with the knob `pause: go` until it is to go on."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        inside = lab.root / "job.pid"
        code = MACHINE.replace("FILE", repr(str(inside)))
        env = lab.environment | {"PEDIGREE_SLOTS": str(lab.root.parent / "slots of the other machine")}
        self.process = python_elsewhere(code, lab.root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.scratch: Path = until(self._at_work)
        told = json.loads((self.scratch / "job.json").read_text())["told"]["process"]
        inside.write_text(str(told["pid"]))

    def _at_work(self) -> Path | None:
        for path in self.lab.root.glob(".pedigree/scratch/*/curve.jsonl"):
            if (path.parent / "job.json").exists():
                return path.parent
        return None

    def tell(self, command: str) -> list[str]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        said = [self.process.stdout.readline()]
        while said[-1] != "done\n":
            said.append(self.process.stdout.readline())
        return said[:-1]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def machine(lab: Lab) -> Iterator[Machine]:
    lab.knobs(raw={"seconds": 5, "pause": "go"})
    machine = Machine(lab)
    yield machine
    machine.end()


def test_a_job_of_another_machine_is_waited_for_and_its_result_taken(lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process number means nothing here: looked up, it would let a second writer start in the same folder."""
    monkeypatch.setattr(heartbeat, "SILENCE_S", 8.0)
    machine.tell("kill runner")
    told: list[str] = []
    run = lab.run(watch=lambda address, state, detail="", **more: told.append(f"{state} {detail}"))
    clock, thread = ListenersClock(monkeypatch), InThread(ensure, run, run.graph.find("raw"))
    clock.beating(lambda: next_beat(machine.scratch / PULSES))
    (lab.root / "go").touch()
    assert thread.join().outcome == "attached"
    assert lab.runs() == ["raw"] and not list(Path(os.environ["PEDIGREE_SLOTS"]).glob("cores/*.json"))
    assert any("on another machine or before a reboot" in line for line in told)


@pytest.mark.nightly
def test_a_machine_that_is_gone_falls_silent_once(lab: Lab, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held two leases, and its job: whoever waits listens to all of them at the same time."""
    silence = deadline(5.0)
    monkeypatch.setattr(heartbeat, "SILENCE_S", silence)
    machine.end()
    run, began = lab.run(), time.monotonic()
    lab.knobs()
    assert ensure(run, run.graph.find("raw")).outcome == "ran"
    assert silence - 1 < time.monotonic() - began < 2 * silence


def files(root: Path) -> dict[str, bytes]:
    """What lies there but logs, and the empty file by which a folder is looked at: who ends just then leaves it."""
    found = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path): path.read_bytes() for path in found if "log" not in path.name and not path.name.startswith(".look-")}


def test_a_stopped_writer_that_comes_back_changes_nothing(lab: Lab, machine: Machine) -> None:
    machine.tell("kill runner")
    machine.tell("stop job")
    (lab.root / "go").touch()
    run = lab.run()
    assert ensure(run, run.graph.find("raw")).outcome == "ran"  # under a higher number, after silence
    assert lab.runs() == ["raw", "raw"]
    before = files(lab.root / "artifacts") | files(lab.root / ".pedigree")
    assert machine.tell("go on") == [f"ended {OVERTAKEN}\n"]
    assert files(lab.root / "artifacts") | files(lab.root / ".pedigree") == before


@pytest.mark.nightly
def test_a_writer_that_comes_back_while_the_new_one_works_ends_itself(lab: Lab, machine: Machine) -> None:
    machine.tell("kill runner")
    machine.tell("stop job")
    run = lab.run()
    thread = InThread(ensure, run, run.graph.find("raw"))
    until(lambda: lab.runs() == ["raw", "raw"], alive=thread.alive)
    assert machine.tell("go on") == [f"ended {OVERTAKEN}\n"]
    (lab.root / "go").touch()
    end = thread.join()
    log = (lab.root / ".pedigree/logs/lab/raw.log").read_text()
    assert "was taken over: this is submission 1.1 of its job, and the latest is 2.1" in log
    curve = (lab.root / "artifacts/lab/raw/evidence/curve.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in curve[1:]][-50:] == list(range(1, 51)) and end.outcome == "ran"


@pytest.mark.nightly
def test_a_runner_that_was_stopped_leaves_the_job_to_the_one_that_took_over(lab: Lab) -> None:
    """It comes back while the other one waits for its job: it must neither cancel that nor publish beside it."""
    lab.knobs(raw={"seconds": 8})
    code = "import os, sys\nfrom pedigree.pipelines.run.runs import run_graph\nfor end in run_graph(run, {'lab/raw'}): print(end)"
    first = lab.orchestrator(code)
    scratch = until(lambda: next((p.parent for p in lab.root.glob(".pedigree/scratch/*/curve.jsonl")), None))
    os.kill(first.pid, signal.SIGSTOP)
    for name in ("lab--raw", scratch.name):  # as a runner of elsewhere, which hears nothing of it, would
        (number,) = [int(path.stem) for path in (lab.root / ".pedigree/leases" / name).glob("*.json")]
        claim = json.loads((lab.root / ".pedigree/leases" / name / f"{number:06d}.json").read_text()) | {"number": number + 1}
        claim["process"]["machine"] = "elsewhere"
        (lab.root / ".pedigree/leases" / name / f"{number + 1:06d}.json").write_text(json.dumps(claim))
    os.kill(first.pid, signal.SIGCONT)
    said = first.communicate(timeout=deadline(30))[0]
    assert "lab/raw failed (overtaken): lease" in said and "it writes nothing more" in said
    assert not (scratch / "done.json").exists() and not (lab.root / "artifacts/lab/raw").exists()
    run = lab.run()  # the other runner is silent
    assert ensure(run, run.graph.find("raw")).outcome == "attached" and lab.runs() == ["raw"]


# --- what people type here while a job is at work there ------------------------------------------------------------------


@pytest.fixture
def long_job(lab: Lab) -> Iterator[Machine]:
    """The other machine, whose job of `raw` is at work for as long as a test may last."""
    lab.knobs(raw={"seconds": 1200})
    machine = Machine(lab)
    yield machine
    machine.end()


def abandon(lab: Lab) -> None:
    lab.edit("configs/recipes/lab.yaml", "count: 5, seed: 2", "count: 6, seed: 2")


def test_a_job_that_lives_on_another_machine_is_listed_and_left_alone(lab: Lab, long_job: Machine, type_: Any) -> None:
    until(lambda: '"total": 12000' in (long_job.scratch / "progress.json").read_text())
    code, out, _ = type_("jobs")
    assert code == 0 and re.search(rf"lab/raw +prepare_data +elsewhere \({os.uname().nodename}\) +\d+/12000 .* pedigree run lab", out)
    (job,) = until(lambda: [one for one in json.loads(type_("jobs", "--json")[1])["jobs"] if one["alive"]])  # it listens for 0.6 s
    assert (job["address"], job["elsewhere"], job["alive"], job["pid"]) == ("lab/raw", True, True, None) and job["step"] > 0
    assert "running elsewhere, step" in type_("status", "lab")[1]
    long_job.tell("interrupt runner")  # it has given its leases back, and its job goes on
    code, _, err = type_("gc", "--yes")
    assert code == 2 and "the job of lab/raw is running" in err
    handle = json.loads((long_job.scratch / "job.json").read_text())  # found wherever that machine has mounted the project
    (long_job.scratch / "job.json").write_text(json.dumps(handle | {"scratch": "/mnt/there/.pedigree/scratch/key"}))
    found = LocalLauncher(lab.project).find(long_job.scratch)
    assert found and found.scratch == str(long_job.scratch)
    abandon(lab)
    code, out, _ = type_("scratch", "--clean")
    assert (code, (long_job.scratch / "curve.jsonl").exists()) == (0, True)
    assert "deleted 0 folders" in out and f"kept raw/{long_job.scratch.name[:12]}: its job may be running on another machine" in out
    (long_job.scratch / "job.json").unlink()  # a runner that is killed just after it has started a job leaves none
    code, _, err = type_("scratch", f"raw/{long_job.scratch.name[:12]}", "--clean")
    assert code == 2 and "its job may be running on another machine" in err and (long_job.scratch / "curve.jsonl").exists()


@pytest.mark.nightly
def test_scratch_of_a_machine_that_fell_silent_goes_and_who_comes_back_ends(lab: Lab, long_job: Machine, type_: Any) -> None:
    """Its runner died without a word: its leases count until it has been silent."""
    long_job.tell("kill runner")
    long_job.tell("stop job")
    until(lambda: re.search(r"lab/raw .* no heartbeat for \d+s", type_("jobs")[1]))
    abandon(lab)
    code, out, _ = type_("scratch", "--clean")
    assert code == 0 and "heartbeats from other machines" in out and "deleted 1 folder" in out
    assert long_job.tell("go on") == [f"ended {OVERTAKEN}\n"]
    assert not long_job.scratch.exists()


def test_cancel_ends_a_job_of_another_machine(lab: Lab, long_job: Machine, type_: Any) -> None:
    code, out, _ = type_("cancel", "raw")
    assert code == 0 and f"ended lab/raw on another machine ({os.uname().nodename})" in out
    (said, *_) = long_job.tell("await runner")
    assert "cancelled" in said and lab.runs() == ["raw"]  # its runner has not tried again
    assert "was taken over" in (long_job.scratch / "log.txt").read_text() and list(long_job.scratch.glob("checkpoints/step-*"))
    assert not (long_job.scratch / "done.json").exists()


@pytest.mark.nightly
def test_who_waits_here_for_a_job_that_was_cancelled_there_does_not_start_it_again(lab: Lab, long_job: Machine, type_: Any) -> None:
    long_job.tell("kill runner")
    told: list[str] = []
    run = lab.run(watch=lambda address, state, detail="", **more: told.append(detail))

    def wait() -> None:
        with pytest.raises(StageFailed, match="canceled; its checkpoints are kept"):
            ensure(run, run.graph.find("raw"))
        told.append("ended")

    thread = InThread(wait)
    until(lambda: any("its job runs on another machine" in line for line in told), alive=thread.alive)
    assert type_("cancel", "raw")[0] == 0
    thread.join()
    assert told[-1] == "ended" and lab.runs() == ["raw"]
    lab.knobs()
    assert ensure(lab.run(), run.graph.find("raw")).outcome == "ran"  # typed again, it goes on


def test_cancel_of_a_recipe_says_that_its_runner_elsewhere_goes_on(lab: Lab, long_job: Machine, type_: Any) -> None:
    """It waits for slots, for example: no job of this machine or that one tells of it."""
    code = f"""import sys; from pathlib import Path; from pedigree.pipelines.jobs.lease import lease
with lease(Path({str(lab.project.lease("lab--suite"))!r}), 'pedigree run lab'): print('waits', flush=True); sys.stdin.read()"""
    runner = python_elsewhere(code, lab.root, env=lab.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert runner.stdout and runner.stdout.readline() == "waits\n"
    code, out, err = type_("cancel", "lab")
    runner.communicate("")
    assert code == 1 and "ended lab/raw" in out and "`pedigree run lab` still runs on another machine" in err and "stop it there" in err
