"""Commands that run or end stages: run, join, rehearse, cancel, and the hidden command used in `dvc.yaml`."""

import sys
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.pipelines.cli import completion, options
from pedigree.pipelines.cli.console import echo, for_programs, print_table, requested
from pedigree.pipelines.cli.quiet import prefect_server, quiet_prefect
from pedigree.pipelines.quantities import counted

if TYPE_CHECKING:
    from pedigree.pipelines.jobs.context import RunContext
    from pedigree.pipelines.publish.commits import Commit
    from pedigree.pipelines.run.runs import StageEnd

commands = typer.Typer()
ShowInPrefect = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(
        "--prefect",
        envvar="PEDIGREE_PREFECT",
        help="Report the run to Prefect; `auto` does so if a server is configured (PREFECT_API_URL or a profile).",
    ),
]


@commands.command()
def run(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    only: options.Only = None,
    start: options.From = None,
    until: options.Until = None,
    force: options.Force = None,
    prefect: ShowInPrefect = "auto",
    execution: options.Profile = None,
    keep_jobs: Annotated[bool, typer.Option("--keep-jobs", help="On Ctrl-C, leave jobs running; the next run re-attaches.")] = False,
    require_checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--require-checkpoint", metavar="STAGE", autocompletion=completion.stages,
            help="Fail instead of starting this stage from scratch. Repeatable.",
        ),
    ] = None,
    allow_numerics_change: Annotated[
        bool,
        typer.Option(
            "--allow-numerics-change", help="Resume even if ranks, micro-batches or threads changed; this is recorded."
        ),
    ] = False,
    on_code_change: Annotated[
        Literal["keep", "take", "rerun"],
        typer.Option(
            "--on-code-change",
            help="How to resume a stage whose code changed: `keep` uses the original code, `take` the current code (recorded), `rerun` "
            "starts over and also re-runs finished stages whose code changed.",
        ),
    ] = "keep",
    record_new_files: Annotated[
        bool, typer.Option("--record-new-files", help="Include untracked files in the recorded patch, also for all descendants.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Kubernetes manifests of due stages; run nothing.")] = False,
    commit: Annotated[bool, typer.Option("--commit", help="Commit dvc.lock and compiled files to git if the run succeeds.")] = False,
    as_json: options.AsJson = False,
) -> None:  # fmt: skip
    """Run all stages of a recipe that are not up to date."""
    from pedigree.pipelines.cli.run_results import run_result
    from pedigree.pipelines.publish.commits import check_commit, check_ledger
    from pedigree.pipelines.run.checks import manifests
    from pedigree.pipelines.run.opening import open_run
    from pedigree.pipelines.run.plans import named, selection

    request = requested(recipe, overrides, execution, only, start, until, force)
    began = time.monotonic()
    with for_programs(as_json) as emit:
        project = Project.find()
        if commit:
            check_commit(project)
        context = open_run(project, request)
        if commit:
            check_ledger(project, context.graph)
        context.keep_jobs, context.allow_numerics_change = keep_jobs, allow_numerics_change
        context.on_code_change, context.record_new_files = on_code_change, record_new_files
        chosen, forced = selection(context, request)
        context.require_checkpoint = named("--require-checkpoint", context.graph, require_checkpoint or (), chosen)
        if dry_run:
            if commit or as_json:
                raise UsageProblem("--dry-run prints manifests, so it cannot be combined with --commit or --json")
            sys.stdout.write(manifests(context, chosen, forced))
            return
        ends = run_what_is_due(context, chosen, forced, prefect)
        made = _commit_results(context, chosen, ends) if commit else None
        result = run_result(context, ends, time.monotonic() - began, made)
        emit("run", result, context.graph)
        if result.outcome != "done":
            raise typer.Exit(130 if result.outcome == "interrupted" else 1)


