"""Plan of a run: stale stages and the reasons, resource estimates, batches. Loads no engine and makes no network call."""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.base.work import Amount
from pedigree.configs.language.execution import Execution, Numerics
from pedigree.configs.language.graph import Graph, Node, shown_name
from pedigree.data.host.machine import has_bf16_units
from pedigree.pipelines.estimate.amounts import count_of
from pedigree.pipelines.estimate.estimates import Estimate, Estimates
from pedigree.pipelines.estimate.machines import this_cpu, this_memory
from pedigree.pipelines.estimate.memory import GIB
from pedigree.pipelines.estimate.rates import Rates, known
from pedigree.pipelines.estimate.schedule import TimeLeft, outlook
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.lineage.ancestry import opened
from pedigree.pipelines.quantities import counted, duration, rough, size
from pedigree.pipelines.run.plans import Plan, restorable

State = Literal["up to date", "in the remote", "cached", "will run", "depends"]
SETTLED: tuple[State, ...] = ("up to date", "in the remote")
"""States that need no work."""
JOBLESS: tuple[State, ...] = (*SETTLED, "cached")
"""States that need no job."""
NAMED = 3
"""Maximum number of stages named in a reason."""
OUTPUT = re.compile(r"output (\S+) (.+)")
HOW_ESTIMATED = (
    "Disk is estimated from a stage's last artifact, else (for models) the size of its weights, else the mean of artifacts of its "
    "kind; `?` means unknown. Checkpoints use disk while a stage trains. DVC's cache doubles the disk usage unless the file system "
    "supports reflinks (Btrfs, XFS)."
)
HOW_NEEDED = "Memory is the peak per rank. `~`: estimate, `<`: upper bound, `?`: unknown. Formulas and their errors are in docs/plan.md."
SHORT_S = 60.0
"""Shorter stages without a model are left out of the table."""
LONG_S = 3600.0
"""A CPU plan longer than this suggests faster hardware."""
UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""Threshold, divisor and suffix of each unit."""
MARKS = {"counted": "", "estimated": "~", "at most": "<"}


@dataclass(frozen=True)
class PlanRow:
    """One stage of a plan."""

    node: Node
    shown: str
    state: State
    reasons: tuple[str, ...]
    why: str
    """The reasons on one line."""
    disk: int | None
    """Estimated artifact size in bytes; 0 if the stage is up to date, None if unknown."""
    batch: str
    """Composition of a training stage's global batch."""
    estimate: Estimate


@dataclass
class Sizes:
    """Artifact size estimates, based on existing artifacts."""

    project: Project
    graph: Graph
    estimates: Estimates
    _known: dict[str, int | None] = field(default_factory=dict)

    def of(self, node: Node) -> int | None:
        if node.address not in self._known:
            self._known[node.address] = self._estimate(node)
        return self._known[node.address]

    def _estimate(self, node: Node) -> int | None:
        own = self._measured(node)
        if own is not None:
            return own
        if node.output in MODELS:
            weights = self.estimates.of(node).artifact
            if weights is not None:
                return weights
            bases = [base for edge in node.edges if (base := self.graph.nodes[edge.source]).output in MODELS]
            sizes = [size for base in bases if (size := self.of(base)) is not None]
            if sizes:
                return max(sizes)
        alike = [self._measured(other) for other in self.graph.nodes.values() if other.kind == node.kind]
        measured = [size for size in alike if size is not None]
        return sum(measured) // len(measured) if measured else None

    def _measured(self, node: Node) -> int | None:
        artifact = opened(self.project, node)
        return sum(entry.size for entry in artifact.record.files) if artifact else None


def rows_of(
    run: RunContext, planned: Collection[Plan], forced: Collection[str] = (), rates: Callable[[], Rates | None] = known
) -> list[PlanRow]:
    """Return one row per planned stage, in order. `rates` returns the speed of this machine's cores, for CPU time estimates."""
    estimates = Estimates(run.project, run.graph, run.execution, rates)
    sizes = Sizes(run.project, run.graph, estimates)
    stale = {entry.node.address for entry in planned if entry.reasons}
    cached = restorable(run, planned, forced)
    return [_row(run, entry, stale, cached, sizes) for entry in planned]


def disk_total(rows: Collection[PlanRow]) -> tuple[int, int]:
    """Return (estimated bytes of new artifacts, excluding DVC's cache; number of stages without an estimate)."""
    return sum(row.disk or 0 for row in rows), sum(row.disk is None for row in rows)


