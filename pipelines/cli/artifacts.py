"""The commands on artifacts and their records: lineage, diff, verify, export, reproduce, push, pull."""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.base.texts import command
from pipelines.cli import completion
from pipelines.cli.console import (
    From,
    Only,
    Overrides,
    Profile,
    Recipe,
    Until,
    interrupt_on_sigterm,
    one_line,
    opened_run,
    print_table,
    project_here,
    say,
    say_json,
)

if TYPE_CHECKING:
    from contextlib import ExitStack

    from configs.base.project import Project
    from pipelines.jobs.context import RunContext
    from pipelines.lineage.ancestry import Ancestor, Pedigree

commands = typer.Typer()
NAMES = "RECIPE/STAGE, a stage, a named model, a folder (also an exported one), the start of an id; NAME@REVISION of git."
Named = Annotated[str, typer.Argument(help=NAMES, show_default=False, autocompletion=completion.artifacts)]


@commands.command()
def lineage(
    artifact: Named,
    as_json: Annotated[bool, typer.Option("--json", help="Print all records and runs of the ancestry as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")] = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="openlineage|slsa|card|croissant", help="Print it in the format of a standard.")
    ] = None,
) -> None:
    """Show all that an artifact was made from, back to the raw sources.

    --format openlineage sends the events to OPENLINEAGE_URL, where that is set.
    """
    from pipelines.lineage import ancestry as records
    from pipelines.publish.export import in_standard

    project = _project_or_none()
    found = _pedigree(project, artifact)
    if html is not None:
        from data.artifacts.artifacts import write_text
        from pipelines.publish.page import lineage_page

        write_text(html, lineage_page(found))
        say(html)
    if form is not None:
        say(in_standard(found, form, project), end="")
    elif as_json:
        say_json(found.as_lineage(), sort_keys=True)
    elif html is None:
        _print_tree(records.tree(found))


