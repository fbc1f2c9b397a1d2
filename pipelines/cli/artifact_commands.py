"""Artifact commands: lineage, diff, verify, export, reproduce, push, pull."""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.pipelines.cli import completion, options
from pedigree.pipelines.cli.console import echo, echo_json, one_line, print_table, requested
from pedigree.pipelines.quantities import counted, size

if TYPE_CHECKING:
    from contextlib import ExitStack

    from pedigree.pipelines.lineage.ancestry import Ancestor, Pedigree

commands = typer.Typer()
NAMES = "RECIPE/STAGE, a stage, a named model, an artifact or export folder, an id prefix, or NAME@REVISION (of git)."
Named = Annotated[str, typer.Argument(help=NAMES, show_default=False, autocompletion=completion.artifacts)]


@commands.command()
def lineage(
    artifact: Named,
    as_json: Annotated[bool, typer.Option("--json", help="Print all records and runs in the ancestry as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML page to this file.")] = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="openlineage|slsa|card|croissant", help="Print the lineage in a standard format.")
    ] = None,
) -> None:
    """Show an artifact's full ancestry, back to the raw sources.

    With --format openlineage, events are sent to OPENLINEAGE_URL if it is set, and printed otherwise.
    """
    from pedigree.pipelines.lineage.find import find_pedigree
    from pedigree.pipelines.publish.export import in_standard

    project = _project_or_none()
    found = find_pedigree(project, artifact)
    if html is not None:
        from pedigree.data.artifacts.artifacts import write_text
        from pedigree.pipelines.publish.page import lineage_page

        write_text(html, lineage_page(found))
        echo(html)
    if form is not None:
        echo(in_standard(found, form, project), end="")
    elif as_json:
        echo_json(found.as_lineage(), sort_keys=True)
    elif html is None:
        _print_tree(found)