def run_what_is_due(context: "RunContext", chosen: frozenset[str], forced: frozenset[str], prefect: str) -> "list[StageEnd] | None":
    """Run all stages that are not up to date and print the results; return each stage's outcome, or None if interrupted."""
    from pedigree.pipelines.cli.plan import time_text
    from pedigree.pipelines.cli.progress import Display, StatusLine, measured_by, watching
    from pedigree.pipelines.jobs.context import StageFailed
    from pedigree.pipelines.prefect.observer import HOW_TO_PREFECT, run_observed
    from pedigree.pipelines.publish.shown_stages import report_path
    from pedigree.pipelines.run.checks import all_done, checked_plan
    from pedigree.pipelines.run.planning import beforehand, rows_of, with_jobs
    from pedigree.pipelines.run.runs import clear_settled, current_among, run_graph, settled, still_ending

    with StatusLine() as telling:
        context.watch = telling.watch
        planned = checked_plan(context, chosen, forced)
        done = settled(planned)
        rows = rows_of(context, planned, forced, measured_by(telling)) if len(done) < len(planned) else []
    if len(done) == len(planned):
        clear_settled(context, planned)
        echo(all_done(len(done), sum(end.outcome == "remote" for end in done), context.graph.source))
        _print_scores(context, current_among(done))
        path, remedy = report_path(context.project, context.graph.recipe), command("report", context.graph.source)
        echo(f"\nreport: {path.relative_to(context.project.root) if path.exists() else f'not written yet; run {remedy}'}")
        return list(done)
    if (found := beforehand(context, rows)).how:
        echo(f"{context.graph.source}: {time_text(found, context.execution.numerics.device)}")
    board = watching(context, chosen, with_jobs(rows))
    try:
        with Display(board):
            server, required = None if prefect == "never" else prefect_server(), prefect == "always"
            if server is not None:
                quiet_prefect()
                ends = run_observed(context, chosen, forced, planned, server=server.rpartition("@")[2], required=required)
            elif required:
                raise UsageProblem(f"--prefect always: no Prefect server is configured. {HOW_TO_PREFECT}")
            else:
                ends = run_graph(context, chosen, forced, planned)
    except KeyboardInterrupt:
        if context.keep_jobs:
            remedy = "`pedigree jobs` lists them, `pedigree cancel` ends them, and the same command re-attaches."
            echo(f"interrupted; jobs keep running. {remedy}")
        elif still_ending():
            echo("interrupted twice; jobs are still being ended, for which this command waits. Checkpoints are kept.")
        else:
            echo("interrupted; all jobs ended. Finished stages and checkpoints are kept. Run the same command again to resume.")
        return None
    current = current_among(ends)
    _print_scores(context, current)
    from pedigree.pipelines.publish.report import write_report  # imports what draws the page, which a run without work does not need

    echo(f"\nreport: {write_report(context.project, context.graph, current).relative_to(context.project.root)}")
    for notice in context.ledger.notices:
        echo(f"note: {notice}", file=sys.stderr)
    for end in ends:
        if isinstance(end, StageFailed):
            echo(end, file=sys.stderr)
    if len(current) < len(ends):
        echo(f"{len(current)} of {len(ends)} stages are up to date; run the same command again to resume", file=sys.stderr)
    return ends