def needs_cells(row: PlanRow) -> tuple[str, ...] | None:
    """Return (memory per rank with its share of the limit, tokens, steps, time, GPU-hours, checkpoints); None for stages without a job
    and for short stages without estimates."""
    estimate = row.estimate
    short = estimate.time is None or estimate.time.seconds < SHORT_S
    if row.state in JOBLESS or (estimate.facts is None and short and not estimate.unknown):
        return None
    time = f"~{duration(estimate.time.seconds)}" if estimate.time else "?"  # the speed is an estimate
    hours = f"~{estimate.gpu_hours:.2f}" if estimate.gpu_hours is not None and estimate.gpus else "?" if estimate.gpus else ""
    checkpoints = size(estimate.scratch) if estimate.scratch else ""
    return memory_text(estimate), _amount(estimate.amounts.tokens), _amount(estimate.amounts.steps), time, hours, checkpoints


def memory_text(estimate: Estimate) -> str:
    """Format ranks, peak memory per rank and its share of the limit: `8 x 41.2 GB, 48 %`."""
    if estimate.needs is None or not estimate.needs.device:
        return "?" if estimate.unknown else ""
    bound, ranks = estimate.hardware.bytes_per_rank, estimate.needs.ranks
    share = f", {100 * estimate.needs.peak / bound:.0f} %" if bound else ""
    return f"{ranks} x {size(estimate.needs.peak)}{share}" if ranks > 1 else f"{size(estimate.needs.peak)}{share}"


def _amount(amount: Amount | None) -> str:
    if amount is None:
        return ""
    value = float(f"{amount.value:.3g}")  # round first: 999,600 is 1M in three digits
    for least, unit, letter in UNITS:
        if value >= least:
            return f"{MARKS[amount.how]}{value / unit:.3g}{letter}"
    return f"{MARKS[amount.how]}{amount.value:.0f}"


def beforehand(run: RunContext, rows: Collection[PlanRow]) -> TimeLeft:
    """Estimate the wall time of the jobs to run, with jobs in parallel where slots allow."""
    times = {address: row.estimate.time for address, row in with_jobs(rows).items()}
    return outlook(run.graph, run.execution, times)


def with_jobs(rows: Collection[PlanRow]) -> dict[str, PlanRow]:
    """Address → row of each stage that needs a job."""
    return {row.node.address: row for row in rows if row.state not in JOBLESS}


def time_text(found: TimeLeft, device: str) -> str:
    """Format a time estimate: `about 14 minutes on this machine, estimated from ...`."""
    where = " on this machine" if device == "cpu" else ""
    how = f", estimated from {found.how}" if found.how else ""
    others = f", plus {counted(found.unknown, 'stage')} with no time estimate" if found.unknown else ""
    return f"{rough(found.seconds)}{where}{how}{others}"


def machine_text(execution: Execution) -> str:
    """Format a CPU profile's use of this machine: `2 cores, 22.9 GiB: 2 slots, 2 threads per job`; a stage kind may differ."""
    _, cores = this_cpu()
    memory = this_memory()
    numerics, placement = execution.numerics, execution.placement
    shown = f"{counted(cores, 'core')}, {memory / GIB:.1f} GiB" if memory else counted(cores, "core")
    taken = f", {counted(placement.slots, 'slot')} per job" if placement.slots != execution.slots else ""
    ranks = f"{numerics.world_size} x " if numerics.world_size > 1 else ""
    return f"{shown}: {counted(execution.slots, 'slot')}, {ranks}{counted(numerics.threads, 'thread')} per job{taken}"


def slow_text(found: TimeLeft, device: str) -> str:
    """Suggest faster hardware if a CPU run takes long; else empty."""
    if device != "cpu" or found.seconds < LONG_S:
        return ""
    units = "" if has_bf16_units() else "bf16 units (AMX, AVX512-BF16) or "
    return (
        f"This is slow on a CPU. More cores help; {units}a GPU (`--execution gpu`) {'help' if units else 'helps'} most. "
        f"{command('run', 'tiny')} runs the whole pipeline in minutes."
    )


def totals(rows: Collection[PlanRow]) -> tuple[float, float, int]:
    """Return (total job seconds, run sequentially; GPU-hours; number of stages without a time estimate)."""
    due = [row.estimate for row in rows if row.state not in JOBLESS]
    seconds = sum(estimate.time.seconds for estimate in due if estimate.time)
    hours = sum(estimate.gpu_hours or 0 for estimate in due)
    return seconds, hours, sum(estimate.time is None for estimate in due)


