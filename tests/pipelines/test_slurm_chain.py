"""`tiny` in the queue of a Slurm whose jobs, nodes, controller and user's commands die."""

import random
from pathlib import Path

import chaos as disturbing
import pytest
from chaos import Run, chaos, pause
from slurm_cluster import Cluster
from waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def test_tiny_has_the_bytes_of_local_jobs_whatever_is_killed(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_node(run: Run, rng: random.Random) -> Run:
        node = until(lambda: cluster.ask("squeue", "--noheader", "--me", "--states=RUNNING", "--format=%N").partition("\n")[0])
        with cluster.lost_node(node):
            until(lambda: cluster.ask("squeue", "--noheader", "--me", "--states=NODE_FAIL", f"--nodelist={node}"))
        return run

    def restart_the_controller(run: Run, rng: random.Random) -> Run:
        with cluster.without_controller():
            pause(rng, 1.0, 8.0)
        return run

    for name, change in {"node lost": lose_a_node, "controller restarted": restart_the_controller}.items():
        monkeypatch.setitem(disturbing.CHANGES, name, change)
    planned = [*(f"instant: {name}" for name in disturbing.VICTIMS), "change: node lost", "change: controller restarted"] * 2
    tally = chaos(tmp_path, planned, 1, None, None, print, "{type: slurm}")
    print("\n".join(tally.lines()))
    assert not tally.different
