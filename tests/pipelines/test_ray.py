"""Jobs of a real Ray cluster of two nodes on this machine."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from ray_cluster import HEAD, SECOND, Cluster
from running_lab import RANKS, Lab, outcomes, read, running_scratch
from waiting import InThread, deadline, until

from pedigree.pipelines.jobs import ray_launcher
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.events import StageWaiting
from pedigree.pipelines.jobs.live import live_jobs
from pedigree.pipelines.jobs.processes import processes_of
from pedigree.pipelines.run.ensure import Result, ensure
from pedigree.pipelines.run.runs import run_graph

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # the start of Ray alone takes 25 s of processor time
DONE = dict.fromkeys(("suite", "raw", "clean", "cleaner"), "ran")


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    for job in shared.ask("/api/jobs/"):
        if job["status"] in ray_launcher.ACTIVE:
            shared.stop_job(job["submission_id"])
    until(lambda: not {"PENDING", "RUNNING"} & {*shared.jobs().values()})


@pytest.fixture
def lab(tmp_path: Path, cluster: Cluster) -> Lab:
    """All its stages but one are jobs of Ray."""
    lab = Lab(tmp_path, processes=True)
    profile = lab.root / "configs" / "execution" / "lab.yaml"
    lab.edit("configs/execution/lab.yaml", "slots: 1,", f"slots: 1, launcher: {{type: ray, address: '{cluster.address}'}}, grace_s: 20,")
    profile.write_text(profile.read_text() + "stages: {suite: {placement: {launcher: {type: local}}}}\n")
    return lab


@contextmanager
def running(lab: Lab, ends: list[Any], watch: Any = None) -> Iterator[threading.Event]:
    """A run in a thread, whose results are `ends` afterwards; canceled by the event."""
    cancelled = threading.Event()
    run = lab.run(cancelled=cancelled)
    run.watch = watch or run.watch
    thread = InThread(run_graph, run)
    try:
        yield cancelled
    except BaseException:
        cancelled.set()
        raise
    finally:
        ends.extend(thread.join())


def test_a_recipe_runs_in_ray_and_beside_it_and_leaves_the_same_bytes(lab: Lab, cluster: Cluster, tmp_path: Path) -> None:
    assert outcomes(lab) == DONE
    assert cluster.jobs() == dict.fromkeys(("lab/raw", "lab/clean", "lab/cleaner"), "SUCCEEDED")
    assert "launcher" not in read(lab, "raw", "run.json")["placement"]
    local = Lab(tmp_path / "local", processes=True)
    assert outcomes(local) == DONE
    for stage in DONE:
        assert read(local, stage, "record.json")["content"] == read(lab, stage, "record.json")["content"]


def test_what_ray_could_never_start_is_refused_before_the_run(lab: Lab, cluster: Cluster) -> None:
    lab.edit("configs/execution/lab.yaml", "\nslots: 2", "\nslots: 9")
    lab.edit("configs/execution/lab.yaml", "slots: 1, launcher", "slots: 9, launcher")
    before = cluster.jobs()
    said = Command(lab)("run", "lab", code=2)
    assert f"lab: stages raw, clean, cleaner: the Ray cluster at {cluster.address} has 0 of 1 nodes with {{CPU: 9}}: lower" in said
    assert not lab.runs() and cluster.jobs() == before


def test_a_queued_job_has_no_deadline_outlasts_a_silent_ray_and_is_canceled(
    lab: Lab, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_launcher, "ANSWER_S", 1.0)
    lab.edit("configs/execution/lab.yaml", "heartbeat_timeout_s: 120", "heartbeat_timeout_s: 1, timeout_s: 1")
    seen: list[str] = []
    foreign = cluster.occupy({}, {})
    with running(lab, [], lambda event: seen.append(event.detail) if isinstance(event, StageWaiting) else None) as cancelled:
        until(lambda: any(text.startswith("in Ray's queue as job ") and text.endswith(" (NO_RESOURCES)") for text in seen))
        (queued,) = [job for job in live_jobs(lab.project) if job.address == "lab/raw"]
        assert queued.handle and not queued.elsewhere
        os.kill(cluster.dashboard(), signal.SIGSTOP)
        try:
            until(lambda: seen[-1] == f"for Ray to answer at {cluster.address}")
        finally:
            os.kill(cluster.dashboard(), signal.SIGCONT)
        until(lambda: seen[-1].startswith("in Ray's queue as job "))
        cancelled.set()
    assert cluster.jobs()["lab/raw"] == "STOPPED" and "raw" not in lab.runs()
    assert all(cluster.jobs()[name] == "RUNNING" for name in foreign)


def test_a_killed_job_resumes_from_its_checkpoint(lab: Lab) -> None:
    lab.knobs(raw={"seconds": 5, "crash": 1})
    run = lab.run()
    ensure(run, run.graph.find("raw"))
    assert [one["cause"] for one in read(lab, "raw", "run.json")["attempts"]] == ["crashed", "succeeded"]


def test_a_hung_job_is_ended_and_says_where_it_stood(lab: Lab) -> None:
    lab.knobs(raw={"seconds": 600, "silent": True})
    seconds = round(deadline(8))
    lab.edit("configs/execution/lab.yaml", "retries: 1, heartbeat_timeout_s: 120", f"retries: 0, heartbeat_timeout_s: {seconds}")
    run = lab.run()
    with pytest.raises(StageFailed, match=rf"no heartbeat for \d+ s .* allows {seconds}\b"):
        ensure(run, run.graph.find("raw"))
    scratch = running_scratch(lab, "raw")
    assert scratch and not list(processes_of(scratch))
    log = (scratch / "log.txt").read_text()
    assert 'prepare_data/run.py", line' in log.partition("Thread 0x")[0]


def test_a_run_that_was_killed_finds_its_job_again(lab: Lab) -> None:
    lab.knobs(raw={"hold": "go"})
    command = Command(lab).until("run", "lab", ready=(lab.root / "go.waiting").exists)
    command.kill()
    command.communicate()
    assert ("lab/raw", False) in [(job.address, job.elsewhere) for job in live_jobs(lab.project)]
    ends: list[Any] = []
    with running(lab, ends):
        until(lambda: any(job.address == "lab/raw" and job.holder for job in live_jobs(lab.project)))
        (lab.root / "go").touch()
    found = {end.address: end for end in ends if isinstance(end, Result)}
    assert found["lab/raw"].outcome == "attached" and found["lab/cleaner"].outcome == "ran"
    assert lab.runs().count("raw") == 1


def test_a_job_that_somebody_stops_is_not_started_again_writes_a_checkpoint_and_resumes(lab: Lab, cluster: Cluster) -> None:
    lab.knobs(raw={"seconds": 60})
    ends: list[Any] = []
    with running(lab, ends):
        until(lambda: "raw" in lab.runs())
        (job,) = [job for job in live_jobs(lab.project) if job.address == "lab/raw"]
        assert job.handle
        cluster.stop_job(job.handle.token)
    (failed,) = [end for end in ends if isinstance(end, StageFailed)]
    assert failed.cause == "cancelled" and failed.message.startswith(f"job {job.handle.token} was stopped in Ray; its checkpoints are kept")
    assert lab.runs().count("raw") == 1
    lab.knobs()
    run = lab.run()
    ensure(run, run.graph.find("raw"))
    assert read(lab, "raw", "run.json")["attempts"][-1]["resumed_from"]


def test_ranks_run_on_two_nodes(lab: Lab) -> None:
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.edit("configs/execution/lab.yaml", "threads: 1", "threads: 1, world_size: 2, nodes: 2")
    assert outcomes(lab)["sft"] == "ran" and lab.runs().count("sft") == 2


def test_a_job_whose_node_is_lost_waits_for_another_one_and_resumes(lab: Lab, cluster: Cluster) -> None:
    """The last of this file: the second node does not come back."""
    lab.knobs(raw={"seconds": 60})
    seen: list[str] = []
    ends: list[Any] = []
    (foreign,) = cluster.occupy(HEAD)
    with running(lab, ends, lambda event: seen.append(event.detail) if isinstance(event, StageWaiting) else None):
        until(lambda: list(lab.root.glob(".pedigree/scratch/*/checkpoints/step-3")))
        lab.knobs()
        cluster.kill(SECOND)
        until(lambda: "after: Ray lost job" in " ".join(seen) and seen[-1].startswith("in Ray's queue as job "))
        cluster.stop_job(foreign)
    first, second = read(lab, "raw", "run.json")["attempts"]
    assert first["cause"] == "lost" and second["cause"] == "succeeded" and second["resumed_from"]
