"""What a run would do and need: stale stages and the reasons, resource estimates, batches. Loads no engine and makes no network call."""

import math
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import PlainSerializer

from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.project import Project
from pedigree.configs.base.published import Published
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.methods.training import REPORTED_SHARE
from pedigree.data.store.untrusted import ArtifactError
from pedigree.pipelines.estimate.amounts import count_of, longer_share
from pedigree.pipelines.estimate.estimates import Estimate, Estimates, document_of
from pedigree.pipelines.estimate.rates import Rates, known
from pedigree.pipelines.estimate.schedule import TimeLeft, outlook
from pedigree.pipelines.estimate.search import Faster, faster
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.json_documents import ONE_WORD, Hidden, Opaque, rounded
from pedigree.pipelines.lineage.ancestry import opened
from pedigree.pipelines.quantities import counted
from pedigree.pipelines.run.foreseen import hints, must_fail, of_stages
from pedigree.pipelines.run.plans import Plan, StageSummary, restorable

SETTLED: tuple[str, ...] = ("up to date", "in the remote")
"""States that need no work."""
JOBLESS: tuple[str, ...] = (*SETTLED, "cached")
"""States that need no job."""


@dataclass(frozen=True)
class PlannedStage(StageSummary):
    """A stage of a plan."""

    state: Annotated[Literal["up to date", "in the remote", "cached", "will run", "depends"], ONE_WORD]
    """`cached`: will be restored; `depends`: on a stage that will run."""
    disk_bytes: int | None
    """Estimated size of its artifact; 0 if it is up to date, null if unknown."""
    batch: str | None
    """How ranks and passes make up the global batch of a stage that trains."""
    problems: tuple[str, ...]
    """Why it cannot succeed, with remedies; if there are any, the exit code is 1."""
    warnings: tuple[str, ...]
    """Rows that it would drop for their length, a global batch larger than its data, what is not known yet; of a finished stage, the notes
    in its record."""
    estimate: Annotated[Estimate, Opaque(), PlainSerializer(document_of)]
    """`parameters`, `memory` (if a model is involved, unless `unknown` gives the reason), `amounts` (`rows`, `document_tokens`, `steps`,
    `tokens`: null, or `value` and `how`: `counted`, `estimated`, `at_most`), `time`, `gpus`, `gpu_hours`, `checkpoint_bytes`, `misfit` (the
    shortfall and `remedies`, or null). `memory`: `per_rank`, `loading` and, of `rlvr` on GPUs, `rollouts` (term → bytes), `peak_bytes`,
    `bound_bytes`, `ranks`, `host_bytes_per_rank`, `tokens_a_pass`; `engine` of stages with vLLM: `ranks`, `weights`, `overhead`,
    `kv_cache`, `least_kv_cache`, `share_bytes`, `room_for_kv_cache`. Formulas: [plan.md](plan.md)."""
    faster: Faster | None = None
    """With `--faster`: the settings under which it would finish first; null if the profile's are as good."""


@dataclass(frozen=True)
class PlannedDisk:
    """Disk that a run needs."""

    needed_bytes: int
    """Of artifacts; without reflinks, DVC's cache takes the same again."""
    stages_of_unknown_size: int
    free_bytes: int


@dataclass(frozen=True)
class PlannedTime:
    """Time that the jobs of a run need."""

    seconds: Annotated[float, rounded(1)]
    """One after another."""
    wall_seconds: Annotated[float, rounded(1)]
    """With as much parallelism as the slots allow."""
    gpu_hours: Annotated[float, rounded(3)]
    stages_of_unknown_time: int


@dataclass(frozen=True)
class RunPlan:
    """What a run would do and need."""

    stages: tuple[PlannedStage, ...]
    to_run: int
    """Number of stages that are neither `up_to_date` nor `in_the_remote`."""
    disk: PlannedDisk
    time: PlannedTime
    slots: int
    """Of the profile on this machine: how many stages can run in parallel."""
    fits: bool
    """Whether every stage to run fits the memory of the profile's machine; otherwise the exit code is 1."""
    published: Published | None
    """The recipe's account of the work it follows: `sources`, `harness`, `scores`, `hardware`, `differs`, `lacks`."""
    outlook: Hidden[TimeLeft]


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
    run: RunContext,
    planned: Collection[Plan],
    forced: Collection[str] = (),
    rates: Callable[[], Rates | None] = known,
    search: bool = False,
) -> list[PlannedStage]:
    """Return one row per planned stage, in order. `rates` returns the speed of this machine's cores, for CPU time estimates; `search`: with
    faster settings of the stages to run."""
    stale = {entry.node.address for entry in planned if entry.reasons}
    estimates = Estimates(run.project, run.graph, run.execution, rates, stale)
    sizes = Sizes(run.project, run.graph, estimates)
    cached = restorable(run, planned, forced)
    rows = [_row(run, entry, stale, cached, sizes) for entry in planned]
    return [replace(row, faster=faster(estimates, row.node)) if row.state not in JOBLESS else row for row in rows] if search else rows


