"""The command `pedigree`. Everything but typer is imported inside the commands: help and errors are instant."""

import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.quiet import no_telemetry, prefect_environment

if TYPE_CHECKING:
    from configs.project import Project
    from data.artifacts import Artifact
    from pipelines.context import RunContext
    from pipelines.lineage import Ancestor, Pedigree
    from pipelines.runs import StageEnd

HELP = """Every model with its pedigree: whole post-training recipes as chains of versioned stages.

A recipe is one YAML file: a graph of stages (prepare data, SFT, DPO, RLVR, evaluate, ...). Each stage makes one artifact, a
folder with a payload and the record of what it was made from. A stage whose configuration, code version and inputs have not
changed is not run again, so typing the same command after a crash goes on where it stopped.

\b
An example:
  pedigree recipes                                   what there is
  pedigree plan tiny                                 what would run, and why
  pedigree run tiny                                  make it so; again after Ctrl-C or a crash
  pedigree run tiny --set dpo_2.loss.beta=2.0        a variant: shares every stage that the change does not touch
  pedigree report tiny                               one page: scores, curves, samples, data, lineage
  pedigree lineage tiny/rlvr                         all that a model was made from
  pedigree diff tiny/dpo_1 tiny/dpo_2                how two artifacts differ, and where their ancestry first did
  pedigree export tiny/rlvr ./my-model               a Hugging Face folder with its pedigree inside

\b
Words:
  recipe    a YAML file in configs/recipes        variant  a recipe with --set, RECIPE+HASH
  stage     one box of the graph                  artifact its result, artifacts/RECIPE/STAGE
  profile   how and where to run: configs/execution; never changes what the result means
"""

app = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 130},
)  # fmt: skip

Recipe = Annotated[str, typer.Argument(help="Name of a recipe in configs/recipes, or path of a recipe file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="STAGE.FIELD=VALUE", help="Change the recipe: makes a variant. Repeatable.")
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="STAGE", help="This stage alone. Repeatable.")]
From = Annotated[list[str] | None, typer.Option("--from", metavar="STAGE", help="This stage and all below it. Repeatable.")]
Until = Annotated[list[str] | None, typer.Option("--until", metavar="STAGE", help="This stage and all it needs. Repeatable.")]
Force = Annotated[list[str] | None, typer.Option("--force", metavar="STAGE", help="Run it again, current or not. Repeatable.")]
NAMES = "RECIPE/STAGE, a stage, a folder (also an exported one), the start of an id, or RECIPE/STAGE@REVISION of git."
Profile = Annotated[str | None, typer.Option("--execution", metavar="PROFILE", help="Execution profile: name or path.")]


