"""Jobs in the queue of a real Slurm of two nodes on this machine."""

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from commands import Command, InProcessCommand
from running_lab import RANKS, Lab, outcomes, read, running_scratch
from sites import at_work, waits
from slurm_cluster import Cluster
from waiting import InThread, deadline, until

from pedigree.data.artifacts.artifacts import read_run, write_json
from pedigree.pipelines.estimate.estimates import run_seconds
from pedigree.pipelines.jobs import slurm
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.events import RunEvent, StageWaiting
from pedigree.pipelines.jobs.live import live_jobs
from pedigree.pipelines.jobs.scratch_state import Handle
from pedigree.pipelines.jobs.slurm_client import problem_of
from pedigree.pipelines.run.ensure import ensure
from pedigree.pipelines.run.runs import run_graph

pytestmark = pytest.mark.slow
DONE = dict.fromkeys(("suite", "raw", "clean", "cleaner"), "ran")


@pytest.fixture
def lab(tmp_path: Path, cluster: Cluster) -> Lab:
    """All its stages but one are jobs of Slurm."""
    lab = Lab(tmp_path, processes=True)
    profile = lab.root / "configs" / "execution" / "lab.yaml"
    lab.edit("configs/execution/lab.yaml", "slots: 1,", "slots: 1, launcher: {type: slurm}, grace_s: 20,")
    profile.write_text(profile.read_text() + "stages: {suite: {placement: {launcher: {type: local}}}}\n")
    return lab


def attempts(lab: Lab, stage: str) -> list[str]:
    """Causes of the attempts, from the stage's record."""
    return [one["cause"] for one in read(lab, stage, "run.json")["attempts"]]


@pytest.mark.proves("placement.launcher")
def test_a_recipe_runs_in_the_queue_and_beside_it_and_leaves_the_same_bytes(lab: Lab, cluster: Cluster, tmp_path: Path) -> None:
    lab.edit("configs/execution/lab.yaml", "launcher: {type: slurm}", "launcher: {type: slurm, setup: [echo $SLURM_JOB_NAME >> prepared]}")
    listed = ("squeue", "--noheader", "--me", "--states=all", "--format=%A %j %T")
    before = {*cluster.ask(*listed).splitlines()}  # of other tests
    assert outcomes(lab) == DONE
    assert sorted((lab.root / "prepared").read_text().split()) == ["lab/clean", "lab/cleaner", "lab/raw"]
    ran = sorted(line.partition(" ")[2] for line in {*cluster.ask(*listed).splitlines()} - before)
    assert ran == ["lab/clean COMPLETED", "lab/cleaner COMPLETED", "lab/raw COMPLETED"]
    assert "launcher" not in read(lab, "raw", "run.json")["placement"]
    local = Lab(tmp_path / "local", processes=True)
    assert outcomes(local) == DONE
    for stage in DONE:
        assert read(local, stage, "record.json")["content"] == read(lab, stage, "record.json")["content"]


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        ("slots: 1, launcher: {type: slurm, options: [--partition=nowhere]}", "invalid partition specified: nowhere"),
        ("slots: 9, launcher: {type: slurm}", "Requested node configuration is not available (PartitionConfig)"),
    ],
)
def test_what_slurm_would_reject_or_never_start_is_refused_before_the_run(lab: Lab, cluster: Cluster, placement: str, why: str) -> None:
    lab.edit("configs/execution/lab.yaml", "\nslots: 2", "\nslots: 9")
    lab.edit("configs/execution/lab.yaml", "slots: 1, launcher: {type: slurm}", placement)
    said = Command(lab)("run", "lab", code=2)
    assert f"lab: stages raw, clean, cleaner: Slurm would reject this job: {why}" in said
    assert not lab.runs() and not cluster.ask("squeue", "--noheader", "--me")


def test_a_job_that_waits_for_nodes_to_come_back_is_no_problem(cluster: Cluster) -> None:
    with cluster.drained():
        assert problem_of(("--nodes=2",)) is None
        assert not cluster.ask("squeue", "--noheader", "--me")


