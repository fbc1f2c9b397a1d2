"""Tables and texts of a plan."""

from collections.abc import Collection

from pedigree.configs.base.texts import command
from pedigree.configs.base.work import Amount
from pedigree.configs.language.execution import PARTS, Execution
from pedigree.configs.rows.source_models import FolderModel, HubModel, SourceModel
from pedigree.data.artifacts import assets
from pedigree.data.host.machine import has_bf16_units
from pedigree.data.sources.model_folders import own_template
from pedigree.pipelines.cli.console import echo, print_table
from pedigree.pipelines.estimate.estimates import Estimate
from pedigree.pipelines.estimate.facts import folder_of
from pedigree.pipelines.estimate.machines import this_cpu, this_memory
from pedigree.pipelines.estimate.peak_memory import GIB
from pedigree.pipelines.estimate.schedule import TimeLeft
from pedigree.pipelines.estimate.search import WORTH
from pedigree.pipelines.importing.description import flow
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.publish import comparison
from pedigree.pipelines.quantities import counted, duration, rough, size
from pedigree.pipelines.run.checks import all_done
from pedigree.pipelines.run.needed_assets import missing_assets
from pedigree.pipelines.run.pins import unpinned
from pedigree.pipelines.run.planning import JOBLESS, PlannedStage, RunPlan, refused

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
MARKS = {"counted": "", "estimated": "~", "at most": "<", "at least": ">"}


def print_plan(context: RunContext, recipe: str, plan: RunPlan, chosen: Collection[str]) -> None:
    """Print the stages of a plan with what they need, its sums, and the published figures of the work that the recipe replicates."""
    _print_stages(context, recipe, plan)
    _print_published(context, plan)
    if found := unpinned(context.graph, chosen):
        echo(f"\nNot pinned yet: {', '.join(repo.name for repo in found)}.")
        echo(f"Run {command('pin', context.graph.source)} to write their newest commits into the recipe; `run` requires it.")
    due = {row.address for row in plan.stages if row.state in ("will run", "depends")}
    if lacking := dict.fromkeys(name for _, name, _ in missing_assets(context.graph, due, context.execution)):
        echo(f"\nNot on this machine yet: {', '.join(lacking)}. To fetch them, {assets.remedy(lacking)}; `run` requires it.")


def _print_stages(context: RunContext, recipe: str, plan: RunPlan) -> None:
    sizes = ("" if row.disk_bytes == 0 else "?" if row.disk_bytes is None else size(row.disk_bytes) for row in plan.stages)
    cells = [(row.shown, row.kind, row.state, row.why, disk) for row, disk in zip(plan.stages, sizes, strict=True)]
    print_table(("stage", "kind", "state", "why", "disk"), cells)
    needed = [(row.shown, *cells) for row in plan.stages if (cells := needs_cells(row))]
    for header, rows in (
        (("stage", "batch"), [(row.shown, row.batch) for row in plan.stages if row.batch]),
        (("stage", "memory", "tokens", "steps", "time", "GPU-hours", "checkpoints"), needed),
    ):
        if rows:
            echo()
            print_table(header, rows)
    echo()
    if not plan.to_run:
        for note in notes(plan.stages):
            echo(note)
        echo(all_done(len(plan.stages), sum(row.state == "in the remote" for row in plan.stages), recipe))
        return
    unknown = plan.disk.stages_of_unknown_size
    sized = [f"about {size(plan.disk.needed_bytes)}"] if len(plan.stages) > unknown else []
    guess = " and ".join([*sized, *([f"{counted(unknown, 'stage')} of unknown size"] if unknown else [])])
    cached = sum(row.state == "cached" for row in plan.stages)
    due = f"{plan.to_run} of {len(plan.stages)} stages to run{f', {cached} of them from the cache' if cached else ''}"
    echo(f"{due}. Disk: {guess}, excluding DVC's cache; {size(plan.disk.free_bytes)} free.")
    device, hours = context.execution.numerics.device, plan.time.gpu_hours
    if device == "cpu":
        echo(f"This machine: {machine_text(context.execution)}.")
    if plan.outlook.how:
        echo(f"Time: {time_text(plan.outlook, device)}{f'. GPU-hours: {hours:.2f}' if hours else ''}.")
        if slow := slow_text(plan.outlook, device):
            echo(slow)
    for note in [*replaced_templates(context, plan.stages), *notes(plan.stages)]:
        echo(note)
    if needed:
        echo(HOW_NEEDED)
    echo("A stage marked `depends` runs only if the content of an input changes.")
    echo(HOW_ESTIMATED)
    if not refused(plan.stages):
        echo(f"To run these stages, use {command('run', recipe)} with the same options.")