def main() -> None:
    """Runs the command. Errors of the user's making are one clean message; exit codes: 2 wrong input, 1 failed, 130 interrupted."""
    no_telemetry()
    try:
        app()
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(_message(error), file=sys.stderr)
        sys.exit(code)


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    only: Only = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    no_prefect: Annotated[bool, typer.Option("--no-prefect", help="Without a Prefect flow around it; the result is the same.")] = False,
    execution: Profile = None,
    keep_jobs: Annotated[bool, typer.Option("--keep-jobs", help="On Ctrl-C leave jobs running; the next run re-attaches.")] = False,
    resume: Annotated[
        list[str] | None, typer.Option("--resume", metavar="STAGE", help="Fail unless it goes on from a checkpoint. Repeatable.")
    ] = None,
    reshard: Annotated[
        bool, typer.Option("--reshard", help="Take checkpoints made under other numerics (ranks, micro-batch); the record says so.")
    ] = False,
) -> None:
    """Make every stage of a recipe current; finished stages are not run again."""
    from pipelines.progress import Board, Display
    from pipelines.runs import refuse_missing_engines, unchanged

    project = _project()
    context = _open(project, recipe, overrides, execution)
    context.keep_jobs = keep_jobs
    context.reshard = reshard
    selection, forced = _selection(context, only, start, until, force)
    context.must_resume = _named("--resume", context, resume, selection)
    done = unchanged(context, selection, forced)
    if len(done) == len(selection):
        print(f"{len(done)} stage{'s' * (len(done) != 1)} up to date, nothing to do")
        _print_scores(project, context)
        _print_report_path(project, context)
        return
    refuse_missing_engines(context.graph, [address for address in selection if address not in {end.address for end in done}])
    shown = [(node.address, _shown(context, node), node.kind) for node in context.graph.nodes.values() if node.address in selection]
    board = Board(context.graph.recipe, shown)
    context.watch = board.tell
    _interrupt_on_sigterm()
    try:
        with Display(board):
            board.note = "" if no_prefect else "starting Prefect, about ten seconds (--no-prefect does without)"
            ends = _work(project, context, selection, forced, no_prefect)
            _tell_not_run(board, ends)
    except KeyboardInterrupt:
        _say_interrupted(context)
        raise typer.Exit(130) from None
    failures = _failures(context, ends)
    _print_scores(project, context)
    _write_report(project, context)
    for line in failures:
        print(line, file=sys.stderr)
    if failures:
        raise typer.Exit(1)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    only: Only = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    execution: Profile = None,
) -> None:
    """Show what a run would do, and why: stale stages, disk, batches. Runs nothing."""
    from pipelines import plan as planning
    from pipelines.report import size_text

    project = _project()
    context = _open(project, recipe, overrides, execution)
    selection, forced = _selection(context, only, start, until, force)
    rows = planning.plan(context, selection, forced)
    cells = [
        (row.shown, row.node.kind, row.state, row.why, "" if row.disk == 0 else "?" if row.disk is None else size_text(row.disk))
        for row in rows
    ]
    _table(("stage", "kind", "state", "why", "disk"), cells)
    batches = [(row.shown, row.batch) for row in rows if row.batch]
    if batches:
        print()
        _table(("stage", "batch"), batches)
    stale = [row for row in rows if row.state != "up to date"]
    print()
    if not stale:
        print(f"{len(rows)} stages up to date, nothing to do")
        return
    known, unknown = planning.disk_total(rows)
    free = size_text(_free(project))
    sized = [f"about {size_text(known)}"] if len(rows) > unknown else []
    guess = " and ".join([*sized, *([f"{unknown} stages of unknown size"] if unknown else [])])
    print(f"{len(stale)} of {len(rows)} stages to make. Disk: {guess}; {free} are free.")
    print("A stage that waits for another runs only if that one's content turns out different.")
    print(planning.HOW_ESTIMATED)


@app.command()
def status(recipe: Recipe, overrides: Overrides = None) -> None:
    """Show what is done, stale or running; results not in git; code that has changed since a result was made."""
    from pipelines import runs
    from pipelines import status as state
    from pipelines.plan import opened, why

    project = _project()
    context = _open(project, recipe, overrides, None)
    jobs = state.live_jobs(project)
    cells, drifted = [], {}
    for entry in runs.plan(context):
        node, artifact = entry.node, opened(project, entry.node)
        job = state.is_live(jobs, node)
        word = state.running_word(job) if job else "done" if not entry.reasons else "stale" if artifact else "not built"
        cells.append((_shown(context, node), node.kind, word, why(entry.reasons, context.graph.recipe)))
        changed = state.drift(artifact, node.kind) if artifact else []
        if changed:
            drifted[_shown(context, node)] = changed
    _table(("stage", "kind", "state", "why"), cells)
    for name, files in drifted.items():
        print(f"\n{name}: code has changed since it was made: {', '.join(files)}")
    if drifted:
        print("\nChanged code alone re-runs nothing: raise the stage's `version` in configs/declarations.py if its meaning changed,")
        print("or make one stage again with `pedigree run RECIPE --force STAGE`.")
    dirty = state.uncommitted(project, context.graph)
    if dirty:
        print(f"\nNot committed to git: {', '.join(dirty)}. They are the ledger of what was made: commit them to keep it.")


@app.command()
def jobs() -> None:
    """List the jobs that run now."""
    from pipelines.progress import duration, numbers_text
    from pipelines.status import live_jobs

    found = live_jobs(_project())
    if not found:
        print("no job is running")
        return
    cells = [
        (
            job.address,
            job.kind,
            str(job.handle.process.pid),
            f"{job.step}/{job.total}" if job.total else "starting",
            numbers_text(job.numbers),
            f"{duration(max(job.silent_s, 0))} ago",
            job.holder.what if job.holder else "nobody: `pedigree run` re-attaches",
        )
        for job in found
    ]
    _table(("stage", "kind", "process", "step", "numbers", "last sign", "waited for by"), cells)