def test_a_queued_job_has_no_deadline_outlasts_its_controller_and_is_canceled(lab: Lab, cluster: Cluster) -> None:
    lab.edit("configs/execution/lab.yaml", "heartbeat_timeout_s: 120", "heartbeat_timeout_s: 1, timeout_s: 1")
    seen: list[str] = []
    cancelled = threading.Event()
    run = lab.run(cancelled=cancelled)

    def watch(event: RunEvent) -> None:
        if isinstance(event, StageWaiting) and event.address == "lab/raw":  # `suite` beside it does not start within the limits
            seen.append(event.detail)

    run.watch = watch
    with cluster.drained():
        thread = InThread(run_graph, run)
        try:
            until(lambda: any(text.startswith("in Slurm's queue as job ") for text in seen), alive=thread.alive)
            (queued,) = until(lambda: [job for job in live_jobs(lab.project) if job.address == "lab/raw" and not job.elsewhere])
            assert queued.handle
            token = queued.handle.told["token"]
            until(lambda: cluster.has_saved(token))  # else it forgets the job
            cluster.kill("controller")
            until(lambda: seen[-1] == "for Slurm's controller to answer")
            cluster.start_controller()
            until(lambda: seen[-1].startswith("in Slurm's queue as job "))
            assert thread.alive()  # for longer than both limits
        finally:
            cancelled.set()
            thread.join(60)
    assert not cluster.ask("squeue", "--noheader", "--me") and "raw" not in lab.runs()


@pytest.mark.parametrize("watched", [True, False])
def test_time_in_the_queue_is_no_time_of_computing(lab: Lab, cluster: Cluster, watched: bool) -> None:
    with cluster.drained(), at_work(lab) as work:
        until(lambda: work.shows("in Slurm's queue as job "))
        (path,) = lab.root.glob(".pedigree/scratch/*/attempts.json")
        (attempt,) = json.loads(path.read_text())
        write_json(path, [attempt | {"started_at": "2026-01-01T00:00:00+00:00"}])  # it has been waiting since
        work.leave()
    if not watched:
        until(path.with_name("done.json").exists)
    with at_work(lab) as work:
        assert work.outcome() == "attached"
    run = read_run(lab.project.artifact("lab/raw") / "run.json")
    assert run.attempts[0].started_at == "2026-01-01T00:00:00+00:00"
    assert run.seconds is not None and run_seconds(run) == run.seconds and 0 <= run.seconds < deadline(60)


@pytest.mark.parametrize(
    ("refusing", "reason"),
    [(Cluster.full, "QOSMaxSubmitJobPerUserLimit"), (Cluster.closed, "Required partition not available (inactive or drain)")],
)
def test_a_job_that_slurm_refuses_for_now_is_submitted_again(
    lab: Lab, cluster: Cluster, refusing: Callable[[Cluster], AbstractContextManager[None]], reason: str
) -> None:
    with at_work(lab) as work:
        with refusing(cluster):
            until(lambda: work.shows("for Slurm to accept its job: ") and work.shows(reason))
            assert problem_of(()) is None
        assert work.outcome() == "ran"
    assert attempts(lab, "raw") == ["succeeded"]


@pytest.mark.nightly
def test_a_full_queue_is_waited_for(lab: Lab, cluster: Cluster) -> None:
    with cluster.configured("MaxJobCount=2\nMinJobAge=2\n"):
        other = cluster.ask("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600")
        with at_work(lab) as work:
            until(lambda: work.shows("for Slurm to accept its job: Slurm temporarily unable to accept job"))
            cluster.ask("scancel", other)  # Slurm forgets it within a minute
            assert work.outcome() == "ran"
    assert attempts(lab, "raw") == ["succeeded"]


def test_a_job_that_slurm_rejects_fails_at_once(lab: Lab) -> None:
    lab.edit("configs/execution/lab.yaml", "{type: slurm}", "{type: slurm, options: [--partition=nowhere]}")
    with at_work(lab) as work:
        assert "Slurm rejects the job of lab/raw: invalid partition specified: nowhere" in str(work.failure())


