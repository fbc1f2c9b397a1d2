"""The commands on schedules: deploy, serve, deployments, pause, resume. They need a Prefect server."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from configs.base.texts import command
from pipelines.cli import completion
from pipelines.cli.console import (
    Force,
    From,
    Overrides,
    Profile,
    Recipe,
    Until,
    interrupt_on_sigterm,
    print_table,
    project_here,
    say,
)
from pipelines.cli.quiet import prefect_server, quiet_prefect

if TYPE_CHECKING:
    from configs.base.project import Project
    from configs.language.graph import Graph
    from pipelines.deployments import Listed
    from pipelines.request import Request

commands = typer.Typer()
Cron = Annotated[str | None, typer.Option("--cron", metavar="FIELDS", help='When to run, e.g. "0 3 * * *": 3:00 every night.')]
Interval = Annotated[str | None, typer.Option("--interval", metavar="TIME", help="Run every 90s, 15m, 6h, 1d, from now on.")]
Rrule = Annotated[str | None, typer.Option("--rrule", metavar="RULE", help="When to run, as an iCalendar rule (RFC 5545).")]
Timezone = Annotated[str | None, typer.Option("--timezone", metavar="ZONE", help="Of the schedule, e.g. Europe/Berlin; UTC when left out.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the deployment; that of the recipe or variant when left out.")]
WhenBusy = Annotated[
    Literal["skip", "wait"],
    typer.Option("--when-busy", help="What becomes of a run whose time has come while the one before runs: left out, or it waits."),
]
GpuPool = Annotated[
    str | None,
    typer.Option("--gpu-pool", metavar="NAME[=N]", help="Hold a slot of this pool while jobs run. N runs of all recipes share it."),
]
Notify = Annotated[
    str | None, typer.Option("--notify", metavar="TYPE/NAME", help="Prefect block that is told when a run fails or a score falls.")
]
Rehearse = Annotated[bool, typer.Option("--rehearse", help="Its runs are rehearsals, as by `pedigree rehearse`; they need no GPU.")]
Deployed = Annotated[
    str, typer.Argument(metavar="NAME", help="A deployment: the name of its recipe, or RECIPE+HASH.", show_default=False,
                        autocompletion=completion.recipes)
]  # fmt: skip

WORKER = """
import ctypes, os, runpy, signal, sys
set_parent_death_signal = 1  # PR_SET_PDEATHSIG: it comes when the thread ends that has started this process
ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the command that has started this worker is gone")
runpy.run_module("prefect", run_name="__main__", alter_sys=True)
"""
"""`prefect`, which ends when its parent does, however that ends."""


@commands.command()
def deploy(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    cron: Cron = None,
    interval: Interval = None,
    rrule: Rrule = None,
    timezone: Timezone = None,
    work_pool: Annotated[
        str | None, typer.Option("--work-pool", metavar="POOL", help="Process work pool whose workers run it, in this folder.")
    ] = None,
    execution: Profile = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    rehearse: Rehearse = False,
    when_busy: WhenBusy = "skip",
    gpu_pool: GpuPool = None,
    notify: Notify = None,
    name: Name = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the deployment off the server; what it has made stays.")] = False,
) -> None:
    """Put a recipe on a schedule: a Prefect deployment, whose runs do what `pedigree run` does with these options."""
    from configs.base.problems import UsageProblem

    project = _with_server()
    if remove:
        _refuse_beside_remove(context)
        _remove(project, recipe, overrides, name, rehearse)
        return
    if work_pool is None:
        how = "`prefect work-pool create --type process POOL` makes one"
        raise UsageProblem(f"--work-pool is missing: whose workers run it? {how}; {command('serve', recipe)} needs none")
    graph, request = _wanted(project, recipe, overrides, execution, start, until, force, rehearse)
    _deploy(project, graph, request, {"pool": work_pool, "name": name, "when_busy": when_busy, "notify": notify}, gpu_pool,
            (cron, interval, rrule, timezone))  # fmt: skip


@commands.command()
def serve(
    recipe: Recipe,
    overrides: Overrides = None,
    cron: Cron = None,
    interval: Interval = None,
    rrule: Rrule = None,
    timezone: Timezone = None,
    execution: Profile = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    rehearse: Rehearse = False,
    when_busy: WhenBusy = "skip",
    gpu_pool: GpuPool = None,
    notify: Notify = None,
    name: Name = None,
) -> None:
    """Deploy a recipe and work its runs off here, until Ctrl-C: a schedule without a worker of its own.

    Afterwards the schedule is paused. Jobs that run go on, and the next run takes them over.
    """
    from pipelines.deployments import own_pool, resume
    from pipelines.deployments import pause as rest

    project = _with_server()
    graph, request = _wanted(project, recipe, overrides, execution, start, until, force, rehearse)
    pool = own_pool(project)
    deployed = _deploy(project, graph, request, {"pool": pool, "name": name, "when_busy": when_busy, "notify": notify}, gpu_pool,
                       (cron, interval, rrule, timezone), quiet=True)  # fmt: skip
    if deployed.paused:
        resume(project, deployed.name)
    say(f"Serving {deployed.name} until Ctrl-C.", flush=True)
    code = _work_off(project, pool, lambda: rest(project, deployed.name))
    rest(project, deployed.name)
    with contextlib.suppress(OSError):  # the terminal may be gone
        say(f"The schedule of {deployed.name} is paused: {command('serve', recipe)} goes on with it.", flush=True)
    if code:
        raise typer.Exit(1)


@commands.command("deployments")
def list_deployments() -> None:
    """List what is deployed for this project: schedules, next times, last results."""
    from pipelines.deployments import deployments

    found = deployments(_with_server())
    if not found:
        say(f"nothing is deployed: {command('deploy', 'RECIPE', '--cron', '0 3 * * *', '--work-pool', 'POOL')} puts a recipe on a schedule")
        return
    print_table(("deployment", "schedule", "next", "work pool", "last run"), [_cells(one) for one in found])


@commands.command()
def pause(name: Deployed) -> None:
    """Let a schedule start no more runs. One that has begun goes on: `pedigree cancel` ends it."""
    from pipelines import deployments

    planned = deployments.pause(_with_server(), name)
    say(f"{name} is paused: its schedule starts nothing until {command('resume', name)}")
    for run in planned:
        when = f" at {run.when.astimezone():%Y-%m-%d %H:%M:%S %Z}" if run.when else ""
        remedy = f"`prefect flow-run cancel {run.id}` calls it off"
        say(f"note: {run.name}, planned by hand, begins{when} all the same; {remedy}", file=sys.stderr)


@commands.command()
def resume(name: Deployed) -> None:
    """Let a paused schedule start runs again. (An interrupted run goes on by `pedigree run`.)"""
    from pipelines import deployments

    project = _with_server()
    deployments.resume(project, name)
    (listed,) = [one for one in deployments.deployments(project) if one.name == name]
    say(f"{name} is resumed: {listed.schedule}")


def _with_server() -> "Project":
    """The project at hand, once it is clear that there is a server to ask.

    Raises:
        UsageProblem: none is configured.
    """
    from configs.base.problems import UsageProblem
    from pipelines.run.observer import HOW_TO_PREFECT

    project = project_here()
    if prefect_server() is None:
        raise UsageProblem(f"no Prefect server is configured, and schedules live on one. {HOW_TO_PREFECT}")
    quiet_prefect()
    return project


def _wanted(
    project: "Project",
    recipe: str,
    overrides: list[str] | None,
    execution: str | None,
    start: list[str] | None,
    until: list[str] | None,
    force: list[str] | None,
    rehearse: bool = False,
) -> "tuple[Graph, Request]":
    """The recipe, checked as `pedigree run` would, and the request as runs in other folders understand it."""
    from pathlib import Path

    from pipelines.request import Request, opened, selection
    from pipelines.run.pins import refuse_unpinned

    def anywhere(name: str) -> str:
        return str(Path(name).resolve()) if _is_path(name) else name

    recipe, execution = anywhere(recipe), anywhere(execution) if execution else None
    lists = (tuple(names or ()) for names in (start, until, force))
    request = Request(recipe, tuple(overrides or ()), execution, (), *lists, rehearse=rehearse)
    run = opened(project, request, compiled=False)
    chosen, _ = selection(run.graph, request)
    if not rehearse:
        refuse_unpinned(run.graph, chosen)
    return run.graph, request


def _is_path(name: str) -> bool:
    """Whether a recipe or a profile is given by its path."""
    return name.endswith((".yaml", ".yml"))


def _deploy(
    project: "Project",
    graph: "Graph",
    request: "Request",
    terms: dict[str, Any],
    gpu_pool: str | None,
    when: tuple[str | None, str | None, str | None, str | None],
    quiet: bool = False,
) -> "Listed":
    from pipelines.deployments import Terms, deploy, schedule_of

    gpu_name, slots = _pool_and_slots(gpu_pool)
    deployed, notes = deploy(project, graph, request, Terms(schedule=schedule_of(*when), gpu_pool=gpu_name, gpu_slots=slots, **terms))
    where = f", on work pool {deployed.pool}" if not quiet else ""
    say(f"deployed {deployed.name}: {deployed.schedule}{where}; {', '.join(tag for tag in deployed.tags if ':' in tag)}")
    for note in [] if quiet else notes:
        say(f"note: {note}", file=sys.stderr)
    return deployed


def _pool_and_slots(text: str | None) -> tuple[str | None, int | None]:
    from configs.base.problems import UsageProblem

    name, has, slots = (text or "").partition("=")
    if text is None:
        return None, None
    if not name or (has and not (slots.isdecimal() and int(slots) > 0)):
        raise UsageProblem(f"--gpu-pool {text}: it is NAME, or NAME=N with N runs at a time, N at least 1")
    return name, int(slots) if has else None


def _refuse_beside_remove(context: typer.Context) -> None:
    """Only what names a deployment may stand beside `--remove`."""
    from configs.base.problems import UsageProblem

    naming = {"recipe", "overrides", "rehearse", "name", "remove"}
    sources = {one.opts[0]: context.get_parameter_source(one.name or "") for one in context.command.params if one.name not in naming}
    wrong = [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if wrong:
        raise UsageProblem(f"--remove takes a deployment off the server: leave out {', '.join(wrong)}, or --remove")


def _remove(project: "Project", recipe: str, overrides: list[str] | None, name: str | None, rehearse: bool) -> None:
    from pipelines import deployments

    if (overrides or rehearse or _is_path(recipe)) and name is None:
        name = deployments.name_of(*_wanted(project, recipe, overrides, None, None, None, None, rehearse))
    deployments.remove(project, name or recipe)
    say(f"{name or recipe} is no longer deployed; artifacts and runs that were stay")


def _work_off(project: "Project", pool: str, rest: Callable[[], object]) -> int:
    """Runs a worker of the pool until it is interrupted, and lets the schedule rest before the worker ends; returns its exit code.

    To be called in the main thread: the worker ends with the thread that has started it.
    """
    import signal

    interrupt_on_sigterm()
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # `nohup` ignores it
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    arguments = [sys.executable, "-c", WORKER, str(os.getpid()), "worker", "start", "--pool", pool, "--type", "process"]
    worker = subprocess.Popen(arguments, cwd=project.root, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return worker.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a terminal that is closed it may come twice
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
