"""What a run would do, and why, before the first GPU second: stale stages, disk, batches. Loads no engine and no network."""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from configs.base.project import Project
from configs.base.texts import command
from configs.base.work import Amount
from configs.language.execution import Execution, Numerics
from configs.language.graph import Graph, Node, shown_name
from configs.methods.preference import Kto
from configs.methods.training import PreferenceTrain, Rlvr, Training
from data.host.machine import has_bf16_units
from pipelines.estimate.amounts import count_of
from pipelines.estimate.estimates import Estimate, Estimates
from pipelines.estimate.machines import this_cpu, this_memory
from pipelines.estimate.memory import GIB
from pipelines.estimate.rates import Rates, known
from pipelines.estimate.schedule import Outlook, outlook
from pipelines.jobs.context import RunContext
from pipelines.lineage.ancestry import opened
from pipelines.quantities import counted, duration, rough, size
from pipelines.run import runs

State = Literal["up to date", "in the remote", "cached", "will run", "depends"]
SETTLED: tuple[State, ...] = ("up to date", "in the remote")
"""Nothing is to be done about a stage in one of these states."""
JOBLESS: tuple[State, ...] = (*SETTLED, "cached")
"""No job runs of a stage in one of these states."""
NAMED = 3
"""Stages that a reason names where there are more."""
OUTPUT = re.compile(r"output (\S+) (.+)")
MODELS = ("policy", "reward_model")
ROW_UNITS = {"sft": "sequences", "reward_model": "pairs", "preference_train": "pairs"}
HOW_ESTIMATED = (
    "Disk: a stage is taken to need what it needed last time, else (models) its weights, else the mean of artifacts of its kind; `?` "
    "where nothing is known. Checkpoints lie there while a stage trains. DVC's cache takes as much again, unless the file system has "
    "reflinks (Btrfs, XFS): there both share their blocks."
)
HOW_NEEDED = (
    "Memory: the peak of one rank. `~` is estimated, `<` an upper bound, `?` unknown; docs/plan.md has the formulas and their error."
)
SHORT_S = 60.0
"""Stages without a model that take less have no line of their own."""
LONG_S = 3600.0
"""From which time on a plan on a CPU says what would help."""
UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From which amount on one is told in a unit."""
MARKS = {"counted": "", "estimated": "~", "at most": "<"}


@dataclass(frozen=True)
class PlanRow:
    """One stage of a plan."""

    node: Node
    shown: str
    state: State
    reasons: tuple[str, ...]
    why: str
    """The reasons in one line."""
    disk: int | None
    """Estimated bytes of its artifact; 0 where it is up to date; None where nothing is known."""
    batch: str
    """How a training stage's global batch is made up."""
    estimate: Estimate


@dataclass
class Sizes:
    """Estimates of artifact sizes, from those that exist."""

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
            bases = [edge.source for edge in node.edges if edge.port in ("policy", "policies", "candidates")]
            sizes = [size for size in (self.of(self.graph.nodes[base]) for base in bases) if size is not None]
            if sizes:
                return max(sizes)
        alike = [self._measured(other) for other in self.graph.nodes.values() if other.kind == node.kind]
        measured = [size for size in alike if size is not None]
        return sum(measured) // len(measured) if measured else None

    def _measured(self, node: Node) -> int | None:
        artifact = opened(self.project, node)
        return sum(entry.size for entry in artifact.record.files) if artifact else None


def plan(
    run: RunContext, selection: Collection[str] | None = None, forced: Collection[str] = (), rates: Callable[[], Rates | None] = known
) -> list[PlanRow]:
    """One row per selected stage, in order. `rates`: of this machine's cores, for times on a CPU."""
    estimates = Estimates(run.project, run.graph, run.execution, rates)
    sizes = Sizes(run.project, run.graph, estimates)
    planned = runs.plan(run, selection, forced)
    stale = {entry.node.address for entry in planned if entry.reasons}
    cached = runs.restorable(run, planned, forced)
    return [_row(run, entry, stale, cached, sizes) for entry in planned]