def run_plan(run: RunContext, rows: Sequence[PlannedStage]) -> RunPlan:
    """Sum up the stages of a plan."""
    due = [row.estimate for row in rows if row.state not in JOBLESS]
    left = beforehand(run, rows)
    return RunPlan(
        stages=tuple(rows),
        to_run=sum(row.state not in SETTLED for row in rows),
        disk=PlannedDisk(
            needed_bytes=sum(row.disk_bytes or 0 for row in rows),
            stages_of_unknown_size=sum(row.disk_bytes is None for row in rows),
            free_bytes=shutil.disk_usage(run.project.root).free,
        ),
        time=PlannedTime(
            seconds=sum(estimate.time.seconds for estimate in due if estimate.time),
            wall_seconds=left.seconds,
            gpu_hours=sum(estimate.gpu_hours or 0 for estimate in due),
            stages_of_unknown_time=sum(estimate.time is None for estimate in due),
        ),
        slots=run.execution.slots,
        fits=not any(map(_misfits, rows)),
        published=run.graph.published,
        outlook=left,
    )


def beforehand(run: RunContext, rows: Collection[PlannedStage]) -> TimeLeft:
    """Estimate the wall time of the jobs to run, with jobs in parallel where slots allow."""
    times = {address: row.estimate.time for address, row in with_jobs(rows).items()}
    return outlook(run.graph, run.execution, times)


def with_jobs(rows: Collection[PlannedStage]) -> dict[str, PlannedStage]:
    """Address → row of each stage that needs a job."""
    return {row.node.address: row for row in rows if row.state not in JOBLESS}


def refused(rows: Collection[PlannedStage]) -> list[str]:
    """Return the stages to run that cannot succeed or do not fit into memory, with the reasons; `run` refuses them."""
    return [
        *(f"cannot succeed: {text}" for text in of_stages((row.shown, problem) for row in rows for problem in row.problems)),
        *(f"does not fit: {row.shown}: {row.estimate.misfit}" for row in rows if _misfits(row)),
    ]


def _misfits(row: PlannedStage) -> bool:
    return row.state not in JOBLESS and row.estimate.misfit is not None


def batch_text(node: Node, numerics: Numerics, rows: int | None) -> str:
    """Describe how ranks and passes make up a training step's batch; empty for stages that do not train."""
    plan, ranks = node.declaration.training_plan(node.config), counted(numerics.world_size, "rank")
    if plan is None:
        return ""
    batch = f"{plan.batch} {plan.unit} per step"
    if plan.made_of:
        return f"{plan.made_of} = {batch}, {plan.steps} steps, {ranks}"
    if numerics.packing:
        ranks += f", {numerics.sequence_parallel} to a row" if numerics.sequence_parallel > 1 else ""
        passes = f"{ranks}, packed to {numerics.micro_batch_tokens} tokens per pass"
    else:
        accumulation = math.ceil(plan.batch / (numerics.world_size * numerics.micro_batch_sequences))
        passes = f"{ranks} x {numerics.micro_batch_sequences} {plan.unit} x {accumulation} passes"
    steps = f", {plan.steps_for(rows)} steps" if rows and plan.examples == 1 else ""
    return f"{batch}: {passes}{steps}"


def _row(run: RunContext, entry: Plan, stale: Collection[str], cached: Collection[str], sizes: Sizes) -> PlannedStage:
    node = entry.node
    state = "in the remote" if entry.remote else "up to date"
    if entry.reasons:
        state = "depends" if any(parent in stale for parent in node.parents) else "will run"
    if node.address in cached:
        state = "cached"
    numerics, _ = run.execution.of(node.kind, node.name)
    return PlannedStage.of(
        run.graph,
        entry,
        state,
        disk_bytes=0 if not entry.reasons else sizes.of(node),
        batch=batch_text(node, numerics, _training_rows(run.project, run.graph, node)) or None,
        problems=() if state in JOBLESS else tuple(must_fail(run, node, sizes.estimates)),
        warnings=_warnings(run, node, state, sizes.estimates),
        estimate=sizes.estimates.of(node),
    )


def _warnings(run: RunContext, node: Node, state: str, estimates: Estimates) -> tuple[str, ...]:
    if state in JOBLESS:
        artifact = opened(run.project, node)
        return artifact.record.marks if artifact else ()
    found, rows = [*hints(node, estimates)], estimates.of(node).amounts.rows
    limit = next((name for name in ("max_prompt_length", "max_length") if hasattr(node.config, name)), None)
    if limit and node.declaration.trains and getattr(node.config, "too_long", "drop") == "drop":
        given = [opened(run.project, run.graph.nodes[edge.source]) for edge in node.edges if edge.port in node.declaration.trains_on]
        with suppress(ArtifactError, OSError):
            share = longer_share(filter(None, given), getattr(node.config, limit))
            if share >= REPORTED_SHARE:
                longest = getattr(node.config, limit)
                fails = ", and the stage will fail" if share >= getattr(node.config, "refuse_dropped", 1) else ""
                found.append(f"about {share:.0%} of its rows are longer than {limit} {longest} and will be dropped{fails}")
    plan = node.declaration.training_plan(node.config)
    if plan and plan.batch_of == "global_batch" and rows and rows.how != "estimated" and rows.value * plan.examples < plan.batch:
        found.append(f"global_batch {plan.batch} exceeds its {rows.value:.0f} rows, so that an epoch is one step")
    return tuple(found)


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
