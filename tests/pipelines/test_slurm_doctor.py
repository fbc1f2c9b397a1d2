"""`pedigree doctor --execution PROFILE` finds what is wrong with a site, before a run does."""

from pathlib import Path

import pytest
from commands import InProcessCommand
from running_lab import Lab
from slurm_cluster import NODES, Cluster
from waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(tmp_path: Path, cluster: Cluster) -> Lab:
    lab = Lab(tmp_path)
    lab.edit("configs/execution/lab.yaml", "slots: 1,", "slots: 1, launcher: {type: slurm, options: [--time=5]},")
    return lab


def examined(lab: Lab, code: int) -> list[str]:
    return InProcessCommand(lab)("doctor", "--execution", "lab", code=code).splitlines()


def test_a_sound_site(lab: Lab, cluster: Cluster) -> None:
    lab.edit("configs/execution/lab.yaml", "slots: 2", "slots: 2\nkinds: {sft: {placement: {slots: 2}}}")
    version, stages, sft, node = examined(lab, 0)
    assert version.startswith("ok  Slurm") and all(line.startswith("ok  ") for line in (stages, sft, node))
    assert stages.endswith("--nodes=1 --ntasks-per-node=1 --cpus-per-task=1 --time=5") and "--cpus-per-task=2" in sft
    assert "node for stages, sft" in node and node.endswith("sees project, environment and cache; time limit 5:00")
    assert not cluster.ask("squeue", "--noheader", "--me") and not list(lab.project.private.glob("probe-*"))


@pytest.mark.parametrize(
    ("old", "new", "finding", "remedy"),
    [
        ("--time=5", "--partition=nowhere", "invalid partition specified: nowhere", "`sinfo` shows partitions"),
        ("--time=5", "--cpus-per-task=9", "Requested node configuration is not available (PartitionConfig)", "`sinfo` shows partitions"),
        ("slots: 1,", "slots: 1, grace_s: 300,", "its time limit is 5:00, and placement.grace_s 300 asks a job to stop", "raise --time"),
        ("[--time=5]", "[--time=5], setup: [module load cuda]", "module: command not found", "under the same paths"),
    ],
)
def test_what_a_profile_gets_wrong(lab: Lab, old: str, new: str, finding: str, remedy: str) -> None:
    lab.edit("configs/execution/lab.yaml", old, new)
    said = examined(lab, 1)
    (found,) = [number for number, line in enumerate(said) if line.startswith("!!")]
    assert finding in said[found] and remedy in said[found + 1]


def test_a_node_that_does_not_see_the_project_or_the_cache(lab: Lab, cluster: Cluster, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (lab.root / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {cache}\n")
    try:
        for hidden, finding in ((lab.root, "the project folder is probably not there"), (cache, "does not exist there")):
            for node in NODES:
                cluster.kill(node)
                cluster.start_node(node, without=hidden)
            until(cluster.is_idle)
            assert finding in "\n".join(examined(lab, 1))
    finally:
        for node in NODES:
            cluster.kill(node)
            cluster.start_node(node)
        until(cluster.is_idle)


@pytest.mark.nightly
def test_a_node_that_is_not_free_is_no_problem(lab: Lab, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pedigree.pipelines.cli.slurm_doctor.PROBE_S", 1.0)
    with cluster.drained():
        assert "waited in the queue" in "\n".join(examined(lab, 0))
    assert not cluster.ask("squeue", "--noheader", "--me")


@pytest.mark.nightly
def test_a_controller_that_is_away_and_programs_that_are_missing(lab: Lab, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster.without_controller():
        assert "Unable to contact slurm controller" in "\n".join(examined(lab, 1))
    lab.environment["PATH"] = "/nowhere"
    assert "sbatch, squeue, scancel, scontrol, srun not in PATH" in "\n".join(examined(lab, 1))