def _print_published(context: RunContext, plan: RunPlan) -> None:
    published, graph = plan.published, context.graph
    if published is None:
        return
    hours = comparison.hardware_cells(graph, {row.address: row.estimate.gpu_hours for row in plan.stages})
    if hours:
        echo()
        print_table(("stage", "published", "GPU-hours", "estimated"), hours)
    columns, scores = comparison.score_cells(graph)
    if scores:
        echo(f"\nPublished scores, in percent ({published.harness}):")
        print_table(columns, scores)
    for title, sentences in (("Differences from the original", published.differs), ("Not yet supported", published.lacks)):
        if sentences:
            echo("\n".join([f"\n{title}:", *(f"- {sentence}" for sentence in sentences)]))
    if published.sources:
        echo("\nThis recipe follows " + "; ".join(f"{source.title} ({source.url})" for source in published.sources) + ".")


def print_faster(plan: RunPlan) -> None:
    """Print faster settings as a profile's `stages`."""
    found = [(row.node.name, row.faster) for row in plan.stages if row.faster]
    if not any(row.estimate.hardware.device == "cuda" for row in plan.stages if row.state not in JOBLESS):
        echo("\nFaster settings are searched for GPUs, which no stage to run has: choose a profile with `--execution`, such as gpu8.")
        return
    if not found:
        echo(f"\nNo other settings would be faster by more than {100 * (1 - WORTH):.0f} %, by the estimate.")
        return
    echo("\nFaster settings, by the estimate; for the profile:\n\nstages:")
    for name, faster in found:
        settings = {part: dict(each) for part in PARTS if (each := getattr(faster, part))}
        share = "fits" if faster.time_share is None else f"{100 * faster.time_share:.0f} % of the time"
        echo(f"  {name}: {flow(settings)} # {share}, {size(faster.peak_bytes)} of each GPU")


def needs_cells(row: PlannedStage) -> tuple[str, ...] | None:
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
    units = "" if has_bf16_units() else "bf16 units (such as AMX) or "
    return (
        f"This is slow on a CPU. More cores help; {units}a GPU (`--execution gpu`) {'help' if units else 'helps'} most. "
        f"{command('run', 'tiny')} runs the whole pipeline in minutes."
    )


def replaced_templates(context: RunContext, rows: Collection[PlannedStage]) -> list[str]:
    """Return a note on each imported model whose own chat template is replaced."""
    found = []
    for row in rows:
        config = row.node.config
        if isinstance(config, SourceModel) and config.replaces:
            folder = folder_of(context.project, config.source) if isinstance(config.source, FolderModel | HubModel) else None
            known = folder is None or own_template(folder)
            if known or (folder is not None and not folder.is_dir()):
                found.append(
                    f"{row.shown}: {config.chat_template} replaces the model's own chat template{'' if known else ', if it has one'}"
                )
    return found


def notes(rows: Collection[PlannedStage]) -> list[str]:
    """Return notes on stages with unknown model shapes, and on request chunks that fit only if prompts are short."""
    found = []
    for row in rows:
        found += [f"{row.shown}: {warning}" for warning in row.warnings]
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