@app.command()
def logs(
    stage: Annotated[str, typer.Argument(help="Stage, or RECIPE/STAGE.", show_default=False)],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing while its job runs.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Last lines only; 0 for all.", min=0)] = 0,
) -> None:
    """Print the log of a stage's job, running or finished."""
    from pipelines import status as state

    project = _project()
    address, log = state.find_log(project, stage)
    if follow:
        for text in state.follow(project, address, log):
            print(text, end="", flush=True)
        return
    text = log.read_text(errors="replace")
    print("\n".join(text.splitlines()[-lines:]) if lines else text, end="\n" if lines else "")


@app.command()
def cancel(name: Annotated[str, typer.Argument(help="Recipe, stage, or RECIPE/STAGE.", show_default=False)]) -> None:
    """End running jobs with all their processes. Checkpoints are kept: `pedigree run` goes on from them."""
    from pipelines import status as state

    for address in state.cancel(_project(), name):
        print(f"ended {address}")


@app.command()
def lineage(
    artifact: Annotated[str, typer.Argument(help=NAMES, show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="All records and runs of the ancestry, as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")] = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="openlineage|slsa|card|croissant", help="Print it in the words of a standard.")
    ] = None,
) -> None:
    """Show all that an artifact was made from, back to the raw sources.

    --format openlineage sends the events to OPENLINEAGE_URL, where that is set.
    """
    from pipelines import lineage as records
    from pipelines.export import in_standard

    project = _project_or_none()
    found = _pedigree(project, artifact)
    if html is not None:
        from data.artifacts import write_text
        from pipelines.lineage_page import lineage_page

        write_text(html, lineage_page(found))
        print(html)
    if form is not None:
        print(in_standard(found, form, project), end="")
    elif as_json:
        import json

        print(json.dumps(found.as_lineage(), indent=1, sort_keys=True, ensure_ascii=False))
    elif html is None:
        _print_tree(records.tree(found))


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=NAMES, show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="The differences as JSON.")] = False,
) -> None:
    """Show how two artifacts differ: config, rows, code, environment, numerics, parents, scores. Exit code 1 if they do."""
    import json

    from pipelines.difference import compare, text

    project = _project_or_none()
    found = compare(_pedigree(project, first), _pedigree(project, second), project)
    print(json.dumps(found.as_json(), indent=1, ensure_ascii=False) if as_json else text(found, first, second))
    if not found.same:
        raise typer.Exit(1)


