"""Compare estimates of finished stages with measured values, under the settings of the run and ignoring its own measurements."""

import csv
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pedigree.configs.base.project import Project
from pedigree.configs.base.work import Amount
from pedigree.configs.language.execution import Execution, Numerics, Placement
from pedigree.configs.language.graph import Graph, Node
from pedigree.data.artifacts.artifacts import Run
from pedigree.data.store.untrusted import LIST_BYTES, ArtifactError, read_plain
from pedigree.pipelines.estimate.estimates import Estimate, Estimates, operations, run_of, run_seconds
from pedigree.pipelines.estimate.machines import gpu_named
from pedigree.pipelines.lineage.ancestry import opened

UNREADABLE = (ArtifactError, ArithmeticError, csv.Error, AttributeError, LookupError, TypeError, ValueError)
"""Errors from files in an unexpected format; artifacts may come from other projects."""


@dataclass(frozen=True)
class Outcome:
    """Planned and measured values of a stage that uses a model; None where unknown."""

    planned_bytes: int | None
    measured_bytes: int | None
    """Peak of rank 0: allocated on its GPU, or memory of its process."""
    planned_tokens: Amount | None
    measured_tokens: int | None
    planned_seconds: float | None
    measured_seconds: float | None
    mfu: float | None
    """Model FLOPs utilization of a training stage without rollouts, on GPUs (arXiv 2204.02311, app. B): the operations of the method,
    without recomputation, over those of the GPUs' peak in the time of its steps. Tokens of a shared prompt count once per answer."""


def outcomes_of(project: Project, graph: Graph, execution: Execution) -> dict[str, Outcome]:
    """Address → outcome, for finished stages that use a model, on the hardware of the profile."""
    estimates, found = Estimates(project, graph, execution), dict[str, Outcome | None]()
    for address, node in graph.nodes.items():
        with suppress(*UNREADABLE):  # skip only the unreadable stage
            found[address] = _outcome(project, node, estimates)
    return {address: outcome for address, outcome in found.items() if outcome is not None}


def _outcome(project: Project, node: Node, estimates: Estimates) -> Outcome | None:
    """Outcome of one stage; None if it has not run or uses no model."""
    run = run_of(project, node)
    if run is None:
        return None
    try:
        numerics, placement = Numerics.model_validate(run.numerics), Placement.model_validate(run.placement)
    except ValidationError:  # written by a version of Pedigree with other settings
        return None
    estimate = estimates.under(node, numerics, placement, new=True)
    if estimate.needs is None or not estimate.needs.device:
        return None
    tokens, speeds = _column(project, node, "tokens"), _column(project, node, "tokens_per_second")
    return Outcome(
        planned_bytes=estimate.needs.peak,
        measured_bytes=_measured_bytes(run, node, numerics),
        planned_tokens=estimate.amounts.tokens,
        measured_tokens=round(sum(tokens)) if tokens else None,
        planned_seconds=estimate.time.seconds if estimate.time else None,
        measured_seconds=run_seconds(run),
        mfu=mfu_of(run, estimate, numerics, tokens, speeds),
    )


def mfu_of(run: Run, estimate: Estimate, numerics: Numerics, tokens: Sequence[float], speeds: Sequence[float]) -> float | None:
    facts, amounts = estimate.facts, estimate.amounts
    peak = gpu_named(run.hardware.gpus[0])[1] if numerics.device == "cuda" and run.hardware.gpus else None
    if not facts or not facts.training or facts.sampling or not amounts.tokens or not peak or not peak.peak_tflops:
        return None
    if not tokens or not speeds or min(speeds) <= 0:
        return None
    seconds = sum(count / speed for count, speed in zip(tokens, speeds, strict=True))
    a_token = (operations(amounts, facts, checkpointing=False) or 0) / amounts.tokens.value
    return a_token * sum(tokens) / (seconds * numerics.world_size * peak.peak_tflops * 1e12)


def _measured_bytes(run: Run, node: Node, numerics: Numerics) -> int | None:
    """Peak memory comparable with the plan. On a CPU vLLM is a child process, which alone is planned except for `rlvr`."""
    peak = run.attempts[-1].peak if run.attempts else {}
    on_cpu = {"vllm": ("child",), "deepspeed+vllm": ("host", "child")}.get(node.declaration.engine, ("host",))
    names = ("gpu",) if numerics.device == "cuda" else on_cpu
    counted = [count for name in names if isinstance(count := peak.get(name), int)]
    return sum(counted) if counted else None


def curve_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a training curve; raises one of `UNREADABLE`."""
    return list(csv.DictReader(io.StringIO(read_plain(path, LIST_BYTES).decode())))


def _column(project: Project, node: Node, name: str) -> list[float]:
    """A column of the training curve; empty if it has none, or other values than finite numbers."""
    artifact = opened(project, node)
    try:
        found = [float(row[name]) for row in curve_rows(artifact.evidence / "curve.csv")] if artifact else []
        return found if all(map(math.isfinite, found)) else []
    except UNREADABLE:
        return []
