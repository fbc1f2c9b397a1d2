"""Estimate the wall time of a run, where independent stages run in parallel while their slots fit."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.graph import Graph
from pedigree.pipelines.estimate.estimates import Estimates, Time


@dataclass(frozen=True)
class Task:
    """An unfinished stage."""

    seconds: float
    slots: int = 1
    parents: Collection[str] = ()


def makespan(tasks: Mapping[str, Task], slots: int) -> float:
    """Seconds until all tasks end.

    As in a run, each starts as soon as its parents have ended and its slots are free, in the order of the mapping.
    """
    waiting, free, now = dict(tasks), slots, 0.0
    running: list[tuple[float, str]] = []
    while waiting or running:
        unfinished = waiting.keys() | {name for _, name in running}
        for name, task in list(waiting.items()):
            needed = min(task.slots, slots)
            if needed <= free and unfinished.isdisjoint(task.parents):
                del waiting[name]
                free -= needed
                heapq.heappush(running, (now + task.seconds, name))
        assert running, "stages of a recipe wait for each other"
        now, ended = heapq.heappop(running)
        free += min(tasks[ended].slots, slots)
    return now


@dataclass(frozen=True)
class TimeLeft:
    """Estimate of the rest of a run."""

    seconds: float
    unknown: int = 0
    """Stages with no time estimate, not included in `seconds`."""
    how: str = ""
    """Basis of the largest part of the estimate."""


def outlook(graph: Graph, execution: Execution, times: Mapping[str, Time | None], left: Mapping[str, float] | None = None) -> TimeLeft:
    """Estimate for the unfinished stages, from the times of whole stages, and the remaining seconds of running ones where known."""
    tasks, shares, left = dict[str, Task](), defaultdict[str, float](float), left or {}
    for address, node in graph.nodes.items():
        if address in times:
            time = times[address]
            seconds = left.get(address, time.seconds if time else 0.0)
            if time is not None:
                shares[time.how] += seconds
            slots = execution.of(node.kind, node.name)[1].slots
            tasks[address] = Task(seconds, slots, [parent for parent in node.parents if parent in times])
    unknown = sum(time is None and address not in left for address, time in times.items())
    return TimeLeft(makespan(tasks, execution.slots), unknown, max(shares, key=lambda how: shares[how], default=""))


class Forecast:
    """Remaining time of a run, updated with the speed and row counts of stages that have ended."""

    def __init__(self, project: Project, graph: Graph, execution: Execution) -> None:
        self._run = project, graph, execution
        self._ended: frozenset[str] | None = None
        self._estimates = Estimates(project, graph, execution)

    def left(self, ended: frozenset[str], due: Collection[str], left: Callable[[str, float | None], float | None]) -> TimeLeft:
        """Estimate for the stages that are due. `left`: (address, seconds of the whole stage) → remaining seconds, None if unknown."""
        project, graph, execution = self._run
        if ended != self._ended:
            self._ended, self._estimates = ended, Estimates(project, graph, execution)
        times = {address: self._estimates.of(graph.nodes[address]).time for address in due}
        found = {address: left(address, time.seconds if time else None) for address, time in times.items()}
        return outlook(graph, execution, times, {address: seconds for address, seconds in found.items() if seconds is not None})
