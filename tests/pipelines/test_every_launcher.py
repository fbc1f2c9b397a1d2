"""What happens to jobs, whoever starts them: another launcher joins with a `Site`."""

import os
import re
import signal
from pathlib import Path

import pytest
from commands import Command
from running_lab import Lab, read, running_scratch
from sites import Here, InKubernetes, InRay, InSlurm, Site, at_work, waits
from waiting import deadline, until

from pedigree.pipelines.jobs import kubernetes_launcher, ray_launcher, slurm
from pedigree.pipelines.jobs.live import live_jobs
from pedigree.pipelines.jobs.processes import processes_of

pytestmark = pytest.mark.slow


@pytest.fixture(params=["slurm", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("local", "kubernetes", "ray"))])
def site(request: pytest.FixtureRequest) -> Site:
    if request.param == "kubernetes":
        return InKubernetes(request.getfixturevalue("kubernetes"))
    if request.param == "ray":  # whose start alone takes 25 s of processor time
        return InRay(request.getfixturevalue("ray"))
    return Here() if request.param == "local" else InSlurm(request.getfixturevalue("cluster"))


@pytest.fixture
def lab(tmp_path: Path, site: Site) -> Lab:
    lab = Lab(tmp_path, processes=True)
    lab.edit("configs/execution/lab.yaml", "slots: 1,", f"slots: 1, launcher: {site.launcher}, grace_s: 20,")
    return lab


def test_a_job_that_starts_and_ends_while_no_run_watches_is_taken(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"hold": "go"})
    with site.busy(), at_work(lab) as first:
        until(lambda: first.shows("queue") or waits(lab).exists())
        first.leave()
    (lab.root / "go").touch()
    until(lambda: list(lab.root.glob(".pedigree/scratch/*/done.json")))
    with at_work(lab) as second:
        assert second.outcome() == "attached"
    assert lab.runs() == ["raw"]


def test_a_run_that_was_killed_finds_its_job_again(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"hold": "go"})
    command = Command(lab).until("run", "lab", ready=waits(lab).exists)
    command.kill()
    command.communicate()
    assert ("lab/raw", False) in [(job.address, job.elsewhere) for job in live_jobs(lab.project)]
    with at_work(lab) as work:
        until(lambda: any(job.address == "lab/raw" and job.holder for job in live_jobs(lab.project)))
        (lab.root / "go").touch()
        assert work.outcome() == "attached"
    assert lab.runs().count("raw") == 1


def test_a_killed_job_resumes_from_its_checkpoint_without_waiting_for_a_report(
    lab: Lab, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for launcher in (slurm, ray_launcher, kubernetes_launcher):
        monkeypatch.setattr(launcher, "SILENCE_S", float("inf"))
    lab.knobs(raw={"seconds": 300})
    with at_work(lab) as work:
        scratch = until(lambda: running_scratch(lab, "raw"))
        lab.knobs()
        for pid in processes_of(scratch):
            os.kill(pid, signal.SIGKILL)
        assert work.outcome() == "ran"
    first, second = read(lab, "raw", "run.json")["attempts"]
    assert first["cause"] == "crashed" and second["cause"] == "succeeded" and second["resumed_from"]


def test_the_job_of_a_lost_node_resumes_elsewhere_and_what_goes_on_there_stops_itself(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"seconds": 300})
    with at_work(lab) as work:
        until(lambda: running_scratch(lab, "raw"))
        lab.knobs()
        with site.lost_node(lab):
            assert work.outcome() == "ran"
            until(lambda: not Command(lab).jobs())
    first, second = read(lab, "raw", "run.json")["attempts"]
    assert first["cause"] in ("lost", "crashed") and second["cause"] == "succeeded" and second["resumed_from"]


def test_a_job_ends_while_its_scheduler_is_away(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"hold": "go"})
    with at_work(lab) as work:
        until(waits(lab).exists)
        with site.without_scheduler(lab):
            (lab.root / "go").touch()
            assert work.outcome() == "ran"
    assert lab.runs() == ["raw"]


@pytest.mark.nightly
def test_a_job_goes_on_while_its_scheduler_restarts(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"hold": "go"})
    with at_work(lab) as work:
        until(waits(lab).exists)
        with site.without_scheduler(lab):
            pass
        (lab.root / "go").touch()
        assert work.outcome() == "ran"
    assert lab.runs() == ["raw"]


@pytest.mark.nightly
def test_a_job_goes_on_where_no_further_one_starts(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"hold": "go"})
    with at_work(lab) as work:
        until(waits(lab).exists)
        with site.busy():
            (lab.root / "go").touch()
            assert work.outcome() == "ran"
    assert lab.runs() == ["raw"]


@pytest.mark.nightly
def test_a_preempted_job_resumes(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"seconds": 300})
    with at_work(lab) as work:
        until(lambda: running_scratch(lab, "raw"))
        lab.knobs()
        site.preempt()
        assert work.outcome() == "ran"
    first, second = read(lab, "raw", "run.json")["attempts"]
    assert first["cause"] == "preempted" and second["cause"] == "succeeded" and second["resumed_from"]


@pytest.mark.nightly
def test_a_hung_job_is_ended_and_says_where_it_stood(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"seconds": 600, "silent": True})
    seconds = round(deadline(8))
    lab.edit("configs/execution/lab.yaml", "retries: 1, heartbeat_timeout_s: 120", f"retries: 0, heartbeat_timeout_s: {seconds}")
    with at_work(lab) as work:
        assert re.search(rf"no heartbeat for \d+ s .* allows {seconds}\b", str(work.failure()))
    scratch = running_scratch(lab, "raw")
    assert scratch and not Command(lab).jobs()
    alone = (scratch / "log.txt").read_text().partition("Stack (most recent call first):")[2].partition("Thread 0x")[0]
    assert 'prepare_data/run.py", line' in alone


@pytest.mark.nightly
def test_a_job_that_runs_out_of_memory_says_so(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"errors": ["memory"]})
    with at_work(lab) as work:
        failed = work.failure()
    assert failed.cause == "out_of_memory" and "nothing is left to shrink" in failed.message