@commands.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=NAMES, show_default=False, autocompletion=completion.artifacts)],
    second: Annotated[
        str, typer.Argument(metavar="B", help="Artifact to compare it with.", show_default=False, autocompletion=completion.artifacts)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Compare two artifacts.

    Shows differences in config, rows, code, environment, numerics, parents and scores. Exit code 1 if the artifacts differ.
    """
    import dataclasses

    from pedigree.pipelines.lineage.difference import compare, text
    from pedigree.pipelines.lineage.find import find_pedigree

    project = _project_or_none()
    found = compare(find_pedigree(project, first), find_pedigree(project, second), project)
    if as_json:
        echo_json(dataclasses.asdict(found))
    else:
        echo(text(found, first, second))
    if not found.same:
        raise typer.Exit(1)


@commands.command()
def verify(
    artifacts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Artifacts or folders; defaults to the whole project.", show_default=False, autocompletion=completion.artifacts
        ),
    ] = None,
    no_remote: Annotated[bool, typer.Option("--no-remote", help="Skip the DVC remote.")] = False,
    signer: Annotated[
        Path | None, typer.Option("--signer", metavar="KEY", help="Public key that must have signed every exported folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Rehash all files and check the chain of records.

    Checks artifacts, exported folders and their signatures, and DVC's cache and remote. Exit code 1 if a check fails.
    """
    import contextlib
    import dataclasses

    from pedigree.pipelines.cli.progress import StatusLine
    from pedigree.pipelines.lineage.verify import verify_folders, verify_project

    with contextlib.ExitStack() as stack, StatusLine() as telling:

        def show_bytes(count: int) -> None:
            telling(f"verifying: {size(count)} read")

        project, addresses, folders = _named_artifacts(artifacts or [], stack)
        exports = [folder for folder in folders if (folder / "pedigree").is_dir()]
        if signer is not None and (len(exports) != len(artifacts or []) or not exports):
            raise UsageProblem("--signer checks the signatures of exported folders: name only exported folders, at least one")
        signatures, forged = _signatures(exports, signer)
        if project is None:
            verdict = verify_folders(folders, show_bytes)
        else:
            verdict = verify_project(project, addresses if artifacts else None, folders=folders, remote=not no_remote, report=show_bytes)
    if as_json:
        found = [dataclasses.asdict(problem) for problem in verdict.problems]
        echo_json({"problems": found, "signatures": signatures, "summary": verdict.summary()})
    else:
        lines = [f"{folder}: {text}" for folder, text in signatures.items()]
        echo("\n".join([*map(str, verdict.problems), *lines, verdict.summary()]))
    if verdict.problems or forged:
        raise typer.Exit(1)


@commands.command()
def export(
    artifact: Named,
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", show_default=False)],
    sign: Annotated[Path | None, typer.Option("--sign", metavar="KEY", help="Sign with this private key (PEM, elliptic curve).")] = None,
) -> None:
    """Export an artifact as a Hugging Face folder.

    The folder includes a model card and the records of the artifact's whole ancestry.
    """
    from pedigree.data.artifacts.artifacts import SIGNATURE, open_artifact
    from pedigree.pipelines.cli.progress import StatusLine
    from pedigree.pipelines.lineage.evaluations import evaluations_of
    from pedigree.pipelines.lineage.find import artifact_folder
    from pedigree.pipelines.publish.export import export as export_artifact
    from pedigree.pipelines.publish.signing import Signer

    signer = Signer(sign) if sign else None
    project = _project_or_none()
    with artifact_folder(project, artifact) as (path, name), StatusLine() as telling:
        record, scored = open_artifact(path).record, evaluations_of(project, open_artifact(path).record.content)
        written = export_artifact(path, name, folder, scored, project=project, signer=signer, progress=telling.far)
    signed = f"signature: {SIGNATURE}" if signer else "unsigned"
    echo(f"exported {len(record.files)} files to {written}, all hashes verified; records: {written / 'pedigree'}; {signed}.")
    echo(f"Run {command('verify', written)} to check the folder on any machine.")


@commands.command()
def reproduce(
    model: Named,
    from_cache: Annotated[
        bool, typer.Option("--from-cache", help="Restore ancestors from the cache or remote, verified; run the rest and MODEL.")
    ] = False,
    only: Annotated[str | None, typer.Option("--only", metavar="data", help="Rebuild only the data stages that used no model.")] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="STAGE", help="Rebuild only this stage of the ancestry, from its recorded inputs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, without running it.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail unless the environment matches the recorded one.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Run the current code instead of the recorded code.")] = False,
    execution: options.Profile = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run code from outside this project without asking.")] = False,
    show_patch: Annotated[bool, typer.Option("--show-patch", help="With --dry-run, print the patches that would be applied.")] = False,
) -> None:
    """Rebuild an artifact from its records and compare every stage.

    For an artifact that this project did not make, the code, patch and commands are shown first; they run only after you type yes or
    with --trust. Exit code 0: all identical, or scores within the recipe's tolerance. 1: a stage differs. 2: cannot start.
    """
    from pedigree.pipelines.reproduce import reproduction as again

    if only not in (None, "data"):
        raise UsageProblem(f"--only {only}: the only valid value is `data`; use `--stage {only}` to rebuild a single stage")
    request = again.ReproductionRequest(model, from_cache, only == "data", stage, here, strict, execution, trust)
    project = Project.find()
    if show_patch and not dry_run:
        raise UsageProblem("--show-patch requires --dry-run")
    if dry_run:
        _print_intents(project, request, show_patch)
        return
    try:
        outcome = again.reproduce(project, request, echo, _ask if sys.stdin.isatty() and sys.stdout.isatty() else None)
    except KeyboardInterrupt:
        echo("interrupted; checkpoints are kept. Run the same command again to resume.")
        raise typer.Exit(130) from None
    echo()
    print_table(("stage", "verdict", "detail"), [(finding.address, finding.verdict, finding.detail) for finding in outcome.findings])
    echo(f"\n{'reproduced' if outcome.passed else 'not reproduced'}; report: {outcome.report.relative_to(project.root)}")
    if not outcome.passed:
        raise typer.Exit(1)


