"""Where jobs run, and what can happen to them there, for tests that hold for each launcher."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import pytest
from commands import Command
from kubernetes_cluster import Cluster as Kubernetes
from ray_cluster import SECOND
from ray_cluster import Cluster as Ray
from running_lab import Lab
from slurm_cluster import Cluster
from waiting import deadline, until

from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.run.ensure import Result, ensure


class Site(Protocol):
    launcher: str
    """As a profile has it."""

    def busy(self) -> AbstractContextManager[object]:
        """No further job starts meanwhile, and those that run go on."""
        ...

    def lost_node(self, lab: Lab) -> AbstractContextManager[object]:
        """The node of the lab's one job is lost meanwhile."""
        ...

    def without_scheduler(self, lab: Lab) -> AbstractContextManager[object]:
        """What starts jobs is away meanwhile, and those that run go on."""
        ...

    def preempt(self) -> None:
        """The one job that runs has to make way for another, which soon ends."""
        ...


class Here:
    launcher = "{type: local}"

    def busy(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def lost_node(self, lab: Lab) -> Iterator[None]:
        for pid in Command(lab).jobs():
            os.kill(pid, signal.SIGKILL)
        yield

    def without_scheduler(self, lab: Lab) -> AbstractContextManager[object]:
        pytest.skip("a run starts its jobs itself")

    def preempt(self) -> None:
        pytest.skip("nothing preempts a job of this machine")


class InSlurm:
    launcher = "{type: slurm}"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def busy(self) -> AbstractContextManager[object]:
        return self.cluster.drained()

    def lost_node(self, lab: Lab) -> AbstractContextManager[object]:
        return self.cluster.lost_node(self.cluster.job("lab/raw", "%N"))

    def without_scheduler(self, lab: Lab) -> AbstractContextManager[object]:
        token = self.cluster.job("lab/raw", "%k")
        until(lambda: self.cluster.has_saved(token))  # else the next one numbers a job like this one, which drains the node
        return self.cluster.without_controller()

    def preempt(self) -> None:
        self.cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


class InRay:
    """Jobs start on the second node: with the first, Ray would lose the process that leads a job. Ray has no time limits for jobs; that of
    the profile holds as elsewhere."""

    def __init__(self, cluster: Ray) -> None:
        self.cluster, self.launcher = cluster, f"{{type: ray, address: '{cluster.address}'}}"
        self._foreign = cluster.occupy_head()

    def busy(self) -> AbstractContextManager[object]:
        return self.cluster.busy()

    @contextmanager
    def lost_node(self, lab: Lab) -> Iterator[None]:
        self.cluster.kill(SECOND)
        for job in self._foreign:
            self.cluster.stop_job(job)
        try:
            yield
        finally:
            self.cluster.start_second()

    def without_scheduler(self, lab: Lab) -> AbstractContextManager[object]:
        return self.cluster.away()

    def preempt(self) -> None:
        pytest.skip("Ray preempts no job")


class InKubernetes:
    launcher = "{type: kubernetes, image: pedigree}"

    def __init__(self, cluster: Kubernetes) -> None:
        self.cluster = cluster

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.cluster.full = True
        try:
            yield
        finally:
            self.cluster.free()

    @contextmanager
    def lost_node(self, lab: Lab) -> Iterator[None]:
        self.cluster.disrupt("DeletionByTaintManager")
        yield

    def without_scheduler(self, lab: Lab) -> AbstractContextManager[object]:
        return self.cluster.away()

    def preempt(self) -> None:
        self.cluster.disrupt("PreemptionByScheduler")


class Work:
    """A run of the stage `raw` in a thread."""

    def __init__(self, lab: Lab) -> None:
        self.seen: list[str] = []
        """What it has shown."""
        self._run = lab.run(cancelled=threading.Event(), watch=lambda address, state, detail: self.seen.append(detail))
        self._ends: list[Result | Exception] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._ends.append(ensure(self._run, self._run.graph.find("raw")))
        except Exception as error:
            self._ends.append(error)

    def shows(self, text: str) -> bool:
        return bool(self.seen) and text in self.seen[-1]

    def leave(self) -> None:
        """The run ends, and its job goes on."""
        self._run.keep_jobs = True
        self.stop()

    def stop(self) -> None:
        self._run.cancelled.set()
        self._thread.join(deadline(120))

    def outcome(self) -> str:
        end = self._end()
        if isinstance(end, Exception):
            raise end
        return end.outcome

    def failure(self) -> StageFailed:
        end = self._end()
        if not isinstance(end, StageFailed):
            raise AssertionError(end) from (end if isinstance(end, Exception) else None)
        return end

    def _end(self) -> Result | Exception:
        self._thread.join(deadline(180))
        assert self._ends, self.seen
        return self._ends[0]


@contextmanager
def at_work(lab: Lab) -> Iterator[Work]:
    work = Work(lab)
    try:
        yield work
    finally:
        work.stop()


def waits(lab: Lab) -> Path:
    """The file that a job with the knob `hold: go` writes before it waits."""
    return lab.root / "go.waiting"
