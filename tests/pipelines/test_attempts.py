"""What is made of a job that fails, of clocks that jump and of disks that are full: nothing is lost, and nobody waits for ever."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running_lab import Died, Lab
from sweeps import nightly_after
from waiting import InThread, deadline, until

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.data.artifacts.artifacts import ArtifactError, write_json
from pedigree.data.store import durable, heartbeat
from pedigree.data.store.fence import Fence, Superseded
from pedigree.data.store.heartbeat import Listener
from pedigree.pipelines.jobs import attempts, launcher, memory_kills, processes
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.launcher import Status
from pedigree.pipelines.jobs.lease import lease
from pedigree.pipelines.jobs.processes import Process
from pedigree.pipelines.jobs.scratch_state import Handle
from pedigree.pipelines.ledger import ledger
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.run import ensure as ensure_module
from pedigree.pipelines.run import publication
from pedigree.pipelines.run.ensure import ensure
from pedigree.stages import __main__ as entry
from pedigree.stages.job.job import PULSES, Job
from pedigree.stages.job.outcome import RESUME_ME, read_done


def scratch_of(lab: Lab) -> Path | None:
    return next((path.parent for path in lab.root.glob(".pedigree/scratch/*/curve.jsonl")), None)


def make(lab: Lab, name: str = "raw", **options: Any) -> str:
    run = lab.run()
    return ensure(run, run.graph.find(name), **options).outcome


def failure(lab: Lab, name: str = "raw", **options: Any) -> StageFailed:
    with pytest.raises(StageFailed) as found:
        make(lab, name, **options)
    return found.value


def rows(lab: Lab) -> str:
    return (lab.root / "artifacts/lab/raw/payload/rows.jsonl").read_text()


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_kills_no_job(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It jumps for the runner alone: the job is another process, which goes on by the right time."""
    lab.processes = True
    lab.edit("configs/execution/lab.yaml", "retries: 1,", "retries: 0, timeout_s: 3600,")
    lab.knobs(raw={"seconds": 2})  # with a tenth of a second between its signs of life, which is long enough for the jump to be seen
    real = time.time
    jump = InThread(lambda: until(lambda: scratch_of(lab)) and monkeypatch.setattr(time, "time", lambda: real() + 1e6))
    try:
        assert make(lab) == "ran" and lab.runs() == ["raw"]
    finally:
        jump.join()  # else it could jump in a later test


def test_files_of_a_wrong_time_kill_no_job(lab: Lab) -> None:
    """The job's machine is a day behind: its heartbeat's file is a day old when it is written."""
    lab.knobs(raw={"seconds": 1})
    ended = threading.Event()

    def age() -> None:
        while not ended.wait(0.01):
            for path in lab.root.glob(".pedigree/scratch/*/*"):
                try:
                    os.utime(path, (0, time.time() - 86400))
                except FileNotFoundError:
                    continue

    thread = threading.Thread(target=age)
    thread.start()
    try:
        assert make(lab) == "ran" and lab.runs() == ["raw"]
    finally:
        ended.set()
        thread.join()


# --- what does not end, and what ends too often ------------------------------------------------------------------------


