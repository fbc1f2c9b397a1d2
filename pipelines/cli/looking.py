"""Inspection commands: plan, status, jobs, logs, report, doctor. None starts a job."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pedigree.configs.base.texts import command
from pedigree.pipelines.cli import completion
from pedigree.pipelines.cli.console import (
    AsJson,
    Force,
    From,
    Only,
    Overrides,
    Profile,
    Recipe,
    Until,
    echo,
    for_programs,
    print_table,
    project_here,
    requested,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pedigree.configs.language.graph import Graph
    from pedigree.pipelines.cli.plan import PlanRow
    from pedigree.pipelines.cli.status import StageStatus
    from pedigree.pipelines.jobs.context import RunContext

commands = typer.Typer()


@commands.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    only: Only = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    execution: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run would do, why, and what it needs.

    Lists stale stages with estimates of memory, tokens, time and disk. Exit code 1 if a stage does not fit into the memory of the
    profile's machine; `run` refuses such a stage.
    """
    from pedigree.pipelines.cli import plan as planning
    from pedigree.pipelines.cli.documents import plan_document
    from pedigree.pipelines.cli.status_line import StatusLine, measured_by
    from pedigree.pipelines.run.opening import open_run
    from pedigree.pipelines.run.plans import plan as planned
    from pedigree.pipelines.run.plans import selection

    request = requested(recipe, overrides, execution, only, start, until, force)
    with for_programs(as_json) as emit:
        project = project_here()
        with StatusLine() as telling:
            context = open_run(project, request, looking=True, watch=telling.watch)
            chosen, forced = selection(context, request)
            rows = planning.rows_of(context, planned(context, chosen, forced), forced, measured_by(telling))
        emit(plan_document(context, rows))
        if not as_json:
            _print_plan(context, recipe, rows)
            _print_published(context.graph, rows)
            _print_unpinned(context, chosen)
        missing = planning.misfits(rows)
        for line in missing:
            echo(f"does not fit: {line}", file=sys.stderr)
        if missing:
            raise typer.Exit(1)


def _print_plan(context: "RunContext", recipe: str, rows: "Sequence[PlanRow]") -> None:
    import shutil

    from pedigree.pipelines.cli import plan as planning
    from pedigree.pipelines.quantities import counted, size
    from pedigree.pipelines.run.checks import all_done

    cells = [
        (row.shown, row.node.kind, row.state, row.why, "" if row.disk == 0 else "?" if row.disk is None else size(row.disk))
        for row in rows
    ]  # fmt: skip
    print_table(("stage", "kind", "state", "why", "disk"), cells)
    batches = [(row.shown, row.batch) for row in rows if row.batch]
    if batches:
        echo()
        print_table(("stage", "batch"), batches)
    needed = [(row.shown, *cells) for row in rows if (cells := planning.needs_cells(row))]
    if needed:
        echo()
        print_table(("stage", "memory", "tokens", "steps", "time", "GPU-hours", "checkpoints"), needed)
    echo()
    stale = [row for row in rows if row.state not in planning.SETTLED]
    if not stale:
        echo(all_done(len(rows), sum(row.state == "in the remote" for row in rows), recipe))
        return
    known, unknown = planning.disk_total(rows)
    sized = [f"about {size(known)}"] if len(rows) > unknown else []
    guess = " and ".join([*sized, *([f"{counted(unknown, 'stage')} of unknown size"] if unknown else [])])
    free = size(shutil.disk_usage(context.project.root).free)
    echo(f"{len(stale)} of {len(rows)} stages to run. Disk: {guess}, excluding DVC's cache; {free} free.")
    device = context.execution.numerics.device
    if device == "cpu":
        echo(f"This machine: {planning.machine_text(context.execution)}.")
    found = planning.beforehand(context, rows)
    if found.how:
        _, hours, _ = planning.totals(rows)
        echo(f"Time: {planning.time_text(found, device)}{f'. GPU-hours: {hours:.2f}' if hours else ''}.")
        if slow := planning.slow_text(found, device):
            echo(slow)
    for note in planning.notes(rows):
        echo(note)
    if needed:
        echo(planning.HOW_NEEDED)
    echo("A stage marked `depends` runs only if the content of an input changes.")
    echo(planning.HOW_ESTIMATED)
    echo(f"To run these stages, use {command('run', recipe)} with the same options.")


def _print_published(graph: "Graph", rows: "Sequence[PlanRow]") -> None:
    """Print the published figures of the work that the recipe replicates, next to the estimates."""
    from pedigree.pipelines.publish import comparison

    published = graph.published
    if published is None:
        return
    hours = comparison.hardware_cells(graph, {row.node.address: row.estimate.gpu_hours for row in rows})
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


def _print_unpinned(context: "RunContext", chosen: "Collection[str]") -> None:
    from pedigree.pipelines.run.pins import unpinned

    found = unpinned(context.graph, chosen)
    if found:
        echo(f"\nNot pinned yet: {', '.join(repo.name for repo in found)}.")
        echo(f"Run {command('pin', context.graph.source)} to write their newest commits into the recipe; `run` requires it.")