def disk_total(rows: Collection[PlanRow]) -> tuple[int, int]:
    """(bytes that new artifacts are estimated to need, without their copies in DVC's cache; number of stages without an estimate)."""
    return sum(row.disk or 0 for row in rows), sum(row.disk is None for row in rows)


def needs_cells(row: PlanRow) -> tuple[str, ...] | None:
    """(memory of a rank with its share of the bound, tokens, steps, time, GPU-hours, checkpoints) of a stage whose job runs; None where
    there is nothing to say."""
    estimate = row.estimate
    short = estimate.time is None or estimate.time.seconds < SHORT_S
    if row.state in JOBLESS or (estimate.facts is None and short and not estimate.unknown):
        return None
    time = f"~{duration(estimate.time.seconds)}" if estimate.time else "?"  # no bound, also where the tokens are one: the speed is none
    hours = f"~{estimate.gpu_hours:.2f}" if estimate.gpu_hours is not None and estimate.gpus else "?" if estimate.gpus else ""
    checkpoints = size(estimate.scratch) if estimate.scratch else ""
    return memory_text(estimate), _amount(estimate.amounts.tokens), _amount(estimate.amounts.steps), time, hours, checkpoints


def memory_text(estimate: Estimate) -> str:
    """`8 x 41.2 GB, 48 %`: ranks, the peak of one, and its share of what there is."""
    if estimate.needs is None or not estimate.needs.device:
        return "?" if estimate.unknown else ""
    bound, ranks = estimate.hardware.bytes_per_rank, estimate.needs.ranks
    share = f", {100 * estimate.needs.peak / bound:.0f} %" if bound else ""
    return f"{ranks} x {size(estimate.needs.peak)}{share}" if ranks > 1 else f"{size(estimate.needs.peak)}{share}"


def _amount(amount: Amount | None) -> str:
    if amount is None:
        return ""
    value = float(f"{amount.value:.3g}")  # first, as 999,600 is a million in three figures
    for least, unit, letter in UNITS:
        if value >= least:
            return f"{MARKS[amount.how]}{value / unit:.3g}{letter}"
    return f"{MARKS[amount.how]}{amount.value:.0f}"


def beforehand(run: RunContext, rows: Collection[PlanRow]) -> Outlook:
    """How long the jobs take that will run, those side by side that have room."""
    times = {address: row.estimate.time for address, row in with_jobs(rows).items()}
    return outlook(run.graph, run.execution, times)


def with_jobs(rows: Collection[PlanRow]) -> dict[str, PlanRow]:
    """Address → row of the stages whose jobs will run."""
    return {row.node.address: row for row in rows if row.state not in JOBLESS}


def time_text(found: Outlook, device: str) -> str:
    """`about 14 minutes on this machine, estimated from ...`."""
    where = " on this machine" if device == "cpu" else ""
    how = f", estimated from {found.how}" if found.how else ""
    others = f", plus {counted(found.unknown, 'stage')} whose time is unknown" if found.unknown else ""
    return f"{rough(found.seconds)}{where}{how}{others}"


def machine_text(execution: Execution) -> str:
    """What a profile for CPUs takes of this machine: `2 cores, 22.9 GiB: 2 slots, 2 threads a job`; kinds may have others."""
    _, cores = this_cpu()
    memory = this_memory()
    numerics, placement = execution.numerics, execution.placement
    shown = f"{counted(cores, 'core')}, {memory / GIB:.1f} GiB" if memory else counted(cores, "core")
    taken = f", which take {counted(placement.slots, 'slot')}" if placement.slots != execution.slots else ""
    ranks = f"{numerics.world_size} x " if numerics.world_size > 1 else ""
    return f"{shown}: {counted(execution.slots, 'slot')}, {ranks}{counted(numerics.threads, 'thread')} a job{taken}"


def slow_text(found: Outlook, device: str) -> str:
    """What helps where a CPU takes long; empty where it does not."""
    if device != "cpu" or found.seconds < LONG_S:
        return ""
    units = "" if has_bf16_units() else "bf16 units (AMX, AVX512-BF16) or "
    return (
        f"This is slow on a CPU. More cores help; {units}a GPU (`--execution gpu`) {'help' if units else 'helps'} most. "
        f"{command('run', 'tiny')} goes through the whole chain in minutes."
    )


