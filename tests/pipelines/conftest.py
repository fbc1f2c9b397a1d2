"""What the tests of the orchestrator share."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import kubernetes_cluster
import pytest
import ray_cluster
import typer.main
from in_process import in_process
from running_lab import Lab, outcomes
from slurm_cluster import Cluster
from waiting import until

from pedigree.pipelines.cli import main as cli
from pedigree.pipelines.jobs import kubernetes_launcher, ray_launcher


@pytest.fixture(scope="module", autouse=True)
def _jobs_may_run_in_this_process() -> Iterator[None]:
    with in_process():
        yield


@pytest.fixture(scope="session", autouse=True)
def _the_command_line_is_built_once() -> Iterator[None]:
    """Typer builds all commands anew at each call, which takes most of the time of a command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def _no_other_test_takes_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails may leave a job that holds some for ever."""
    monkeypatch.setenv("PEDIGREE_SLOTS", str(tmp_path / "slots"))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(_slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A Slurm of two nodes, without jobs."""
    for name, value in _slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield _slurm
    _slurm.ask("scancel", "--me")
    until(lambda: not _slurm.ask("squeue", "--noheader", "--me"))


@pytest.fixture(scope="module")  # it takes a core now and then while it lives
def _ray() -> Iterator[ray_cluster.Cluster]:
    cluster = ray_cluster.Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def ray(_ray: ray_cluster.Cluster) -> Iterator[ray_cluster.Cluster]:
    """A Ray of two nodes, without jobs."""
    yield _ray
    for job in _ray.ask("/api/jobs/"):
        if job["status"] in ray_launcher.ACTIVE:
            _ray.stop_job(job["submission_id"])
    until(lambda: not {"PENDING", "RUNNING"} & {*_ray.jobs().values()})


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kubernetes_cluster.Cluster]:
    """A cluster in memory that kubectl talks to."""
    cluster = kubernetes_cluster.Cluster(tmp_path)
    cluster.start()
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kubernetes_launcher, "ASK_S", 1.0)
    yield cluster
    cluster.clear()
    cluster.stop()


@pytest.fixture
def type_(lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Types a command in the lab: its exit code, what it prints, and what it prints as errors."""

    def typed(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(lab.root)
        monkeypatch.setattr(sys, "argv", ["pedigree", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return typed


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("finished"))
    with in_process():  # the first test of the session that asks for it makes it before its module's own fixtures
        assert outcomes(lab) == dict.fromkeys(("suite", "raw", "clean", "cleaner"), "ran")
    return lab


@pytest.fixture
def finished(template: Lab, tmp_path: Path) -> Lab:
    """A lab whose recipe has run."""
    return template.twin(tmp_path)