@commands.command()
def status(recipe: Recipe, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show which stages are done, stale or running.

    Also lists results not committed to git, and code that changed since a result was produced.
    """
    from pedigree.pipelines.cli import status as state
    from pedigree.pipelines.cli.documents import status_document
    from pedigree.pipelines.cli.status_line import StatusLine
    from pedigree.pipelines.publish.commits import uncommitted
    from pedigree.pipelines.run.opening import open_run

    with for_programs(as_json) as emit:
        project = project_here()
        with StatusLine() as telling:
            context = open_run(project, requested(recipe, overrides), looking=True, watch=telling.watch)
            stages, dirty = state.stages(context), uncommitted(project, context.graph)
        emit(status_document(context, stages, dirty))
        if not as_json:
            _print_status(recipe, stages, dirty)


def _print_status(recipe: str, stages: "Sequence[StageStatus]", dirty: "Sequence[str]") -> None:
    print_table(("stage", "kind", "state", "why"), [(stage.shown, stage.node.kind, stage.words, stage.why) for stage in stages])
    drifted = [stage for stage in stages if stage.changed_code]
    for stage in drifted:
        echo(f"\n{stage.shown}: code changed since it was built: {', '.join(stage.changed_code)}")
    if drifted:
        echo("\nA code change alone does not make a stage stale. If results would change, raise the stage's `version` in")
        echo(f"its kind.py, or re-run with {command('run', recipe, '--on-code-change', 'rerun')}.")
    if dirty:
        echo(f"\nNot committed to git: {', '.join(dirty)}.")
        echo(f"{command('run', recipe, '--commit')} commits them, with ids and scores in the message.")
    if any(stage.state in ("stale", "not built") for stage in stages):
        echo(f"\n{command('plan', recipe)} shows what a run would do; {command('run', recipe)} does it.")


@commands.command()
def jobs(as_json: AsJson = False) -> None:
    """List running jobs, on this machine and others."""
    from pedigree.data.store import heartbeat
    from pedigree.pipelines.cli.documents import jobs_document
    from pedigree.pipelines.cli.progress import numbers_text
    from pedigree.pipelines.jobs.live import jobs_now
    from pedigree.pipelines.quantities import duration

    with for_programs(as_json) as emit:
        found = jobs_now(project_here())
        emit(jobs_document(found))
        if as_json:
            return
    if not found:
        echo("no job is running")
        return
    cells = [
        (
            job.address,
            job.kind,
            f"elsewhere{f' ({job.host})' if job.host else ''}" if job.elsewhere else str(job.pid or "?"),
            f"{job.step}/{job.total}" if job.total else "starting",
            numbers_text(job.numbers),
            f"{duration(max(job.silent_s, 0))} ago" if job.heard else f"no heartbeat for {duration(job.silent_s)}",
            job.holder.what if job.holder else f"no command; {command('run', job.address.partition('/')[0])} takes over",
        )
        for job in found
    ]
    print_table(("stage", "kind", "process", "step", "numbers", "last heartbeat", "owner"), cells)
    if not all(job.heard for job in found):
        echo(f"\nHeartbeats can be delayed on a network disk. A job is considered dead after {heartbeat.SILENCE_S:g} s without one.")
    echo("\n`pedigree logs -f STAGE` follows a job's log; `pedigree cancel STAGE` ends the job.")


@commands.command()
def logs(
    stage: Annotated[str, typer.Argument(help="STAGE or RECIPE/STAGE.", show_default=False, autocompletion=completion.artifacts)],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log while the job runs.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Print only the last N lines; 0 prints all.", min=0)] = 0,
) -> None:
    """Print the log of a stage's job, running or finished."""
    from pedigree.pipelines.cli import status as state

    project = project_here()
    address, log = state.find_log(project, stage)
    if follow:
        for text in state.follow(project, address, log):
            print(text, end="", flush=True)  # noqa: T201 - raw log, with colors and progress bars
        return
    text = log.read_text(errors="replace")
    print("\n".join(text.splitlines()[-lines:]) if lines else text, end="\n" if lines else "")  # noqa: T201 - raw log


@commands.command()
def report(recipe: Recipe, overrides: Overrides = None) -> None:
    """Write a recipe's report as one self-contained HTML page."""
    from pedigree.configs.language.recipe import load_recipe
    from pedigree.pipelines.publish.report import write_report

    project = project_here()
    echo(write_report(project, load_recipe(project.recipes, recipe, overrides or ())).relative_to(project.root))


@commands.command()
def doctor() -> None:
    """Check the installation.

    Checks versions, engines, cores, GPUs, disk and the DVC remote, and shows how to fix each problem. Exit code 1 if a check fails.
    """
    from pedigree.pipelines.cli.doctor import main as examine

    raise typer.Exit(examine())