@pytest.mark.nightly
def test_the_report_of_a_job_that_ended_well_is_waited_for(lab: Lab, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.edit("configs/execution/lab.yaml", "retries: 1", "retries: 0")
    lab.edit("configs/execution/lab.yaml", "{type: slurm}", "{type: slurm, setup: [exit 0]}")
    with at_work(lab) as work:
        until(lambda: cluster.ask("squeue", "--noheader", "--me", "--states=COMPLETED", "--name=lab/raw"))
        (scratch,) = lab.root.glob(".pedigree/scratch/*")
        handle = lab.launcher.find(scratch)
        until(lambda: handle and lab.launcher.poll(handle).state == "running")
        monkeypatch.setattr(slurm, "SILENCE_S", 0.0)
        failed = work.failure()
    assert failed.cause == "crashed" and "exited with code 0 and left no result" in failed.message


def test_a_user_sees_where_a_job_waits_and_runs_and_follows_its_log(lab: Lab, cluster: Cluster) -> None:
    lab.knobs(raw={"hold": "go"})
    type_ = InProcessCommand(lab)
    with at_work(lab) as work:
        with cluster.drained():
            until(lambda: work.shows("in Slurm's queue as job "))
            number = cluster.job("lab/raw", "%A")
            assert f"queued           in Slurm's queue as job {number}" in type_("jobs")
            assert type_("logs", "raw").startswith(f"lab/raw waits in Slurm's queue as job {number}")
        until(waits(lab).exists)
        until(lambda: f"Slurm job {number} on n" in type_("jobs"))  # what Slurm said is remembered for two seconds
        (lab.root / "go").touch()
        assert type_("logs", "-f", "raw") == "step 1/1  rows 5\n"
        assert work.outcome() == "ran"
    assert type_("jobs") == "no job is running\n"


@pytest.mark.nightly
@pytest.mark.parametrize("allowed", [False, True])
def test_a_job_that_an_administrator_requeues_ends_well(lab: Lab, cluster: Cluster, allowed: bool) -> None:
    lab.knobs(raw={"hold": "go"})
    with at_work(lab) as work:
        until(waits(lab).exists)
        number = cluster.job("lab/raw", "%A")
        if allowed:
            cluster.ask("scontrol", "update", f"jobid={number}", "requeue=1")
        cluster.ask("scontrol", "requeue", number)
        (lab.root / "go").touch()
        if allowed:
            until(lambda: cluster.job("lab/raw", "%T") == "PENDING")
            cluster.ask("scontrol", "update", f"jobid={number}", "starttime=now")
        assert work.outcome() == "ran"
    assert attempts(lab, "raw") == ["succeeded"]


@pytest.mark.nightly
def test_a_job_that_nears_its_time_limit_writes_a_checkpoint_and_goes_on(lab: Lab) -> None:
    lab.knobs(raw={"seconds": 60})  # the shortest limit is a minute
    lab.edit("configs/execution/lab.yaml", "{type: slurm}, grace_s: 20", "{type: slurm, options: [--time=1]}, grace_s: 40")
    run = lab.run()
    run.watch = lambda event: lab.knobs() if isinstance(event, StageWaiting) and "SIGTERM" in event.detail else None
    ensure(run, run.graph.find("raw"))
    first, second = read(lab, "raw", "run.json")["attempts"]
    assert first["cause"] == "preempted" and second["cause"] == "succeeded" and second["resumed_from"]


def test_a_job_that_somebody_cancels_is_not_started_again_and_jobs_of_others_are_left_alone(lab: Lab, cluster: Cluster) -> None:
    foreign = cluster.ask("sbatch", "--parsable", "--job-name=lab/raw", "--output=/dev/null", "--wrap=sleep 600")
    stranger = Handle(launcher="slurm", scratch=str(lab.root), attempt=1, told={"token": "(null)"})  # as squeue shows no comment
    assert lab.launcher.poll(stranger).state == "unknown" and lab.launcher.cancel(stranger) == []
    lab.knobs(raw={"seconds": 60})
    thread = InThread(run_graph, lab.run())
    until(lambda: "raw" in lab.runs(), alive=thread.alive)
    cluster.ask("scancel", *until(lambda: {*cluster.job("lab/raw", "%A").split()} - {foreign}))
    (failed,) = [end for end in thread.join() if isinstance(end, StageFailed)]
    assert failed.cause == "cancelled" and failed.message.startswith("the job was canceled in Slurm; its checkpoints are kept (job ")
    assert lab.runs().count("raw") == 1
    assert foreign in cluster.ask("squeue", "--noheader", "--me", "--format=%A").split()
    lab.knobs()
    assert outcomes(lab)["raw"] == "ran"


def test_ranks_run_on_two_nodes_of_one_allocation(lab: Lab, cluster: Cluster) -> None:
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.edit("configs/execution/lab.yaml", "threads: 1", "threads: 1, world_size: 2, nodes: 2")
    assert outcomes(lab)["sft"] == "ran" and lab.runs().count("sft") == 2
    assert "lab/sft 2" in cluster.ask("squeue", "--noheader", "--me", "--states=all", "--format=%j %D").splitlines()


@pytest.mark.nightly
def test_a_training_whose_step_is_canceled_resumes(lab: Lab, cluster: Cluster) -> None:
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.edit("configs/execution/lab.yaml", "threads: 1", "threads: 1, world_size: 2, nodes: 2")
    lab.knobs(sft={"seconds": 300})
    thread = InThread(run_graph, lab.run())
    until(lambda: running_scratch(lab, "sft"), 180, alive=thread.alive)
    lab.knobs()
    cluster.ask("scancel", f"{cluster.job('lab/sft', '%A')}.0")
    thread.join(180)
    assert attempts(lab, "sft")[-1] == "succeeded" and len(attempts(lab, "sft")) == 2