@commands.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=NAMES, show_default=False, autocompletion=completion.artifacts)],
    second: Annotated[
        str, typer.Argument(metavar="B", help="What to compare it with.", show_default=False, autocompletion=completion.artifacts)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Show how two artifacts differ: config, rows, code, environment, numerics, parents, scores. Exit code 1 if they do."""
    from pipelines.lineage.difference import compare, text

    project = _project_or_none()
    found = compare(_pedigree(project, first), _pedigree(project, second), project)
    if as_json:
        say_json(found.as_json())
    else:
        say(text(found, first, second))
    if not found.same:
        raise typer.Exit(1)


@commands.command()
def verify(
    artifacts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Artifacts or folders; all of the project when none is named.", show_default=False, autocompletion=completion.artifacts
        ),
    ] = None,
    no_remote: Annotated[bool, typer.Option("--no-remote", help="Leave the DVC remote alone.")] = False,
    signer: Annotated[
        Path | None, typer.Option("--signer", metavar="KEY", help="Public key whose signature every exported folder must have.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Hash everything again and check the chain of records and the signatures: artifacts, exports, DVC's cache and remote."""
    import contextlib
    import dataclasses

    from configs.base.problems import UsageProblem
    from pipelines.cli.telling import Telling
    from pipelines.lineage.verify import verify_folders, verify_project
    from pipelines.quantities import size

    with contextlib.ExitStack() as stack, Telling() as telling:

        def told(count: int) -> None:
            telling(f"verifying: {size(count)} read")

        project, addresses, folders = _named_artifacts(artifacts or [], stack)
        exports = [folder for folder in folders if (folder / "pedigree").is_dir()]
        if signer is not None and (len(exports) != len(artifacts or []) or not exports):
            raise UsageProblem("--signer checks signatures, which exported folders have: name those and nothing else")
        signatures, forged = _signatures(exports, signer)
        if project is None:
            verdict = verify_folders(folders, told)
        else:
            verdict = verify_project(project, addresses if artifacts else None, folders=folders, remote=not no_remote, told=told)
    if as_json:
        found = [dataclasses.asdict(problem) for problem in verdict.problems]
        say_json({"problems": found, "signatures": signatures, "summary": verdict.summary()})
    else:
        said = [f"{folder}: {words}" for folder, words in signatures.items()]
        say("\n".join([*map(str, verdict.problems), *said, verdict.summary()]))
    if verdict.problems or forged:
        raise typer.Exit(1)


@commands.command()
def export(
    artifact: Named,
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet, or is empty.", show_default=False)],
    sign: Annotated[Path | None, typer.Option("--sign", metavar="KEY", help="Sign it with this private key (PEM, elliptic curve).")] = None,
) -> None:
    """Write an artifact as a flat Hugging Face folder, with a model card and its pedigree inside."""
    from data.artifacts.artifacts import SIGNATURE, open_artifact
    from pipelines.cli.telling import Telling
    from pipelines.lineage.evaluations import evaluations_of
    from pipelines.lineage.find import artifact_folder
    from pipelines.publish.export import export as export_artifact
    from pipelines.publish.signing import Signer

    signer = Signer(sign) if sign else None
    project = _project_or_none()
    with artifact_folder(project, artifact) as (path, name), Telling() as telling:
        record, scored = open_artifact(path).record, evaluations_of(project, open_artifact(path).record.content)
        written = export_artifact(path, name, folder, scored, project=project, signer=signer, told=telling.far)
    signed = f"the signature is {SIGNATURE}" if signer else "it is unsigned"
    say(f"{written}: {len(record.files)} files, every hash checked; the records are in {written / 'pedigree'}; {signed}.")
    say(f"{command('verify', written)} checks it again, on any machine.")


@commands.command()
def reproduce(
    model: Named,
    from_cache: Annotated[
        bool, typer.Option("--from-cache", help="Take ancestors that the cache or remote holds, verified; run the rest and MODEL.")
    ] = False,
    only: Annotated[str | None, typer.Option("--only", metavar="data", help="Only the data stages that were made without a model.")] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="STAGE", help="This stage of the ancestry alone, from its recorded inputs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse another environment than the recorded one.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Run this clone's code, not the recorded commit and patch.")] = False,
    execution: Profile = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run what this project did not make, without asking.")] = False,
    show_patch: Annotated[bool, typer.Option("--show-patch", help="With --dry-run: the text of the patches that would run.")] = False,
) -> None:
    """Make an artifact again from its records alone, and compare every stage with what was recorded.

    A model that this project did not make is shown first (code, patch, commands), and runs on a typed yes or with --trust.
    Exit code 0: all identical, or scores within the recipe's tolerance. 1: something is different. 2: it cannot begin.
    """
    from configs.base.problems import UsageProblem
    from pipelines.reproduce import reproduction as again

    if only not in (None, "data"):
        raise UsageProblem(f"--only {only}: the one choice is `data`; `--stage {only}` makes a single stage again")
    request = again.ReproductionRequest(model, from_cache, only == "data", stage, here, strict, execution, trust)
    project = project_here()
    if show_patch and not dry_run:
        raise UsageProblem("--show-patch shows and runs nothing: add --dry-run")
    if dry_run:
        _print_intents(project, request, show_patch)
        return
    interrupt_on_sigterm()
    try:
        outcome = again.reproduce(project, request, say, _ask if sys.stdin.isatty() and sys.stdout.isatty() else None)
    except KeyboardInterrupt:
        say("interrupted. Checkpoints are kept: type the same command again to go on.")
        raise typer.Exit(130) from None
    say()
    print_table(("stage", "verdict", "detail"), [(finding.address, finding.verdict, finding.detail) for finding in outcome.findings])
    say(f"\n{'reproduced' if outcome.passed else 'not reproduced'}; the record of it is {outcome.report.relative_to(project.root)}")
    if not outcome.passed:
        raise typer.Exit(1)


@commands.command()
def push(recipe: Recipe, overrides: Overrides = None) -> None:
    """Send a recipe's artifacts, the run cache and the code that made them to the DVC remote."""
    from pipelines.cli.progress import Display, watching
    from pipelines.lineage.ancestry import opened
    from pipelines.reproduce.reproduction import push_code
    from pipelines.run.runs import push as send

    project = project_here()
    context = opened_run(project, recipe, overrides, None)
    board = watching(context, context.graph.nodes)
    with Display(board):
        objects, entries = send(context)
    say(f"{objects} objects and {entries} entries of the run cache sent")
    made = [artifact.path for node in context.graph.nodes.values() if (artifact := opened(project, node))]
    for commit, said in push_code(project, made):
        say(f"code {commit[:12]}: {said}")


@commands.command()
def pull(recipe: Recipe, overrides: Overrides = None, only: Only = None, start: From = None, until: Until = None) -> None:
    """Bring the files of a recipe's finished stages from the DVC remote, every one hashed; run nothing."""
    from pipelines.run.runs import selected

    context = opened_run(project_here(), recipe, overrides, None)
    bring(context, selected(context.graph, only=only or (), start=start or (), until=until or ()))