@app.command()
def verify(
    artifacts: Annotated[
        list[str] | None, typer.Argument(help="Artifacts or folders; all of the project when none is named.", show_default=False)
    ] = None,
    no_remote: Annotated[bool, typer.Option("--no-remote", help="Leave the DVC remote alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Hash everything again and check the chain of records: artifacts, exports, DVC's cache and remote."""
    import dataclasses
    import json

    from pipelines.verify import verify_folders, verify_project

    named = [Path(name) for name in artifacts or ()]
    if named and all(path.is_dir() for path in named):
        verdict = verify_folders(named)
    else:
        project = _project()
        addresses = [_address(project, name) for name in artifacts or ()]
        verdict = verify_project(project, addresses or None, remote=not no_remote)
    if as_json:
        found = [dataclasses.asdict(problem) for problem in verdict.problems]
        print(json.dumps({"problems": found, "summary": verdict.summary()}, indent=1))
    else:
        print("\n".join([*map(str, verdict.problems), verdict.summary()]))
    if verdict.problems:
        raise typer.Exit(1)


@app.command()
def export(
    artifact: Annotated[str, typer.Argument(help="Artifact: RECIPE/STAGE, a folder, or the start of an id.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet, or is empty.", show_default=False)],
) -> None:
    """Write an artifact as a flat Hugging Face folder, with a model card and its pedigree inside."""
    from pipelines.evaluations import evaluations_of
    from pipelines.export import export as export_artifact

    found = _artifact(artifact)
    name = "/".join(found.path.resolve().parts[-2:])
    written = export_artifact(found.path, name, folder, evaluations_of(_project_or_none(), found.record.content))
    print(f"{written}: {len(found.record.files)} files, every hash checked; the records are in {written / 'pedigree'}")


@app.command()
def report(recipe: Recipe, overrides: Overrides = None) -> None:
    """Write the report of a recipe: one self-contained HTML page."""
    from pipelines.report import write_report

    project = _project()
    print(write_report(project, _load(project, recipe, overrides)).relative_to(project.root))


@app.command()
def recipes() -> None:
    """List the recipes; one that cannot be read is listed with its problem."""
    from configs.document import ConfigError
    from configs.recipe import load_recipe, recipe_names

    project, cells = _project(), []
    for name in recipe_names(project.recipes):
        try:
            graph = load_recipe(project.recipes, name)
            cells.append((name, str(len(graph.nodes)), graph.description))
        except ConfigError as error:
            more = f" (and {len(error.problems) - 1} more problems)" if len(error.problems) > 1 else ""
            cells.append((name, "-", f"cannot be read: {error.problems[0]}{more}"))
    _table(("recipe", "stages", "what it is"), cells)


@app.command()
def doctor() -> None:
    """Check the installation: versions, engines, cores, GPUs, disk, remote; what is missing and how to get it."""
    from pipelines.doctor import main as examine

    raise typer.Exit(examine())


@app.command("compile")
def compile_(
    recipe: Annotated[list[str], typer.Argument(help="Recipes: names or paths.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Write the dvc.yaml and params.yaml of recipes, for use with plain `dvc repro`."""
    from configs.compile import write_compiled
    from configs.recipe import load_recipes

    project = _project()
    graphs = [graph for name in recipe for graph in load_recipes(project.recipes, name, overrides or ())]
    changed = write_compiled(project.root, {graph.recipe: graph for graph in graphs}.values())
    print("\n".join(changed) if changed else "nothing has changed")


@app.command(hidden=True)
def stage(address: str) -> None:
    """Run one compiled stage: the command of `dvc.yaml`, for `dvc repro`."""
    from pipelines.progress import Board, Display
    from pipelines.runs import stage_under_dvc

    board = Board(address.partition("/")[0], [(address, address, "")])
    _interrupt_on_sigterm()
    with Display(board):
        stage_under_dvc(_project(), address, watch=board.tell)


# --- shared by the commands --------------------------------------------------------------------------------------------


def _project() -> "Project":
    from configs.project import Project

    return Project.find()


def _open(project: "Project", recipe: str, overrides: Sequence[str] | None, execution: str | None) -> "RunContext":
    from pipelines.runs import open_run

    return open_run(project, recipe, overrides or (), profile=execution)


def _load(project: "Project", recipe: str, overrides: Sequence[str] | None) -> Any:
    from configs.recipe import load_recipes

    return load_recipes(project.recipes, recipe, overrides or ())[-1]


def _selection(
    context: "RunContext",
    only: Sequence[str] | None,
    start: Sequence[str] | None,
    until: Sequence[str] | None,
    force: Sequence[str] | None,
) -> tuple[frozenset[str], frozenset[str]]:
    from pipelines.runs import selected

    selection = selected(context.graph, only=only or (), start=start or (), until=until or ())
    return selection, _named("--force", context, force, selection)


def _named(option: str, context: "RunContext", names: Sequence[str] | None, selection: frozenset[str]) -> frozenset[str]:
    found = frozenset(context.graph.find(name).address for name in names or ())
    left = sorted(found - selection)
    if left:
        raise KeyError(f"{option} {', '.join(left)} is outside what --only, --from and --until select")
    return found


def _artifact(name: str) -> "Artifact":
    """An artifact by any of its names; a folder needs no project around it."""
    from pipelines.lineage import find_artifact

    return find_artifact(_project_or_none(), name)


def _project_or_none() -> "Project | None":
    from configs.project import Project, ProjectNotFound

    try:
        return Project.find()
    except ProjectNotFound:
        return None


def _pedigree(project: "Project | None", name: str) -> "Pedigree":
    from pipelines.names import find_pedigree

    return find_pedigree(project, name)


def _address(project: "Project", name: str) -> str:
    """`RECIPE/STAGE` of an artifact of this project, also of one that is too damaged to be opened."""
    if (project.artifact(name) / "record.json").is_file():
        return Path(name).as_posix()
    return _artifact(name).path.resolve().relative_to(project.artifacts).as_posix()


def _shown(context: "RunContext", node: Any) -> str:
    return node.name if node.recipe == context.graph.recipe else node.address


def _work(
    project: "Project", context: "RunContext", selection: frozenset[str], forced: frozenset[str], no_prefect: bool
) -> "list[StageEnd]":
    if no_prefect:
        from pipelines.runs import run_graph

        return run_graph(context, selection, forced)
    prefect_environment(project)
    from pipelines.flow import run_flow

    return run_flow(context, selection, forced)


def _tell_not_run(board: Any, ends: "Sequence[StageEnd]") -> None:
    from pipelines.runs import NotRun

    for end in ends:
        if isinstance(end, NotRun):
            board.tell(end.address, "skipped", end.because)


def _failures(context: "RunContext", ends: "Sequence[StageEnd]") -> list[str]:
    """One line per failed stage, and one on what becomes of the rest."""
    from pipelines.context import StageFailed
    from pipelines.ensure import Result

    failed = [end for end in ends if isinstance(end, StageFailed)]
    kept = sum(isinstance(end, Result) for end in ends)
    lines = [str(end) for end in failed]
    if len(ends) > kept:
        lines.append(f"{kept} of {len(ends)} stages are current and kept; the same command goes on from there")
    return lines


def _say_interrupted(context: "RunContext") -> None:
    if context.keep_jobs:
        print("interrupted. Jobs go on: `pedigree jobs` lists them, the same command re-attaches, `pedigree cancel` ends them.")
    else:
        print("interrupted. Jobs are ended; finished stages and checkpoints are kept. The same command goes on from there.")


def _interrupt_on_sigterm() -> None:
    """A polite kill (pre-emption, `timeout`) ends a run like Ctrl-C: jobs are ended, checkpoints kept."""
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _print_scores(project: "Project", context: "RunContext") -> None:
    """The table of scores: a row per policy, a column per task, each with its 95 % interval."""
    from pipelines.report import scores_of

    for name, scores in scores_of(project, context.graph).items():
        policies = scores["policies"]
        tasks = sorted({task for policy in policies.values() for task in policy["tasks"]})
        cells = [
            (label, *(_score(policy["tasks"].get(task)) for task in tasks), f"{policy['mean']:.3f}") for label, policy in policies.items()
        ]
        print(f"\n{name}")
        _table(("policy", *tasks, "mean"), cells)


def _score(value: dict[str, float] | None) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}] n={value['n']:.0f}" if value else "-"


def _write_report(project: "Project", context: "RunContext") -> None:
    from pipelines.report import write_report

    print(f"\nreport: {write_report(project, context.graph).relative_to(project.root)}")


def _print_report_path(project: "Project", context: "RunContext") -> None:
    from pipelines.report import report_path

    path = report_path(project, context.graph.recipe)
    said = path.relative_to(project.root) if path.exists() else f"`pedigree report {context.graph.source}` writes it"
    print(f"\nreport: {said}")


def _print_tree(root: "Ancestor") -> None:
    from rich.console import Console
    from rich.tree import Tree

    def words(found: "Ancestor") -> str:
        role = f"[dim]{found.role}:[/] " if found.role else ""
        again = " [dim](shown above)[/]" if found.repeated else ""
        record = found.record
        return f"{role}[bold]{found.address}[/] {record.kind} v{record.version} [cyan]{record.content[:12]}[/]{again}"

    def grow(branch: Tree, found: "Ancestor") -> Tree:
        for parent in found.parents:
            grow(branch.add(words(parent)), parent)
        return branch

    Console(highlight=False, soft_wrap=True).print(grow(Tree(words(root)), root))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content; on a terminal the last but wide ones wrap."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in header:
        table.add_column(name, overflow="fold", no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    console.print(table)


_STYLES = {"up to date": "green", "done": "green", "will run": "yellow", "cached": "cyan", "stale": "yellow", "depends": "dim"}


def _free(project: "Project") -> int:
    import shutil

    return shutil.disk_usage(project.root).free


def _exit_code(error: Exception) -> int | None:
    """2 for what the user must change, 1 for what went wrong on the way, None for bugs."""
    from configs.document import ConfigError
    from configs.project import ProjectNotFound
    from data.artifacts import ArtifactError
    from pipelines.context import StageFailed
    from pipelines.export import ExportError, UnknownFormat
    from pipelines.ledger import LedgerError
    from pipelines.openlineage import OpenLineageError
    from pipelines.status import NoSuchStage

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
        return 1
    wrong: tuple[type[Exception], ...] = (ConfigError, ProjectNotFound, NoSuchStage, ExportError, UnknownFormat, KeyError)
    if isinstance(error, wrong):
        return 2
    return (
        1
        if isinstance(error, (StageFailed, ArtifactError, LedgerError, OpenLineageError)) or type(error).__name__ == "PrefectUnavailable"
        else None
    )


def _message(error: Exception) -> str:
    if type(error).__name__ == "PrefectUnavailable":
        return f"Prefect failed: {error}\nFinished stages are kept. Type the command again, or add --no-prefect to do without it."
    if isinstance(error, OSError):
        return f"{error}: the project's folder must be writable and its disk must have room; nothing that was finished is lost"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


if __name__ == "__main__":
    main()