@commands.command()
def rehearse(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    profile: options.Profile = None,
    prefect: ShowInPrefect = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Test-run a recipe on the CPU with tiny models.

    Uses the same graph, code, formats and templates, but synthetic rows, and takes minutes. Ends with a list of what was and was not
    checked. Results go to a separate project, `.pedigree/rehearsals/PROFILE`.
    """
    from pedigree.pipelines.cli.progress import StatusLine
    from pedigree.pipelines.cli.run_results import RehearsalResult, run_result
    from pedigree.pipelines.rehearsal.preparing import prepare
    from pedigree.pipelines.rehearsal.proof import proof_of, sentences
    from pedigree.pipelines.run.opening import Request
    from pedigree.pipelines.run.plans import selection

    began = time.monotonic()
    with for_programs(as_json) as emit:
        project = Project.find()
        with StatusLine() as telling:
            rehearsal = prepare(project, recipe, tuple(overrides or ()), profile, telling)
        run = rehearsal.opened()
        ends = run_what_is_due(run, *selection(run, Request(rehearsal.recipe)), prefect)
        seconds = time.monotonic() - began
        proof = proof_of(rehearsal.project, run.graph, rehearsal.changes)
        ended, root = run_result(run, ends, seconds, None), rehearsal.project.root
        emit("rehearse", RehearsalResult(**vars(ended), project=root.as_posix(), profile=rehearsal.profile, proved=proof), rehearsal.real)
        if ends is None:
            raise typer.Exit(130)
        if ended.outcome == "failed":
            echo(f"rehearsal of {rehearsal.real.recipe} failed after {seconds:.0f} s", file=sys.stderr)
            raise typer.Exit(1)
        echo(f"\nRehearsed {rehearsal.real.recipe} under {rehearsal.profile}: {len(ends)} stages in {seconds:.0f} s.")
        for line in sentences(proof):
            echo(line)
        echo(f"Results are in {root.relative_to(project.root)}.")


@commands.command()
def join() -> None:
    """Run ranks of this project's jobs on this machine, too.

    For jobs whose `numerics.nodes` is above 1: `pedigree run` starts such a job on its own machine, and the job waits for the others. Run
    this command on each of them, in the same project folder on a shared disk. It waits for jobs until Ctrl-C, which stops the job that it
    has joined, with a checkpoint.
    """
    from pedigree.pipelines.jobs.joining import join as join_jobs

    join_jobs(Project.find(), lambda text: echo(text, flush=True))


@commands.command()
def cancel(
    name: Annotated[
        str, typer.Argument(help="Recipe, stage, or RECIPE/STAGE.", show_default=False, autocompletion=completion.recipes)
    ],
) -> None:  # fmt: skip
    """End running jobs, on this machine or others.

    Checkpoints are kept, and `pedigree run` resumes from them. For a deployed recipe, this cancels the run started by its schedule but
    keeps the schedule.
    """
    from pedigree.pipelines.cli import running_jobs
    from pedigree.pipelines.jobs.live import LiveJob

    def waiting(job: LiveJob) -> None:
        echo(f"{job.address} runs on {job.place}: waiting for it to stop", flush=True)

    project = Project.find()
    scheduled = _cancel_scheduled(project, name)
    try:
        ended = running_jobs.cancel(project, name, waiting)
    except UsageProblem:
        if not scheduled:
            raise
        return
    for job in ended:
        where = f" on {job.place}" if job.elsewhere else ""
        echo(f"ended {job.address}{where}; {command('run', job.address.partition('/')[0])} resumes from its last checkpoint", flush=True)
    if running_jobs.runs_elsewhere(project, name):
        problem = "still runs on another machine and may start other stages: stop it there with Ctrl-C"
        echo(f"{command('run', name)} {problem}", file=sys.stderr)
        raise typer.Exit(1)


def _cancel_scheduled(project: "Project", name: str) -> int:
    """Cancel scheduled runs of a recipe. Must come first: Prefect would treat a killed run as crashed and restart it."""
    if "/" in name or prefect_server() is None:
        return 0
    quiet_prefect()
    from pedigree.pipelines.deployments import cancel_runs

    try:
        count = cancel_runs(project, name)
    except PedigreeError as error:
        echo(f"note: {error}; scheduled runs are not canceled in Prefect", file=sys.stderr)
        return 0
    if count:
        remedy = f"{command('schedules', 'pause', name)} stops the schedule itself"
        echo(f"canceled {counted(count, 'scheduled run')} of {name}; {remedy}", flush=True)
    return count


@commands.command(hidden=True)
def stage(address: str) -> None:
    """Run one compiled stage; `dvc repro` calls it through `dvc.yaml`."""
    from pedigree.pipelines.cli.progress import Board, Display, Row
    from pedigree.pipelines.run.runs import stage_under_dvc

    board = Board(address.partition("/")[0], {address: Row(name=address)})
    with Display(board):
        stage_under_dvc(Project.find(), address, watch=board.update)


def _print_scores(context: "RunContext", current: Collection[str]) -> None:
    """Print a score table per evaluation that is current: policies by tasks, with 95 % intervals, followed by notes on waivers."""
    from pedigree.pipelines.lineage.waivers import in_words
    from pedigree.pipelines.publish.shown_stages import scores_of, waived_in

    every = waived_in(context.project, context.graph, current)
    measured = scores_of(context.project, context.graph, current)
    for name, scores in measured.items():
        policies, waived = scores["policies"], every.get(name, [])
        touched = {(split.policy, split.task) for split in waived}
        tasks = sorted({task for policy in policies.values() for task in policy["tasks"]})
        cells = [
            (label, *(_score(policy["tasks"].get(task), (label, task) in touched) for task in tasks), f"{policy['mean']:.3f}")
            for label, policy in policies.items()
        ]
        echo(f"\n{name}")
        print_table(("policy", *tasks, "mean"), cells)
        for split in waived:
            echo(in_words(split))
    for name in [name for name in scores_of(context.project, context.graph) if name not in measured]:
        echo(f"\n{name}: not measured in this run; its last scores may be of an earlier version, as `pedigree status` shows")


def _score(value: dict[str, float] | None, waived: bool) -> str:
    shown = f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}] n={value['n']:.0f}" if value else "-"
    return f"{shown} (waiver)" if value and waived else shown


def _commit_results(context: "RunContext", chosen: frozenset[str], ends: "Sequence[StageEnd] | None") -> "Commit | None":
    from pedigree.pipelines.publish.commits import commit
    from pedigree.pipelines.run.ensure import Result

    if ends is None or not all(isinstance(end, Result) for end in ends):
        echo("not committed: --commit requires every selected stage to be up to date", file=sys.stderr)
        return None
    made = commit(context.project, context.graph, chosen)
    nothing = f"nothing to commit: git already has the results of {context.graph.recipe}"
    echo(f"\ncommitted {made.id[:12]} {made.title}" if made else f"\n{nothing}")
    return made
