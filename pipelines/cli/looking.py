"""Inspection commands: plan, status, jobs, logs, report, models, doctor. None starts a job."""

import sys
from typing import Annotated

import typer

from pedigree.configs.base.project import Project
from pedigree.pipelines.cli import completion, options
from pedigree.pipelines.cli.console import echo, echo_json, for_programs, print_table, requested

commands = typer.Typer()


@commands.command()
def plan(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    only: options.Only = None,
    start: options.From = None,
    until: options.Until = None,
    force: options.Force = None,
    execution: options.Profile = None,
    faster: Annotated[bool, typer.Option("--faster", help="Search the profile's settings for faster ones that fit its GPUs.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show what a run would do, why, and what it needs.

    Lists stale stages with estimates of memory, tokens, time and disk. Exit code 1 if a stage cannot succeed, or does not fit into the
    memory of the profile's machine; `run` refuses such a stage.
    """
    from pedigree.pipelines.cli.plan import print_faster, print_plan
    from pedigree.pipelines.cli.progress import StatusLine, measured_by
    from pedigree.pipelines.run import planning, plans
    from pedigree.pipelines.run.opening import open_run

    request = requested(recipe, overrides, execution, only, start, until, force)
    with for_programs(as_json) as emit:
        project = Project.find()
        with StatusLine() as telling:
            context = open_run(project, request, looking=True, watch=telling.watch)
            chosen, forced = plans.selection(context, request)
            planned = plans.plan(context, chosen, forced)
            rows = planning.rows_of(context, planned, forced, measured_by(telling), faster)
        found = planning.run_plan(context, rows)
        if as_json:
            emit("plan", found, context.graph)
        else:
            print_plan(context, recipe, found, chosen)
            if faster:
                print_faster(found)
        refused = planning.refused(rows)
        for line in refused:
            echo(line, file=sys.stderr)
        if refused:
            raise typer.Exit(1)


@commands.command()
def status(recipe: options.Recipe, overrides: options.Overrides = None, as_json: options.AsJson = False) -> None:
    """Show which stages are done, stale or running.

    Also lists results not committed to git, and counts the stages whose code changed since; --json has the files of each.
    """
    from pedigree.pipelines.cli import status as state
    from pedigree.pipelines.cli.progress import StatusLine
    from pedigree.pipelines.run.opening import open_run

    with for_programs(as_json) as emit:
        with StatusLine() as telling:
            context = open_run(Project.find(), requested(recipe, overrides), looking=True, watch=telling.watch)
            found = state.status(context)
        emit("status", found, context.graph) if as_json else state.print_status(recipe, found)


@commands.command()
def jobs(as_json: options.AsJson = False) -> None:
    """List running jobs, on this machine and others."""
    from pedigree.pipelines.cli.running_jobs import Jobs, print_jobs
    from pedigree.pipelines.jobs.live import jobs_now

    with for_programs(as_json) as emit:
        found = jobs_now(Project.find())
        emit("jobs", Jobs(tuple(found))) if as_json else print_jobs(found)


@commands.command()
def logs(
    stage: Annotated[str, typer.Argument(help="STAGE or RECIPE/STAGE.", show_default=False, autocompletion=completion.artifacts)],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log while the job runs.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Print only the last N lines; 0 prints all.", min=0)] = 0,
    every: Annotated[bool, typer.Option("--all", help="Include messages, warnings and progress bars of libraries.")] = False,
) -> None:
    """Print the log of a stage's job, running or finished.

    Shows steps, warnings and errors; `--all` adds what libraries print. Lines of further nodes begin with the node's name.
    """
    from pedigree.pipelines.cli import job_logs

    project = Project.find()
    address, log = job_logs.find_log(project, stage)
    if not log.stat().st_size and (reason := job_logs.queued(project, address)):
        echo(f"{address} waits {reason}", file=sys.stderr)
    texts = job_logs.follow(project, address, log) if follow else iter([job_logs.gained(log, {})])
    shown = iter if every else job_logs.without_chatter
    for text in job_logs.last_lines(texts, lines, shown) if lines else shown(texts):
        print(text, end="", flush=follow)  # noqa: T201 - raw log, with colors and progress bars


@commands.command()
def report(recipe: options.Recipe, overrides: options.Overrides = None) -> None:
    """Write a recipe's report as one self-contained HTML page."""
    from pedigree.configs.language.recipe import load_recipe
    from pedigree.pipelines.publish.report import write_report

    project = Project.find()
    echo(write_report(project, load_recipe(project.recipes, recipe, overrides or ())).relative_to(project.root))


@commands.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print all named models as JSON, with all details.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also list models that were not made yet.")] = False,
) -> None:
    """List the models that exist, with their scores.

    Each is one line (artifact, state, id, mean scores, versions), cut where the terminal is narrower. A model's name is accepted wherever
    an artifact is expected.
    """
    from pedigree.pipelines.cli.progress import StatusLine
    from pedigree.pipelines.publish.catalog import registry
    from pedigree.pipelines.quantities import counted

    with StatusLine() as telling:
        rows = registry(Project.find(), telling.watch)
    if as_json:
        echo_json([row.as_json() for row in rows])
        return
    if not rows:
        echo("no named models: compile a recipe that declares one with `pedigree compile RECIPE`")
        return
    shown = [row for row in rows if every or row.state != "not made"]
    if shown:
        print_table(("model", "artifact", "state", "id", "scores", "versions"), [row.cells() for row in shown], whole=("model", "id"))
    if left := len(rows) - len(shown):
        echo(f"{counted(left, 'more named model')} not made yet: --all lists them")


@commands.command()
def doctor(
    execution: Annotated[
        str | None,
        typer.Option("--execution", "--profile", metavar="PROFILE", autocompletion=completion.profiles,
                     help="Check the Slurm or Kubernetes cluster of this profile instead."),
    ] = None,
) -> None:  # fmt: skip
    """Check the installation, or a cluster.

    Checks versions, engines, cores, GPUs, disk and the DVC remote, and shows how to fix each problem. Exit code 1 if a check fails. With
    --execution, submits small jobs to the cluster, and checks the profile's options and whether nodes see the project; may take minutes.
    """
    from pedigree.pipelines.cli.doctor import main as examine

    raise typer.Exit(examine(execution))