def bring(context: "RunContext", selection: Collection[str]) -> None:
    """`pedigree pull`: exit code 1 where files of a finished stage could not be brought."""
    from pipelines.cli.progress import Display, watching
    from pipelines.jobs.context import StageFailed
    from pipelines.run.ensure import Result
    from pipelines.run.runs import pull as fetch

    board = watching(context, selection)
    interrupt_on_sigterm()
    try:
        with Display(board):
            ends = fetch(context, selection)
    except KeyboardInterrupt:
        say("interrupted. What has arrived is kept: type the same command again to go on.")
        raise typer.Exit(130) from None
    here = [end for end in ends if isinstance(end, Result)]
    others = "" if len(here) == len(ends) else f": {command('run', context.graph.source)} makes the others"
    say(f"{len(here)} of {len(ends)} stages are here{others}")
    for notice in context.ledger.notices:
        say(f"note: {notice}", file=sys.stderr)
    if any(isinstance(end, StageFailed) and end.cause != "not_finished" for end in ends):
        raise typer.Exit(1)


def _project_or_none() -> "Project | None":
    from configs.base.project import Project, ProjectNotFound

    try:
        return Project.find()
    except ProjectNotFound:
        return None


def _pedigree(project: "Project | None", name: str) -> "Pedigree":
    from pipelines.lineage.find import find_pedigree

    return find_pedigree(project, name)


def _named_artifacts(names: list[str], stack: "ExitStack") -> "tuple[Project | None, list[str], list[Path]]":
    """The project where one is needed, `RECIPE/STAGE`s of its artifacts (damaged ones too), and folders that lie elsewhere.

    Folders that stand for `NAME@REVISION` last as long as the stack.
    """
    from configs.base.project import Project, ProjectNotFound
    from pipelines.lineage.find import artifact_folder

    try:
        project = Project.find()
    except ProjectNotFound:
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
    say("\nIt can do all that you can do on this machine. Go on? Type yes: ", end="", flush=True)
    return sys.stdin.readline().strip() == "yes"


def _signatures(folders: list[Path], public_key: Path | None) -> tuple[dict[str, str], bool]:
    """What is to be said of the signature of each exported folder, and whether one that was asked for is missing or wrong."""
    from pipelines.publish.signing import NotSigned, check, is_signed

    said, forged = {}, False
    for folder in folders:
        if public_key is None:
            signed = "signed; --signer KEY checks by whom" if is_signed(folder) else "unsigned: nobody vouches for it"
        else:
            try:
                signed = f"signed with the key of {public_key.name}, {check(folder, public_key)} files"
            except NotSigned as error:
                signed, forged = f"REFUSED: {error}", True
        said[str(folder)] = signed
    return said, forged


def _print_intents(project: "Project", request: Any, show_patch: bool) -> None:
    """What `reproduce` would do, stage by stage, and what would stop it."""
    from pipelines.ledger.ledger import Ledger
    from pipelines.reproduce import reproduction as again
    from pipelines.reproduce.trust import is_own, review
    from pipelines.reproduce.work_tree import obstacle

    subject = again.read_subject(project, request.model)
    wanted = again.intents(subject, request)
    cells = [
        (
            intent.member.address,
            intent.action,
            "" if intent.action in ("restore", "leave out") else "this clone" if request.here else str(intent.member.code),
            (not request.here and intent.action.endswith("run") and obstacle(intent.member.code)) or "",
        )
        for intent in wanted
    ]
    say(again.environment_text(again.environment_changes(subject, wanted)))
    if show_patch or not is_own(Ledger(project), subject.md5):
        made = [intent.member for intent in wanted if intent.action != "leave out"]
        say(review(made, here=request.here, show_patch=show_patch))
    print_table(("stage", "would", "code", "obstacle"), cells)


def _print_tree(root: "Ancestor") -> None:
    """One line an artifact, whatever the width of the terminal: a long ancestry is deeper than that."""
    from rich.console import Console
    from rich.text import Text

    def words(found: "Ancestor") -> Text:
        """Texts of a record are somebody else's: they are shown as they are, no markup is read in them."""
        record = found.record
        parts = [(f"{found.role}: ", "dim")] if found.role else []
        parts += [(found.address, "bold"), (f" {record.kind} v{record.version} ", ""), (record.content[:12], "cyan")]
        parts += [(" (shown above)", "dim")] if found.repeated else []
        return Text.assemble(*((one_line(part), style) for part, style in parts))

    console = Console(highlight=False, soft_wrap=True)
    waiting: list[tuple[Ancestor, str, str]] = [(root, "", "")]
    while waiting:
        found, branch, below = waiting.pop()
        console.print(Text(branch) + words(found))
        last = found.parents[-1:]
        waiting += [
            (parent, below + ("└── " if parent is last[0] else "├── "), below + ("    " if parent is last[0] else "│   "))
            for parent in reversed(found.parents)
        ]