@commands.command()
def push(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    inputs: Annotated[bool, typer.Option("--inputs", help="Also upload the files and folders that its sources name.")] = False,
) -> None:
    """Upload a recipe's artifacts to the DVC remote.

    Also uploads the run cache and the code that produced the artifacts. With --inputs, a clone can rebuild everything from the remote.
    """
    from pedigree.pipelines.cli.progress import Display, watching
    from pedigree.pipelines.lineage import ancestry
    from pedigree.pipelines.reproduce.reproduction import push_code
    from pedigree.pipelines.run.exchange import push as send
    from pedigree.pipelines.run.exchange import push_inputs
    from pedigree.pipelines.run.opening import open_run

    project = Project.find()
    context = open_run(project, requested(recipe, overrides))
    board = watching(context, context.graph.nodes)
    with Display(board):
        objects, entries = send(context)
        raw = push_inputs(context) if inputs else None
    echo(f"sent {objects} objects and {entries} run-cache entries" + (f", and {counted(raw.moved, 'file')} of raw inputs" if raw else ""))
    if raw:
        _print_left(raw.left)
    elif any(node.files for node in context.graph.nodes.values()):
        echo(f"raw inputs were not sent; {command('push', recipe, '--inputs')} sends those of this recipe too")
    made = [artifact.path for node in context.graph.nodes.values() if (artifact := ancestry.opened(project, node))]
    for commit, outcome in push_code(project, made):
        echo(f"code {commit[:12]}: {outcome}")


@commands.command()
def pull(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    only: options.Only = None,
    start: options.From = None,
    until: options.Until = None,
    inputs: Annotated[bool, typer.Option("--inputs", help="Also download raw inputs that are not on this machine.")] = False,
) -> None:
    """Download a recipe's finished artifacts from the DVC remote.

    Every file is hashed. No stage runs.
    """
    from pedigree.pipelines.cli.progress import Display, watching
    from pedigree.pipelines.jobs.context import StageFailed
    from pedigree.pipelines.run.ensure import Result
    from pedigree.pipelines.run.exchange import pull as fetch
    from pedigree.pipelines.run.exchange import pull_inputs
    from pedigree.pipelines.run.opening import open_run
    from pedigree.pipelines.run.plans import selection

    request = requested(recipe, overrides, None, only, start, until)
    context = open_run(Project.find(), request)
    chosen = selection(context, request)[0]
    raw = pull_inputs(context, chosen, fetch=inputs)
    if raw.moved:
        echo(f"fetched {counted(raw.moved, 'raw input')}")
    _print_left(raw.left)
    if raw.left and not inputs:
        echo(f"{command('pull', recipe, '--inputs')} fetches them from the remote", file=sys.stderr)
    board = watching(context, chosen)
    try:
        with Display(board):
            ends = fetch(context, chosen)
    except KeyboardInterrupt:
        echo("interrupted; downloaded files are kept. Run the same command again to resume.")
        raise typer.Exit(130) from None
    here = [end for end in ends if isinstance(end, Result)]
    others = "" if len(here) == len(ends) else f"; {command('run', context.graph.source)} builds the rest"
    echo(f"{len(here)} of {len(ends)} stages are available locally{others}")
    for notice in context.ledger.notices:
        echo(f"note: {notice}", file=sys.stderr)
    if any(isinstance(end, StageFailed) and end.cause != "not_finished" for end in ends):
        raise typer.Exit(1)


def _print_left(lines: Collection[str]) -> None:
    for line in lines:
        echo(f"note: {line}", file=sys.stderr)


def _project_or_none() -> "Project | None":
    try:
        return Project.find()
    except UsageProblem:
        return None