@pytest.mark.proves("placement.grace_s")
def test_a_process_that_the_kernel_holds_does_not_hang_ctrl_c(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.processes = True
    lab.knobs(raw={"seconds": 60})
    monkeypatch.setattr(processes, "PATIENCE_S", 0.5)
    lab.edit("configs/execution/lab.yaml", "retries: 1,", "retries: 1, grace_s: 1,")
    run = lab.run()
    real, asked = os.kill, []

    def held(pid: int, number: int) -> None:
        asked.append(number) if number == signal.SIGKILL else real(pid, number)

    monkeypatch.setattr(os, "kill", held)
    monkeypatch.setattr(os, "killpg", lambda pid, number: asked.append(number))
    threading.Thread(target=lambda: until(lambda: scratch_of(lab)) and run.cancelled.set()).start()
    began = time.monotonic()
    said = r"canceled; its checkpoints are kept; process \d+ \(state \w\) survived SIGKILL; it is blocked in the kernel"
    with pytest.raises(StageFailed, match=said):
        ensure(run, run.graph.find("raw"))
    assert time.monotonic() - began < deadline(20) and signal.SIGKILL in asked
    monkeypatch.undo()
    scratch = scratch_of(lab)
    assert scratch and processes.kill_all(scratch) == []


def test_a_storm_of_pre_emptions_slows_down_and_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.knobs(raw={"preempt": 99})
    monkeypatch.setattr(attempts, "PREEMPTIONS", 3)
    monkeypatch.setattr(attempts, "BACKOFF_S", (0.01, 0.01, 0.01))
    failed = failure(lab)
    assert failed.cause == "preempted" and "preempted 4 times in a row without progress" in failed.message
    assert "run `pedigree run lab` again" in failed.message and lab.runs() == ["raw"] * 4
    pauses = [attempts._pause_s(0, count, False) for count in range(1, 17)]
    assert pauses == sorted(pauses) and pauses[0] == 0.01 and pauses[-1] == attempts.LONGEST_PAUSE_S
    assert attempts._pause_s(0, 1, True) == 0
    lab.knobs()
    assert make(lab) == "ran"


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A kernel that tells what it is told to tell."""
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(memory_kills, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_kills, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory_kills, "KERNEL_LOG", tmp_path / "kmsg")

    def tell(kills: int, log: str | None = None) -> None:
        (tmp_path / "proc" / "vmstat").write_text(f"nr_free_pages 1\noom_kill {kills}\n")
        if log is not None:
            (tmp_path / "kmsg").write_text(log)

    tell(5)
    return tell


def beat(scratch: Path, share: float) -> None:
    write_json(scratch / "pulses" / "0", {"pid": 12, "memory_share": share})


KILLED = "6,10,{at},-;Out of memory: Killed process {pid} (python) total-vm:1kB\n"


def test_the_kernels_log_tells_whose_process_was_killed(
    tmp_path: Path, kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_kills, "_sees_the_kernels_numbers", lambda: True)
    before = memory_kills.Before(kills=5, uptime_s=1000.0)
    assert memory_kills.ran_out(before, tmp_path, {12}, -9) is None  # the kernel has killed nobody
    kernel(6, KILLED.format(pid=77, at=1_500_000_000))
    beat(tmp_path, 0.01)
    assert memory_kills.ran_out(before, tmp_path, {12}, -9) is None  # a neighbour's
    kernel(6, KILLED.format(pid=13, at=100_000_000))
    assert memory_kills.ran_out(before, tmp_path, {12, 13}, -9) is None  # long before this job
    kernel(6, KILLED.format(pid=13, at=1_500_000_000))
    assert memory_kills.ran_out(before, tmp_path, {12, 13}, 1) == "the kernel killed its process 13 because memory ran out"


def test_without_the_kernels_log_memory_must_have_been_low(tmp_path: Path, kernel: Callable[..., None]) -> None:
    before = memory_kills.Before(kills=5)
    kernel(6)
    assert memory_kills.ran_out(before, tmp_path, {12}, -9) is None
    beat(tmp_path, 0.5)
    assert memory_kills.ran_out(before, tmp_path, {12}, -9) is None
    beat(tmp_path, 0.04)
    said = memory_kills.ran_out(before, tmp_path, {12}, -9)
    assert said is not None and said.startswith("one of its processes was killed with 4 % of the memory left")
    assert memory_kills.ran_out(before, tmp_path, {12}, -15) is None  # it was asked to stop


def test_the_count_of_our_own_control_group_goes_before_that_of_the_machine(tmp_path: Path, kernel: Callable[..., None]) -> None:
    kernel(9)
    group = tmp_path / "cgroup" / "jobs"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "proc" / "self").mkdir()
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/jobs\n")
    assert memory_kills.Before.now().kills == 2


def test_a_neighbours_death_for_lack_of_memory_changes_nobodys_job(lab: Lab, kernel: Callable[..., None]) -> None:
    """It dies of SIGKILL while the kernel's count goes up; today that halves its micro-batch, or ends the stage where it cannot."""
    lab.processes = True
    lab.knobs(raw={"crash": 1})
    machine = lab.code / "data/host/machine.py"
    machine.write_text(f"{machine.read_text()}\n\ndef free_memory_share() -> float:\n    return 1.0\n")  # whatever this one has left
    counted = InThread(lambda: until(lambda: list(lab.root.glob(".pedigree/scratch/*/job.json"))) and kernel(6))
    assert make(lab) == "ran" and lab.runs() == ["raw", "raw"]
    counted.join()


# --- full disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, left: int) -> Path:
    filler = folder / "filler"
    with filler.open("wb") as stream:
        stream.write(bytes(shutil.disk_usage(folder).free - left))
    return filler


@pytest.mark.parametrize("left", nightly_after(1, [32 << 20, 27 << 20]))
def test_a_disk_that_fills_at_publication_keeps_the_result_for_next_time(disk: Path, left: int) -> None:
    """The job's 20 MiB and its code fit, DVC's copy of them does not: the result stays and is taken, without another run."""
    lab = Lab(disk)
    lab.knobs(raw={"bytes": 20 << 20})
    lab.run()
    filler = fill(disk, left)
    failed = failure(lab)
    assert failed.cause == "disk_full" and "free some space and run the command again" in failed.message, failed
    assert lab.runs() == ["raw"]
    filler.unlink()
    assert make(lab) in ("attached", "restored") and lab.runs() == ["raw"]
    run = lab.run()
    assert run.ledger.reasons(run.graph.find("raw")) == []


# --- what --force has made -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["job started", "publish set aside", "publish renamed", "commit cached"])
def test_what_force_has_made_is_not_replaced_by_what_it_was_to_replace(lab: Lab, point: str) -> None:
    """The runner dies after the job, before it is recorded: the cache's old result has the same key, and another content."""
    lab.knobs(raw={"drawn": True})
    assert make(lab) == "ran" and rows(lab) == '{"attempt":1}\n'

    def dies(name: str) -> None:
        if name == point:
            raise Died

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        for module in (launcher, publication, ledger):
            patch.setattr(module, "fault_point", dies)
        make(lab, force=True)
    (scratch,) = (lab.root / ".pedigree/scratch").iterdir()
    until(lambda: attempts.working(lab.launcher, scratch) is None)
    published = point != "job started"
    assert make(lab) in (("attached", "restored") if published else ("unchanged",))
    if not published:  # the old one stands, and the same command takes what was made meanwhile
        assert make(lab, force=True) == "attached"
    assert rows(lab) == '{"attempt":2}\n' and lab.runs() == ["raw", "raw"]
    assert make(lab, force=True) == "ran" and rows(lab) == '{"attempt":3}\n'


@pytest.mark.parametrize("point", ["publish renamed", "commit cached", "restore checked out"])
def test_a_runner_that_was_overtaken_at_the_last_moment_records_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Another one may have put there by now what has nothing to do with this one's parameters."""
    if point == "restore checked out":
        assert make(lab) == "ran"
        shutil.rmtree(lab.root / "artifacts/lab/raw")

    def recorded() -> list[Any]:
        lock = lab.root / "artifacts/lab/dvc.lock"
        return [lock.read_bytes() if lock.exists() else b"", sorted((lab.root / ".dvc/cache/runs").rglob("*"))]

    def overtaken(name: str) -> None:
        if name == point:
            claim = max((lab.root / ".pedigree/leases/lab--raw").glob("*.json"))
            number = int(claim.stem) + 1
            claim.with_stem(f"{number:06d}").write_text(json.dumps(json.loads(claim.read_text()) | {"number": number}))

    before = recorded()
    for module in (publication, ledger):
        monkeypatch.setattr(module, "fault_point", overtaken)
    failed = failure(lab)
    assert failed.cause == "overtaken" and recorded() == before


# --- a runner in trouble ---------------------------------------------------------------------------------------------


def test_a_disk_that_fails_for_a_moment_ends_no_job(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.knobs(raw={"hold": "go"})
    failures, listed = [], os.listdir

    def stale(folder: Any) -> list[str]:
        leases = str(folder).startswith(str(lab.project.private / "leases")) and threading.current_thread() is threading.main_thread()
        if leases and (lab.root / "go.waiting").exists() and len(failures) < 3:
            failures.append(folder)
            (lab.root / "go").touch()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return listed(folder)

    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(os, "listdir", stale)
    assert make(lab) == "ran" and lab.runs() == ["raw"] and len(failures) == 3


def test_a_job_that_cannot_be_looked_after_goes_on_and_is_found_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.knobs(raw={"hold": "go"})
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    with monkeypatch.context() as patch:

        def broken(folder: Any, *, listed: Any = os.listdir) -> list[str]:
            leases = str(folder).startswith(str(lab.project.private / "leases")) and threading.current_thread() is threading.main_thread()
            if leases and (lab.root / "go.waiting").exists():  # of the runner: the job has a fence there
                patch.setattr(heartbeat, "SILENCE_S", 0.0)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return listed(folder)

        patch.setattr(os, "listdir", broken)
        failed = failure(lab)
    assert failed.cause == "storage" and "; its job continues, and `pedigree run lab` finds it again" in failed.message
    (lab.root / "go").touch()
    assert make(lab) == "attached" and lab.runs() == ["raw"]


# --- what a job reports ------------------------------------------------------------------------------------------------


def test_a_failed_job_that_does_not_exit_keeps_its_cause_and_its_whole_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "LINGER_S", -1.0)
    watch = attempts._Watch(Handle(launcher="local", scratch=str(tmp_path), attempt=1), Placement(), Listener())
    assert watch.overdue() is None
    for cause, told in (("refused", "rows: 1 malformed:\n  rows.jsonl:8: is not JSON"), ("out_of_memory", "rows: 1 malformed:")):
        write_json(tmp_path / "done.json", {"ok": False, "cause": cause, "message": "rows: 1 malformed:\n  rows.jsonl:8: is not JSON"})
        assert watch.overdue() == (cause, told)


@pytest.mark.parametrize(
    ("cause", "again"), [("refused", False), ("not_finite", False), ("timeout", False), ("crashed", True), ("preempted", True)]
)
def test_a_job_elsewhere_that_fails_for_good_is_not_tried_again_here(lab: Lab, cause: str, again: bool) -> None:
    run = lab.run()
    node, scratch = run.graph.find("raw"), lab.project.scratch("0" * 64)
    (scratch / PULSES).mkdir(parents=True)
    if cause != "timeout":
        write_json(scratch / "done.json", {"ok": False, "cause": cause, "message": "it ended"})
    process = Process(pid=1, started=1, machine="elsewhere")
    handle = Handle(launcher="local", scratch=str(scratch), attempt=1, told={"process": process.model_dump()})
    with lease(lab.project.lease(scratch.name), "a test") as hold:
        token = Fence.raised(hold.folder, hold.number)

        def wait() -> bool:
            return attempts.await_elsewhere(run, node, handle, Placement(timeout_s=1e-6), hold, Listener())

        if again:
            assert wait() is False
            return
        with pytest.raises(StageFailed) as failed:
            wait()
        assert failed.value.cause == cause
        with pytest.raises(Superseded):  # it computes no longer for a stage that has failed
            token.check()


def test_a_second_signal_does_not_end_the_report_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    def ends(*given: Any, end: Any = entry.end, **outcome: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        end(*given, **outcome)

    for name in ("check_code", "open_inputs", "read_config"):
        monkeypatch.setattr(entry, name, lambda *_: None)
    monkeypatch.setattr(entry, "load_stage", lambda kind: SimpleNamespace(run=stopped))
    monkeypatch.setattr(entry, "end", ends)
    spec: Any = SimpleNamespace(kind="sft")
    job = Job(folder=tmp_path, address="lab/sft", key="0" * 64, numerics=Numerics(), placement=Placement(), source_files={}, fence=None)
    before = {number: signal.getsignal(number) for number in entry.STOPPING}
    try:
        entry.listen()
        assert entry.work(spec, job) == RESUME_ME
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    done = read_done(tmp_path)
    assert done is not None and (done.ok, getattr(done, "cause", None)) == (False, "preempted")


@pytest.mark.parametrize(
    ("strange", "named"),
    [
        ({"seen": {"../rows.jsonl": {"size": 1}}}, "seen"),
        ({"ok": "yes"}, "ok"),
        pytest.param({"content": "../../elsewhere"}, "content", marks=pytest.mark.nightly),
        pytest.param({"metrics": [1]}, "metrics", marks=pytest.mark.nightly),
        pytest.param({"password": "x"}, "password", marks=pytest.mark.nightly),
    ],
)
def test_a_report_that_no_job_writes_ends_the_stage_and_keeps_its_work(
    lab: Lab, strange: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message names the field and what to do; doing so goes on from the checkpoint."""
    monkeypatch.setattr(entry, "write_json", lambda path, told: write_json(path, told | strange))
    for _ in range(2):  # also for the next command, which finds it lying there
        failed = failure(lab)
        assert failed.cause == "refused" and "done.json was not written by this version" in failed.message and named in failed.message, (
            failed
        )
        assert "delete it and run the command again" in failed.message and str(lab.root) not in failed.message
    assert lab.runs() == ["raw"] and not (lab.root / "artifacts/lab/raw").exists()
    scratch = scratch_of(lab)
    assert scratch and list(scratch.glob("checkpoints/step-*"))
    (scratch / "done.json").unlink()
    monkeypatch.undo()
    assert make(lab) == "ran"
    told = json.loads((lab.root / "artifacts/lab/raw/run.json").read_text())["attempts"]
    assert [attempt["cause"] for attempt in told] == ["refused", "succeeded"] and told[1]["resumed_from"] == "step-1"


NO_REPORTS = ["{}", '{"ok": false, "cause": "a b", "message": ""}', '{"ok": true}']
DAMAGED = ["", "{", "[]", "null", '{"ok": true, "ok": true}', "[" * 1000]


@pytest.mark.parametrize("text", NO_REPORTS)
def test_what_is_no_report_is_refused_by_one_kind_of_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "done.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"done\.json"):
        read_done(tmp_path)


def test_all_lines_of_a_refusal_arrive_and_the_first_one_of_a_trace(tmp_path: Path) -> None:
    handle = Handle(launcher="local", scratch=tmp_path.as_posix(), attempt=1)
    assert attempts._failure(Status("failed", -9), handle) == ("crashed", "the job was killed by signal 9")

    def reported(cause: str) -> str:
        write_json(tmp_path / "done.json", {"ok": False, "cause": cause, "message": "rows: 1 malformed:\n  rows.jsonl:8: is not JSON"})
        told = attempts._failure(Status("failed", 1), handle)
        assert told is not None and told[0] == cause
        return told[1]

    assert reported("refused") == "rows: 1 malformed:\n  rows.jsonl:8: is not JSON"
    assert reported("crashed") == "rows: 1 malformed:"


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_report_was_never_made(tmp_path: Path, text: str) -> None:
    (tmp_path / "done.json").write_text(text)
    assert read_done(tmp_path) is None


# --- promises that outlive a power cut ---------------------------------------------------------------------------------


def test_a_rename_is_on_the_disk_before_anything_builds_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def note(what: str, path: str) -> None:
        done.append((what, Path(path).name))

    def synced(descriptor: int) -> None:
        note("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda old, new: (note("rename", str(new)), replace(old, new)))
    monkeypatch.setattr(os, "rename", lambda old, new: (note("rename", str(new)), rename(old, new)))
    write_json(tmp_path / "a" / "x.json", {})
    assert [(what, name) for what, name in done if not name.endswith(".tmp")] == [("rename", "x.json"), ("fsync", "a")]
    assert done[0][0] == "fsync"  # the file itself, before its name
    done.clear()
    (tmp_path / "b").mkdir()
    durable.sync_tree(tmp_path / "a")
    durable.rename(tmp_path / "a", tmp_path / "b" / "a")
    assert done == [("fsync", "x.json"), ("fsync", "a"), ("rename", "a"), ("fsync", "b"), ("fsync", tmp_path.name)]


def test_the_lock_is_on_the_disk_before_the_work_is_removed_that_it_replaces(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))[1])
    monkeypatch.setattr(ensure_module, "clear", lambda *_: done.append("cleared"))
    assert make(lab) == "ran"
    synced = [Path(name).name for name in done[: done.index("cleared")]]
    lock = next(place for place, name in enumerate(synced) if name.startswith(".dvc.lock."))
    assert synced[lock + 1] == "lab" and any(re.fullmatch(r"\.[0-9a-f]{64}\..*", name) for name in synced[:lock])  # the run cache's entry


def test_no_folder_gets_its_name_before_all_that_it_holds_is_on_the_disk(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of the code, a publication, an export."""
    synced: set[int] = set()
    early: dict[Path, list[str]] = {}
    fsync, rename = os.fsync, os.rename

    def noted(old: Path, new: Path) -> None:
        if Path(old).is_dir():
            early[Path(new)] = [path.name for path in (Path(old), *Path(old).rglob("*")) if path.stat().st_ino not in synced]
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file))[1])
    monkeypatch.setattr(os, "rename", noted)
    make(lab)
    export(lab.project.artifact("lab/raw"), "lab/raw", tmp_path / "exported")
    (code,) = (lab.project.private / "code").glob("[!.]*")
    assert [early[path] for path in (code, lab.project.artifact("lab/raw"), tmp_path / "exported")] == [[], [], []]