def notes(rows: Collection[PlanRow]) -> list[str]:
    """Return notes on stages with unknown model shapes, and on request chunks that fit only if prompts are short."""
    found = []
    for row in rows:
        if row.state in JOBLESS:
            continue
        if row.estimate.unknown:
            found.append(f"{row.shown}: memory and time are unknown: {row.estimate.unknown}")
        engine = row.estimate.needs.engine if row.estimate.needs else None
        if engine is not None and engine.room is not None and engine.least_cache <= engine.room < engine.cache:
            found.append(
                f"{row.shown}: with prompts of maximum length, a chunk of requests needs {size(engine.cache)} of KV cache, but only "
                f"{size(engine.room)} are available; the stage fails in that case"
            )
    return found


def misfits(rows: Collection[PlanRow]) -> list[str]:
    """Return the stages to run that do not fit into memory, with the reasons."""
    return [f"{row.shown}: {row.estimate.misfit}" for row in rows if row.state not in JOBLESS and row.estimate.misfit]


def batch_text(node: Node, numerics: Numerics, rows: int | None) -> str:
    """Describe how ranks and passes make up a training step's batch; empty for stages that do not train."""
    plan, ranks = node.declaration.training_plan(node.config), numerics.world_size
    if plan is None:
        return ""
    batch = f"{plan.batch} {plan.unit} per step"
    if plan.made_of:
        return f"{plan.made_of} = {batch}, {plan.steps} steps, {_ranks(ranks)}"
    if numerics.packing:
        passes = f"{_ranks(ranks)}, packed to {numerics.micro_batch_tokens} tokens per pass"
    else:
        accumulation = math.ceil(plan.batch / (ranks * numerics.micro_batch_sequences))
        passes = f"{_ranks(ranks)} x {numerics.micro_batch_sequences} {plan.unit} x {accumulation} passes"
    steps = f", {math.ceil(rows / plan.batch) * plan.epochs} steps" if rows and plan.examples == 1 else ""
    return f"{batch}: {passes}{steps}"


def why(reasons: Sequence[str], recipe: str) -> str:
    """Join reasons on one line, without the recipe prefix and with equal reasons of an artifact's parts merged."""
    by_state: dict[str, list[str]] = {}
    others = []
    for reason in (reason.replace(f"{recipe}/", "") for reason in reasons):
        match = OUTPUT.fullmatch(reason)
        if match:
            by_state.setdefault(match[2], []).append(match[1])
        else:
            others.append(_shortened(reason))
    merged = [f"its artifact {state}" if len(parts) > 2 else f"{', '.join(parts)} {state}" for state, parts in by_state.items()]
    return "; ".join([*others, *merged])


def _shortened(reason: str) -> str:
    """Shorten a long list of awaited stages; the JSON output has the full list."""
    stages = reason.removeprefix("waits for ").split(", ")
    if not reason.startswith("waits for ") or len(stages) <= NAMED + 1:
        return reason
    return f"waits for {', '.join(stages[:NAMED])} and {len(stages) - NAMED} more"


def _row(run: RunContext, entry: Plan, stale: Collection[str], cached: Collection[str], sizes: Sizes) -> PlanRow:
    node = entry.node
    state: State = "in the remote" if entry.remote else "up to date"
    if entry.reasons:
        state = "depends" if any(parent in stale for parent in node.parents) else "will run"
    if node.address in cached:
        state = "cached"
    numerics, _ = run.execution.of(node.kind, node.name)
    return PlanRow(
        node=node,
        shown=shown_name(run.graph, node),
        state=state,
        reasons=entry.reasons,
        why=why(entry.reasons, run.graph.recipe),
        disk=0 if not entry.reasons else sizes.of(node),
        batch=batch_text(node, numerics, _training_rows(run.project, run.graph, node)),
        estimate=sizes.estimates.of(node),
    )


def _training_rows(project: Project, graph: Graph, node: Node) -> int | None:
    """Count training rows, before overlong rows are dropped; None until all the datasets are built."""
    total = 0
    for edge in node.edges:
        if edge.port in node.declaration.trains_on:
            artifact = opened(project, graph.nodes[edge.source])
            rows = count_of(artifact.record.metrics) if artifact else None
            if rows is None:
                return None
            total += rows
    return total


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
