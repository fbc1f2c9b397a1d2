"""Schedule commands: deploy, serve, and `schedules` with list, pause, resume and remove. All need a Prefect server."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.pipelines.cli import completion, options
from pedigree.pipelines.cli.console import echo, print_table, requested
from pedigree.pipelines.cli.quiet import prefect_server, quiet_prefect

if TYPE_CHECKING:
    from pedigree.pipelines.deployments import Listed
    from pedigree.pipelines.run.opening import Request

commands = typer.Typer()
deployed = typer.Typer(no_args_is_help=True, help="List, pause, resume or remove schedules.")
Cron = Annotated[str | None, typer.Option("--cron", metavar="FIELDS", help='Cron schedule, e.g. "0 3 * * *" for 3:00 every night.')]
Interval = Annotated[str | None, typer.Option("--interval", metavar="TIME", help="Interval schedule: 90s, 15m, 6h, 1d.")]
Rrule = Annotated[str | None, typer.Option("--rrule", metavar="RULE", help="Schedule as an iCalendar recurrence rule (RFC 5545).")]
Timezone = Annotated[str | None, typer.Option("--timezone", metavar="ZONE", help="Time zone, e.g. Europe/Berlin; defaults to UTC.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Deployment name; defaults to the recipe or variant.")]
WhenBusy = Annotated[
    Literal["skip", "wait"],
    typer.Option("--when-busy", help="What to do if the previous run is still active: skip the new run, or let it wait."),
]
GpuPool = Annotated[
    str | None,
    typer.Option("--gpu-pool", metavar="NAME[=N]", help="Pool shared by recipes; a run holds one of its N slots while jobs run."),
]
Notify = Annotated[
    str | None, typer.Option("--notify", metavar="TYPE/NAME", help="Prefect notification block for failed runs and score regressions.")
]
Rehearse = Annotated[bool, typer.Option("--rehearse", help="Run rehearsals instead (see `pedigree rehearse`); these need no GPU.")]
Deployed = Annotated[
    str, typer.Argument(metavar="NAME", help="Deployment name, by default RECIPE or RECIPE+HASH.", show_default=False,
                        autocompletion=completion.recipes)
]  # fmt: skip

WORKER = """
import ctypes, os, runpy, signal, sys
set_parent_death_signal = 1  # PR_SET_PDEATHSIG: sent when the thread that started this process ends
ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job hands on that it ignores it
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the command that started this worker has exited")
runpy.run_module("prefect", run_name="__main__", alter_sys=True)
"""
"""Runs `prefect` in a process that ends with its parent, even if that is killed."""


@commands.command()
def deploy(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    cron: Cron = None,
    interval: Interval = None,
    rrule: Rrule = None,
    timezone: Timezone = None,
    work_pool: Annotated[
        str | None, typer.Option("--work-pool", metavar="POOL", help="Work pool of type process; its workers run in this folder.")
    ] = None,
    execution: options.Profile = None,
    start: options.From = None,
    until: options.Until = None,
    force: options.Force = None,
    rehearse: Rehearse = False,
    when_busy: WhenBusy = "skip",
    gpu_pool: GpuPool = None,
    notify: Notify = None,
    name: Name = None,
) -> None:
    """Schedule a recipe as a Prefect deployment.

    Scheduled runs behave like `pedigree run` with the same options.
    """
    project = _with_server()
    if work_pool is None:
        remedy = "create one with `prefect work-pool create --type process POOL`"
        raise UsageProblem(f"--work-pool is required: {remedy}, or use {command('serve', recipe)}, which needs none")
    wanted = replace(requested(recipe, overrides, execution, None, start, until, force), rehearse=rehearse)
    deployed, notes = _deploy(project, wanted, (cron, interval, rrule, timezone), gpu_pool, name, when_busy, notify, pool=work_pool)
    echo(f"deployed {deployed.name}: {deployed.schedule}, on work pool {deployed.pool}; {_tags(deployed)}")
    for note in notes:
        echo(f"note: {note}", file=sys.stderr)


@commands.command()
def serve(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    cron: Cron = None,
    interval: Interval = None,
    rrule: Rrule = None,
    timezone: Timezone = None,
    execution: options.Profile = None,
    start: options.From = None,
    until: options.Until = None,
    force: options.Force = None,
    rehearse: Rehearse = False,
    when_busy: WhenBusy = "skip",
    gpu_pool: GpuPool = None,
    notify: Notify = None,
    name: Name = None,
) -> None:
    """Deploy a recipe and execute its runs here until Ctrl-C.

    Needs no separate worker. On exit, the schedule is paused; running jobs continue, and the next run re-attaches to them.
    """
    from pedigree.pipelines.deployments import pause as rest
    from pedigree.pipelines.deployments import resume

    project = _with_server()
    wanted = replace(requested(recipe, overrides, execution, None, start, until, force), rehearse=rehearse)
    deployed, _ = _deploy(project, wanted, (cron, interval, rrule, timezone), gpu_pool, name, when_busy, notify)
    echo(f"deployed {deployed.name}: {deployed.schedule}; {_tags(deployed)}")
    if deployed.paused:
        resume(project, deployed.name)
    echo(f"Serving {deployed.name} until Ctrl-C.", flush=True)
    code = _work_off(project, deployed.pool, lambda: rest(project, deployed.name))
    rest(project, deployed.name)
    with contextlib.suppress(OSError):  # the terminal may be gone
        echo(f"The schedule of {deployed.name} is paused; {command('serve', recipe)} resumes it.", flush=True)
    if code:
        raise typer.Exit(1)


@deployed.command("list")
def list_deployments() -> None:
    """List this project's deployments: schedule, next and last run."""
    from pedigree.pipelines.deployments import deployments

    found = deployments(_with_server())
    if not found:
        echo(f"no deployments; schedule a recipe with {command('deploy', 'RECIPE', '--cron', '0 3 * * *', '--work-pool', 'POOL')}")
        return
    print_table(("deployment", "schedule", "next", "work pool", "last run"), [_cells(one) for one in found])