def totals(rows: Collection[PlanRow]) -> tuple[float, float, int]:
    """(seconds of stages whose jobs run, one after another; their GPU-hours; how many have no estimate of their time)."""
    due = [row.estimate for row in rows if row.state not in JOBLESS]
    seconds = sum(estimate.time.seconds for estimate in due if estimate.time)
    hours = sum(estimate.gpu_hours or 0 for estimate in due)
    return seconds, hours, sum(estimate.time is None for estimate in due)


def notes(rows: Collection[PlanRow]) -> list[str]:
    """What the tables do not say: shapes that are unknown, and chunks of requests that fit only if prompts are short."""
    found = []
    for row in rows:
        if row.state in JOBLESS:
            continue
        if row.estimate.unknown:
            found.append(f"{row.shown}: memory and time are unknown: {row.estimate.unknown}")
        engine = row.estimate.needs.engine if row.estimate.needs else None
        if engine is not None and engine.room is not None and engine.least_cache <= engine.room < engine.cache:
            found.append(
                f"{row.shown}: with prompts as long as they may be, a chunk of requests needs {size(engine.cache)} of KV cache, and there "
                f"are {size(engine.room)}: it is refused then"
            )
    return found


def misfits(rows: Collection[PlanRow]) -> list[str]:
    """What cannot fit, of the stages whose jobs would run."""
    return [f"{row.shown}: {row.estimate.misfit}" for row in rows if row.state not in JOBLESS and row.estimate.misfit]


def batch_text(node: Node, numerics: Numerics, rows: int | None) -> str:
    """How many rows a step takes and how ranks and passes make them up; empty for stages that do not train."""
    config, ranks = node.config, numerics.world_size
    if isinstance(config, Rlvr):
        answers = config.prompts_per_step * config.samples_per_prompt
        made = f"{config.prompts_per_step} prompts x {config.samples_per_prompt} answers = {answers} rollouts a step"
        return f"{made}, {config.steps} steps, {_ranks(ranks)}"
    if not isinstance(config, Training):
        return ""
    unit = ROW_UNITS.get(node.kind, "rows")
    if isinstance(config, PreferenceTrain) and isinstance(config.loss, Kto):
        unit, rows = "answers", None  # of which a preference gives one or two
    if numerics.packing:
        passes = f"packed to {numerics.micro_batch_tokens} tokens a pass"
    else:
        accumulation = math.ceil(config.global_batch / (ranks * numerics.micro_batch_sequences))
        passes = f"{_ranks(ranks)} x {numerics.micro_batch_sequences} {unit} x {accumulation} passes"
    steps = f", {math.ceil(rows / config.global_batch) * config.epochs} steps" if rows else ""
    return f"{config.global_batch} {unit} a step: {passes if not numerics.packing else f'{_ranks(ranks)}, {passes}'}{steps}"


def why(reasons: Sequence[str], recipe: str) -> str:
    """Reasons in one line: stages of the recipe by name, and what all parts of an artifact have in common once."""
    by_state: dict[str, list[str]] = {}
    others = []
    for reason in (reason.replace(f"{recipe}/", "") for reason in reasons):
        match = OUTPUT.fullmatch(reason)
        if match:
            by_state.setdefault(match[2], []).append(match[1])
        else:
            others.append(_shortened(reason))
    said = [f"its artifact {state}" if len(parts) > 2 else f"{', '.join(parts)} {state}" for state, parts in by_state.items()]
    return "; ".join([*others, *said])


def _shortened(reason: str) -> str:
    """A long list of stages that another one waits for, with the first ones named; the whole of it is in the JSON form."""
    stages = reason.removeprefix("waits for ").split(", ")
    if not reason.startswith("waits for ") or len(stages) <= NAMED + 1:
        return reason
    return f"waits for {', '.join(stages[:NAMED])} and {len(stages) - NAMED} more"


def _row(run: RunContext, entry: runs.Plan, stale: Collection[str], cached: Collection[str], sizes: Sizes) -> PlanRow:
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
    """Rows that reach the trainer (before those too long are dropped); None while one of the sets is not built."""
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
