"""What happens to jobs, whoever starts them: another launcher joins with a `Site`."""

from pathlib import Path

import pytest
from commands import Command
from running_lab import Lab, read, running_scratch
from sites import Here, InKubernetes, InSlurm, Site, at_work, waits
from waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(params=["slurm", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("local", "kubernetes"))])
def site(request: pytest.FixtureRequest) -> Site:
    if request.param == "kubernetes":
        return InKubernetes(request.getfixturevalue("kubernetes"))
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
def test_a_job_that_runs_out_of_memory_says_so(lab: Lab, site: Site) -> None:
    lab.knobs(raw={"errors": ["memory"]})
    with at_work(lab) as work:
        failed = work.failure()
    assert failed.cause == "out_of_memory" and "nothing is left to shrink" in failed.message
