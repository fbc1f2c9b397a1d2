"""What the smallest stage takes as a job of a scheduler, against a process of this machine.

    PYTHONPATH=tests:tests/pipelines python -m benchmarks.launchers [--beside TEXT]

Slurm and Ray have two nodes each, all on this machine, and nothing else to do. The launchers take turns. Kubernetes is missing: its tests
have no real cluster.
"""

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import ray_cluster
import slurm_cluster
from running_lab import PROFILE, Lab

from benchmarks.report import RUNS, Interval, Reading, Watch, described, write
from pedigree.pipelines.run.ensure import ensure

GOAL_S = 5.0
"""Most seconds that a scheduler may add."""


def seconds(lab: Lab, launcher: str) -> float:
    """From the decision that the stage is due to its commit."""
    lab.write("configs/execution/lab.yaml", PROFILE.replace("slots: 1,", f"slots: 1, launcher: {launcher},"))
    run = lab.run()
    began = time.perf_counter()
    ensure(run, run.graph.find("raw"), force=True)
    return time.perf_counter() - began


def measure(folder: Path, beside: str) -> None:
    with ExitStack() as stack:
        slurm, ray = slurm_cluster.Cluster(folder / "slurm"), ray_cluster.Cluster()
        slurm.folder.mkdir()
        for cluster in (slurm, ray):
            stack.callback(cluster.stop)
            cluster.start()
        os.environ.update(slurm.environment, PEDIGREE_SLOTS=str(folder / "slots"))
        launchers = {"here": "{type: local}", "Slurm": "{type: slurm}", "Ray": f"{{type: ray, address: '{ray.address}'}}"}
        versions = {"Slurm": slurm.ask("sinfo", "--version").split()[-1], "Ray": ray_cluster.PACKAGES[0].partition("==")[2]}
        lab, watch = Lab(folder / "lab", processes=True), Watch()
        taken: dict[str, list[float]] = {name: [] for name in launchers}
        for turn in range(RUNS + 1):
            for name, launcher in launchers.items():
                one = seconds(lab, launcher)
                if turn:  # the first fills caches
                    taken[name].append(one)
        write("launchers", [reading(name, versions[name], taken, beside) for name in versions], ("dvc",), watch.read())


def reading(name: str, version: str, taken: dict[str, list[float]], beside: str) -> Reading:
    over = described(Interval.of([there - here for there, here in zip(taken[name], taken["here"], strict=True)]))
    added = (
        f"adds {over['median']:g} [{over['low']:g}, {over['high']:g}] s, {'more' if over['high'] > GOAL_S else 'not more'} than {GOAL_S:g}"
    )
    text = (
        f"{name} {version} {added}; a stage without work, from the decision that it is due to its commit{beside and f'; beside {beside}'}"
    )
    return Reading(f"a stage in {name}, against a process here", taken[name], taken["here"], "s", False, None, {"text": text})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launchers")
    parser.add_argument("--beside", default="", help="what else runs on the machine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        measure(Path(folder), given.beside)


if __name__ == "__main__":
    main()