def _named_artifacts(names: list[str], stack: "ExitStack") -> "tuple[Project | None, list[str], list[Path]]":
    """Resolve names to the project (None if not needed), addresses of its artifacts (even damaged ones), and folders outside it.

    Temporary folders for `NAME@REVISION` are removed when the stack closes.
    """
    from pedigree.pipelines.lineage.find import artifact_folder

    try:
        project = Project.find()
    except UsageProblem:
        if not names or not all(Path(name).is_dir() for name in names):
            raise
        project = None
    addresses, folders = [], []
    for name in names:
        if project and (project.artifact(name) / "record.json").is_file():
            folder = project.artifact(name)
        else:
            folder = Path(name) if Path(name).is_dir() else stack.enter_context(artifact_folder(project, name))[0]
        if project and folder.resolve().is_relative_to(project.artifacts):
            addresses.append(folder.resolve().relative_to(project.artifacts).as_posix())
        else:
            folders.append(folder)
    return project, addresses, folders


def _ask() -> bool:
    echo("\nThis code runs with all your permissions on this machine. Type yes to continue: ", end="", flush=True)
    return sys.stdin.readline().strip() == "yes"


def _signatures(folders: list[Path], public_key: Path | None) -> tuple[dict[str, str], bool]:
    """Return the signature status of each exported folder, and whether a required signature is missing or invalid."""
    from pedigree.data.store.untrusted import ArtifactError
    from pedigree.pipelines.publish.signing import check, is_signed

    found, forged = {}, False
    for folder in folders:
        if public_key is None:
            signed = "signed; use --signer KEY to verify the signer" if is_signed(folder) else "unsigned"
        else:
            try:
                signed = f"signature matches {public_key.name}, {check(folder, public_key)} files verified"
            except ArtifactError as error:
                signed, forged = f"REFUSED: {error}", True
        found[str(folder)] = signed
    return found, forged


def _print_intents(project: "Project", request: Any, show_patch: bool) -> None:
    """Print what `reproduce` would do for each stage, and any obstacles."""
    from pedigree.pipelines.ledger.ledger import Ledger
    from pedigree.pipelines.reproduce import reproduction as again
    from pedigree.pipelines.reproduce.trust import is_own, review
    from pedigree.pipelines.reproduce.work_tree import obstacle

    subject = again.read_subject(project, request.model)
    wanted = again.intents(subject, request)
    cells = [
        (
            intent.member.address,
            intent.action,
            "" if intent.action in ("restore", "leave out") else "current" if request.here else str(intent.member.code),
            (not request.here and intent.action.endswith("run") and obstacle(intent.member.code)) or "",
        )
        for intent in wanted
    ]
    echo(again.environment_text(again.environment_changes(wanted)))
    if subject.inherited:
        echo(subject.inherited_text())
    if show_patch or not is_own(Ledger(project), subject.md5):
        made = [intent.member for intent in wanted if intent.action != "leave out"]
        echo(review(made, here=request.here, show_patch=show_patch))
    print_table(("stage", "action", "code", "obstacle"), cells)


def _print_tree(pedigree: "Pedigree") -> None:
    """Print one line per artifact without wrapping, because a deep ancestry is indented past the terminal width."""
    from rich.console import Console
    from rich.text import Text

    from pedigree.pipelines.lineage.ancestry import walk

    def line(found: "Ancestor") -> Text:
        """Record fields are untrusted, so Rich markup in them is not interpreted."""
        record = found.record
        parts = [(f"{found.role}: ", "dim")] if found.role else []
        parts += [(found.address, "bold"), (f" {record.kind} v{record.version} ", ""), (record.content[:12], "cyan")]
        parts += [(" (shown above)", "dim")] if found.repeated else []
        return Text.assemble(*((one_line(part), style) for part, style in parts))

    console = Console(highlight=False, soft_wrap=True)
    columns: list[str] = []
    for found in walk(pedigree):
        del columns[max(0, found.depth - 1) :]
        branch = ("└── " if found.last else "├── ") if found.depth else ""
        console.print(Text("".join(columns) + branch) + line(found))
        columns += ["    " if found.last else "│   "] if found.depth else []
