"""Jobs of a real Ray cluster of two nodes on this machine."""

from pathlib import Path

import pytest
from commands import Command
from ray_cluster import Cluster
from running_lab import RANKS, Lab, outcomes, read
from sites import at_work
from waiting import until

from pedigree.pipelines.jobs.live import live_jobs

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # the start of Ray alone takes 25 s of processor time
DONE = dict.fromkeys(("suite", "raw", "clean", "cleaner"), "ran")


@pytest.fixture
def lab(tmp_path: Path, ray: Cluster) -> Lab:
    """All its stages but one are jobs of Ray."""
    lab = Lab(tmp_path, processes=True)
    profile = lab.root / "configs" / "execution" / "lab.yaml"
    lab.edit("configs/execution/lab.yaml", "slots: 1,", f"slots: 1, launcher: {{type: ray, address: '{ray.address}'}}, grace_s: 20,")
    profile.write_text(profile.read_text() + "stages: {suite: {placement: {launcher: {type: local}}}}\n")
    return lab


def test_a_recipe_runs_in_ray_and_beside_it_and_leaves_the_same_bytes(lab: Lab, ray: Cluster, tmp_path: Path) -> None:
    assert outcomes(lab) == DONE
    assert ray.jobs() == dict.fromkeys(("lab/raw", "lab/clean", "lab/cleaner"), "SUCCEEDED")
    assert "launcher" not in read(lab, "raw", "run.json")["placement"]
    local = Lab(tmp_path / "local", processes=True)
    assert outcomes(local) == DONE
    for stage in DONE:
        assert read(local, stage, "record.json")["content"] == read(lab, stage, "record.json")["content"]


def test_what_ray_could_never_start_is_refused_before_the_run(lab: Lab, ray: Cluster) -> None:
    lab.edit("configs/execution/lab.yaml", "\nslots: 2", "\nslots: 9")
    lab.edit("configs/execution/lab.yaml", "slots: 1, launcher", "slots: 9, launcher")
    before = ray.jobs()
    said = Command(lab)("run", "lab", code=2)
    assert f"lab: stages raw, clean, cleaner: the Ray cluster at {ray.address} has 0 of 1 nodes with {{CPU: 9}}: lower" in said
    assert not lab.runs() and ray.jobs() == before


def test_a_queued_job_has_no_deadline_outlasts_a_silent_ray_and_is_canceled(lab: Lab, ray: Cluster) -> None:
    lab.edit("configs/execution/lab.yaml", "heartbeat_timeout_s: 120", "heartbeat_timeout_s: 1, timeout_s: 1")
    with ray.busy() as foreign, at_work(lab) as work:
        until(lambda: work.shows("in Ray's queue as job ") and work.shows(" (NO_RESOURCES)"))
        (queued,) = live_jobs(lab.project)
        assert queued.handle and not queued.elsewhere
        with ray.away():
            until(lambda: work.shows(f"for Ray to answer at {ray.address}"))
        until(lambda: work.shows("in Ray's queue as job "))
        work.stop()
        assert ray.jobs()["lab/raw"] == "STOPPED" and not lab.runs()
        assert all(ray.jobs()[name] == "RUNNING" for name in foreign)


def test_a_job_that_somebody_stops_is_not_started_again_writes_a_checkpoint_and_resumes(lab: Lab, ray: Cluster) -> None:
    lab.knobs(raw={"seconds": 60})
    with at_work(lab) as work:
        until(lab.runs)
        (job,) = live_jobs(lab.project)
        assert job.handle
        ray.stop_job(job.handle.token)
        failed = work.failure()
    assert failed.cause == "cancelled" and failed.message.startswith(f"job {job.handle.token} was stopped in Ray; its checkpoints are kept")
    assert lab.runs() == ["raw"]
    lab.knobs()
    with at_work(lab) as work:
        assert work.outcome() == "ran"
    assert read(lab, "raw", "run.json")["attempts"][-1]["resumed_from"]


def test_ranks_run_on_two_nodes(lab: Lab) -> None:
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.edit("configs/execution/lab.yaml", "threads: 1", "threads: 1, world_size: 2, nodes: 2")
    assert outcomes(lab)["sft"] == "ran" and lab.runs().count("sft") == 2