@deployed.command()
def pause(name: Deployed) -> None:
    """Pause a schedule.

    A run in progress continues; `pedigree cancel` ends it.
    """
    from pedigree.pipelines import deployments

    planned = deployments.pause(_with_server(), name)
    echo(f"{name} is paused; {command('schedules', 'resume', name)} resumes its schedule")
    for run in planned:
        when = f" at {run.expected_start_time.astimezone():%Y-%m-%d %H:%M:%S %Z}" if run.expected_start_time else ""
        remedy = f"`prefect flow-run cancel {run.id}` cancels it"
        echo(f"note: {run.name} was planned manually and will still start{when}; {remedy}", file=sys.stderr)


@deployed.command()
def resume(name: Deployed) -> None:
    """Resume a paused schedule.

    To resume an interrupted run, use `pedigree run`.
    """
    from pedigree.pipelines import deployments

    project = _with_server()
    deployments.resume(project, name)
    (listed,) = [one for one in deployments.deployments(project) if one.name == name]
    echo(f"{name} is resumed: {listed.schedule}")


@deployed.command()
def remove(name: Deployed) -> None:
    """Delete a deployment; artifacts and past runs are kept."""
    from pedigree.pipelines import deployments

    deployments.remove(_with_server(), name)
    echo(f"{name} is no longer deployed; artifacts and past runs are kept")


commands.add_typer(deployed, name="schedules")


def _with_server() -> "Project":
    """Return the current project, after checking that a Prefect server is configured."""
    from pedigree.pipelines.prefect.observer import HOW_TO_PREFECT

    project = Project.find()
    if prefect_server() is None:
        raise UsageProblem(f"schedules need a Prefect server, and none is configured. {HOW_TO_PREFECT}")
    quiet_prefect()
    return project


def _deploy(
    project: "Project",
    request: "Request",
    when: tuple[str | None, str | None, str | None, str | None],
    gpu_pool: str | None,
    name: str | None,
    when_busy: Literal["skip", "wait"],
    notify: str | None,
    pool: str | None = None,
) -> "tuple[Listed, list[str]]":
    """Deploy a recipe that is checked as in `pedigree run`; return the deployment, and notes for the user."""
    from pedigree.configs.language.recipe import load_recipes
    from pedigree.pipelines.deployments import Terms, deploy
    from pedigree.pipelines.prefect.recurrence import schedule_of
    from pedigree.pipelines.rehearsal.preparing import check
    from pedigree.pipelines.run.checks import refuse_contradictions
    from pedigree.pipelines.run.opening import open_run
    from pedigree.pipelines.run.pins import refuse_unpinned
    from pedigree.pipelines.run.plans import selection

    paths = {part: str(Path(text).resolve()) for part in ("recipe", "profile")
             if (text := getattr(request, part)) and text.endswith((".yaml", ".yml"))}  # fmt: skip
    request = replace(request, **paths)  # runs start in another folder
    run = open_run(project, request, looking=True)
    chosen, _ = selection(run, request)
    refuse_contradictions(project, run.graph, run.execution, chosen)
    if request.rehearse:
        check(project, load_recipes(project.recipes, request.recipe, request.overrides))
    else:
        refuse_unpinned(run.graph, chosen)
    gpu_name, slots = _pool_and_slots(gpu_pool)
    return deploy(project, run.graph, request, Terms(pool, schedule_of(*when), name, when_busy, gpu_name, slots, notify))


def _tags(deployed: "Listed") -> str:
    return ", ".join(tag for tag in deployed.tags if ":" in tag)


def _pool_and_slots(text: str | None) -> tuple[str | None, int | None]:
    name, has, slots = (text or "").partition("=")
    if text is None:
        return None, None
    if not name or (has and not (slots.isdecimal() and int(slots) > 0)):
        raise UsageProblem(f"--gpu-pool {text}: must be NAME or NAME=N, with N at least 1")
    return name, int(slots) if has else None


def _work_off(project: "Project", pool: str, rest: Callable[[], object]) -> int:
    """Run a worker of the pool until interrupted, pause the schedule before the worker ends, and return the worker's exit code.

    Call it in the main thread: the worker ends along with the thread that started it.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # `nohup` ignores it
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    arguments = [sys.executable, "-c", WORKER, str(os.getpid()), "worker", "start", "--pool", pool, "--type", "process"]
    worker = subprocess.Popen(arguments, cwd=project.root, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return worker.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal may send it twice
        try:
            rest()
        finally:
            worker.send_signal(signal.SIGINT)
            worker.wait()
        return 0


def _cells(one: "Listed") -> tuple[str, ...]:
    workers = "" if one.workers else " (no worker)"
    when = "paused" if one.paused else f"{one.next.astimezone():%Y-%m-%d %H:%M:%S %Z}" if one.next else "-"
    return one.name, one.schedule, when, f"{one.pool}{workers}", one.last or "none yet"
