"""Jobs in the queue of a real Slurm of two nodes on this machine."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_lab import RANKS, Lab, outcomes, read, running_scratch
from slurm_cluster import NODES, Cluster
from waiting import deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.jobs.events import StageWaiting
from pedigree.pipelines.jobs.live import live_jobs
from pedigree.pipelines.jobs.scratch_state import attempts_here
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import run_graph

pytestmark = pytest.mark.slow
DONE = dict.fromkeys(("suite", "raw", "clean", "cleaner"), "ran")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(shared: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name, value in shared.environment.items():
        monkeypatch.setenv(name, value)
    yield shared
    shared.ask("scancel", "--me")
    until(lambda: not shared.ask("squeue", "--noheader", "--me"))


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
    assert outcomes(lab) == DONE
    ran = sorted(cluster.ask("squeue", "--noheader", "--me", "--states=all", "--format=%j %T").splitlines())
    assert ran == ["lab/clean COMPLETED", "lab/cleaner COMPLETED", "lab/raw COMPLETED"]
    assert "launcher" not in read(lab, "raw", "run.json")["placement"]
    local = Lab(tmp_path / "local", processes=True)
    assert outcomes(local) == DONE
    for stage in DONE:
        assert read(local, stage, "record.json")["content"] == read(lab, stage, "record.json")["content"]
