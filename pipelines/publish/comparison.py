"""Compare published GPU-hours with estimates, and published scores with measured ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pedigree.configs.base.published import Expected
from pedigree.configs.language.graph import Graph, Node


@dataclass(frozen=True)
class Comparison:
    """A published score and the recipe's measured one."""

    task: str
    stage: str
    expected: float
    """Percent."""
    tolerance: float
    """Points."""
    metric: str
    measured: float | None
    """Percent, same metric; None until an evaluation reports it."""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        off = self.measured - self.expected
        return "as published" if abs(off) <= self.tolerance else "above" if off > 0 else "below"


def node_of(graph: Graph, stage: str) -> Node | None:
    """The recipe's stage of that name, its own or imported from another recipe; None if there is none."""
    own = graph.nodes.get(f"{graph.recipe}/{stage}")
    return own or next((node for node in graph.nodes.values() if node.name == stage), None)


def hardware_cells(graph: Graph, estimated: Mapping[str, float | None]) -> list[tuple[str, str, str, str]]:
    """(stage, published hardware and hours, published GPU-hours, estimated GPU-hours) of each stage with published hardware.

    `estimated`: address → GPU-hours of a stage under the profile; None or missing if unknown.
    """
    cells = []
    for stage, hardware in (graph.published.hardware if graph.published else {}).items():
        node = node_of(graph, stage)
        if node is not None:
            hours = estimated.get(node.address)
            took = f"{hardware.gpus} {hardware.gpu}, {hardware.hours:g} h"
            cells.append((stage, took, f"{hardware.gpu_hours:.0f}", f"{hours:.0f}" if hours is not None else "?"))
    return cells


def score_cells(graph: Graph) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(columns, rows) of the published scores: one row per task, one column per stage."""
    published = graph.published
    if published is None or not published.scores:
        return (), []
    named = dict.fromkeys(stage for expected in published.scores.values() for stage in expected.of)
    stages = [stage for stage in named if node_of(graph, stage)]
    rows = []
    for task, expected in published.scores.items():
        scores = (f"{expected.of[stage]:g}" if stage in expected.of else "" for stage in stages)
        rows.append((task, expected.metric, sample_counts(expected), *scores, f"±{expected.tolerance:g}"))
    return ("task", "metric", "items", *stages, "tolerance"), rows


def sample_counts(expected: Expected) -> str:
    """`164 x 20`: number of items, times the answers per item if more than one."""
    return f"{expected.items} x {expected.samples}" if expected.samples > 1 else str(expected.items)


def comparisons(graph: Graph, scores: Mapping[str, Mapping[str, Any]]) -> Iterator[Comparison]:
    """Pair every published score with the measured one. `scores`: evaluation → its `payload/scores.json`."""
    for task, expected in (graph.published.scores if graph.published else {}).items():
        for stage, score in expected.of.items():
            node = node_of(graph, stage)
            if node is not None:
                measured = _measured(scores, task, expected.metric, {stage, node.address})
                yield Comparison(task, stage, score, expected.tolerance, expected.metric, measured)


def _measured(scores: Mapping[str, Mapping[str, Any]], task: str, metric: str, labels: set[str]) -> float | None:
    for table in scores.values():
        for label, policy in table.get("policies", {}).items():
            found = policy.get("metrics", {}).get(task, {}).get(metric) if label in labels else None
            if found is not None:
                return 100 * found["mean"]
    return None
