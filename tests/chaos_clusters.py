"""Clusters whose jobs `tests/chaos.py` disturbs, and what happens in them to jobs, nodes and schedulers."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import slurm_cluster
from waiting import until


class Slurm:
    name = "slurm"
    """Of its launcher, and of its profile."""

    def __init__(self, folder: Path) -> None:
        (folder / "slurm").mkdir()
        self.cluster = slurm_cluster.Cluster(folder / "slurm")
        self.cluster.start()
        os.environ.update(self.cluster.environment)
        self.harms: dict[str, Callable[[random.Random], bool]] = {
            "job killed in Slurm": self.kill_a_job,
            "node drained": self.drain,
            "node lost": self.lose_a_node,
            "controller restarted": self.restart_the_controller,
        }
        """What may happen in it; each returns whether there was anything to harm."""

    def stop(self) -> None:
        self.cluster.ask("scancel", "--me")
        self.cluster.stop()

    def running(self, rng: random.Random) -> list[str]:
        """Number and node of a job that runs; nothing if there is none."""
        listed = self.cluster.ask("squeue", "--noheader", "--me", "--states=RUNNING", "--format=%A %N").splitlines()
        return rng.choice(listed).split() if listed else []

    def kill_a_job(self, rng: random.Random) -> bool:
        """The whole job, which counts as canceled, or its script alone."""
        if job := self.running(rng):
            self.cluster.ask("scancel", "--signal=KILL", *rng.choice([[], ["--batch"]]), job[0])
        return bool(job)

    def drain(self, rng: random.Random) -> bool:
        """A job's node, or all: the job goes on, or is killed and waits for another node."""
        if job := self.running(rng):
            with self.cluster.drained(*rng.choice([job[1:], slurm_cluster.NODES])):
                if rng.randrange(2):
                    self.cluster.ask("scancel", "--signal=KILL", "--batch", job[0])
                pause(rng)
        return bool(job)

    def lose_a_node(self, rng: random.Random) -> bool:
        if job := self.running(rng):
            with self.cluster.lost_node(job[1]):
                until(lambda: "down" in self.cluster.ask("sinfo", "--noheader", f"--nodes={job[1]}", "--format=%T"))
        return bool(job)

    def restart_the_controller(self, rng: random.Random) -> bool:
        with self.cluster.without_controller():
            pause(rng)
        return True


CLUSTERS = {"slurm": Slurm}


def pause(rng: random.Random) -> None:
    """What is harmed stays so for a random while."""
    time.sleep(rng.uniform(1.0, 8.0))  # nothing is waited for
