"""Row commands: trace and forget. Both are read-only."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.pipelines.cli import completion
from pedigree.pipelines.cli.console import echo, for_programs, print_table
from pedigree.pipelines.cli.options import AsJson
from pedigree.pipelines.quantities import counted, duration

if TYPE_CHECKING:
    from pedigree.pipelines.lineage.trace import RowQuery, Trace
    from pedigree.pipelines.maintain.forget import Again, Forgetting
    from pedigree.pipelines.publish.attribution import Origin, TraceResult

commands = typer.Typer()
MOST = 20
"""Maximum rows of a printed table; the JSON output has all of them."""
Row = Annotated[str | None, typer.Argument(metavar="ROW", help="Row id or id prefix.", show_default=False)]
AsText = Annotated[bool, typer.Option("--text", help="ROW is text of the row (quoted), not an id.")]
File = Annotated[Path | None, typer.Option("--file", metavar="FILE", help="Read the text from this file instead of ROW.")]
Contains = Annotated[bool, typer.Option("--contains", help="Match rows that contain the text (at least 20 characters).")]


@commands.command()
def trace(
    row: Row = None,
    as_text: AsText = False,
    file: File = None,
    contains: Contains = False,
    within: Annotated[
        list[str] | None,
        typer.Option("--in", metavar="ADDRESS", help="Search only this artifact. Repeatable.", autocompletion=completion.artifacts),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find a row: where it is used or dropped, and in which models.

    Shows the artifacts that contain or dropped it, the reasons, and how it reached each model. Text matching ignores case and
    whitespace. Exit code 1 if no artifact contains or dropped the row.
    """
    from pedigree.pipelines.publish.attribution import trace_result

    with for_programs(as_json) as emit:
        project, wanted = Project.find(), _wanted(row, as_text, file, contains)
        found = _traced(project, wanted, within or ())
        result = trace_result(project, found)
        emit("trace", result) if as_json else _print_trace(wanted, found, result)
        if not found.found:
            raise typer.Exit(1)


@commands.command()
def forget(row: Row = None, as_text: AsText = False, file: File = None, contains: Contains = False, as_json: AsJson = False) -> None:
    """Show what it takes to remove a row from all artifacts.

    Lists the stages to rebuild, how long they took last time, and the recipe changes that exclude the row. Changes nothing. Exit code 1
    if no artifact contains or dropped the row.
    """
    from pedigree.pipelines.maintain.forget import forget as without

    with for_programs(as_json) as emit:
        project, wanted = Project.find(), _wanted(row, as_text, file, contains)
        found = _traced(project, wanted, ())
        answer = without(project, found)
        emit("forget", answer) if as_json else _print_forgetting(wanted, found, answer)
        if not found.found:
            raise typer.Exit(1)


def _wanted(row: str | None, as_text: bool, file: Path | None, contains: bool) -> "RowQuery":
    from pedigree.data.store.untrusted import LONGEST_LINE, ArtifactError, read_plain
    from pedigree.pipelines.lineage.trace import RowQuery

    if (row is None) == (file is None):
        raise UsageProblem("specify one row: its id, its text with --text, or a text file with --file")
    if row is not None and not as_text:
        if contains:
            raise UsageProblem("--contains requires --text or --file")
        return RowQuery(id=row)
    if file is None:
        return RowQuery(text=row or "", contains=contains)
    try:
        return RowQuery(text=read_plain(file, LONGEST_LINE).decode(), contains=contains)
    except (ArtifactError, OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"--file {file} cannot be read as text: specify a plain UTF-8 file with the text of the row") from error


def _traced(project: "Project", wanted: "RowQuery", within: Sequence[str]) -> "Trace":
    from pedigree.pipelines.cli.progress import StatusLine
    from pedigree.pipelines.lineage.trace import trace as look

    with StatusLine() as telling:
        return look(project, wanted, within, telling)


def _print_trace(wanted: "RowQuery", found: "Trace", result: "TraceResult") -> None:
    _print_found(wanted, found)
    for one in result.brought_in:
        where = " or ".join(map(_origin_text, one.origins)) or f"{one.source}, generated in this project"
        echo(f"{one.address} imported it from {where}")
    if found.places:
        echo()
        _print_some(("artifact", "type", "rows", "details"), [_place_cells(place) for place in found.places])
    if found.dropped:
        echo()
        cells = [(drop.address, drop.id, drop.reason, drop.detail) for drop in found.dropped]
        _print_some(("dropped by", "row", "reason", "evidence"), cells)
    if found.models:
        echo()
        cells = [(one.address, one.content[:12], one.how + ("" if one.certain else ", uncertain"), _way(one.way)) for one in found.models]
        _print_some(("model", "content", "how", "path"), cells)
    others = [one.address for one in found.reached if one not in found.models]
    if others:
        echo(f"\nOther artifacts derived from it or from these models: {_some(others)}.")
    _print_not_looked_in(found)


def _print_not_looked_in(found: "Trace") -> None:
    if found.not_looked_in:
        echo(f"\nNot searched, {len(found.not_looked_in)}:")
        _print_some(("artifact", "why"), list(found.not_looked_in.items()))


def _print_found(wanted: "RowQuery", found: "Trace") -> None:
    if not found.found:
        searched = f"searched {counted(found.looked_in, 'artifact')}" if found.looked_in else "no data artifacts are available here"
        echo(f"row not found: {searched}{'; --text finds a row by its text' if wanted.id else ''}")
    elif len(found.ids) == 1:
        echo(f"row {found.ids[0]}")
    elif found.ids:
        echo(f"{len(found.ids)} rows: {_some(found.ids)}")
    else:
        echo("an unreadable row without an id")


def _place_cells(place: Any) -> tuple[str, str, str, str]:
    if place.scores:
        return place.address, place.type, str(len(place.ids)), _some([f"{one.policy} {one.score}" for one in place.scores])
    answered = _some([f"{one.label} ({one.address or 'not in this project'}, {one.content[:12]})" for one in place.policies])
    return place.address, place.type, str(len(place.ids)), f"answers of {answered}" if place.policies else _some(place.ids)


def _origin_text(origin: "Origin") -> str:
    written = f", written by {', '.join(origin.generators)}" if origin.generators else ""
    return f"{origin.name} (license {' or '.join(origin.licences)}{written})"


def _way(addresses: Sequence[str]) -> str:
    """Join addresses, with the recipe given only where it changes."""
    words, before = [], ""
    for address in addresses:
        recipe, _, stage = address.partition("/")
        words.append(stage if recipe == before else address)
        before = recipe
    return " > ".join(words)


def _print_forgetting(wanted: "RowQuery", found: "Trace", answer: "Forgetting") -> None:
    from pedigree.pipelines.maintain.forget import PARTS

    _print_found(wanted, found)
    if found.found and not answer.changes:
        echo(_unchanged(found, answer))
    for part in PARTS:
        some = [one for one in answer.again if one.part == part]
        if some:
            echo(f"\nTo rebuild, {part}:")
            cells = [_again_cells(one) for one in some]
            filled = [number for number in range(len(AGAIN)) if any(row[number] for row in cells)]
            print_table([AGAIN[number] for number in filled], [[row[number] for number in filled] for row in cells])
    _print_sum(answer)
    _print_change(found, answer)
    _print_not_looked_in(found)


def _unchanged(found: "Trace", answer: "Forgetting") -> str:
    """Explain why no recipe change is suggested."""
    if answer.missing:
        recipe, _, variant = answer.missing[0].partition("/")[0].partition("+")
        pull = f"run {command('pull', recipe)}{' with the overrides of that variant' if variant else ''}"
        return f"The artifact that imported it is missing or damaged: {pull}, then retry."
    if answer.again:
        return "No stage imports it, so no filter can exclude it."
    where = "No recipe stage imports it anymore" if found.places else "No artifact contains it"
    return f"{where}, so nothing needs a rebuild. The evidence of dropped rows includes their first characters."


AGAIN = ("stage", "kind", "why", "took", "GPU-hours", "named")


def _again_cells(one: "Again") -> tuple[str, ...]:
    took = "?" if one.seconds is None else duration(one.seconds)
    return one.address, one.kind, one.why, took, "" if one.gpu_hours is None else f"{one.gpu_hours:.2f}", ", ".join(one.names)


def _print_sum(answer: "Forgetting") -> None:
    if answer.again:
        known = [one.seconds for one in answer.again if one.seconds is not None]
        hours = sum(one.gpu_hours or 0 for one in answer.again)
        gpus = f", {hours:.2f} GPU-hours" if hours else ""
        echo(f"\n{counted(len(answer.again), 'stage')} to rebuild; the last runs took {duration(sum(known))} in total{gpus}.")
    if answer.unmade:
        echo(f"Affected, but not built or not available here: {_some(answer.unmade)}.")
    if answer.strays:
        echo(f"Contain the row or derive from it, but belong to no current recipe: {_some(answer.strays)}.")
    for name, why in answer.unread.items():
        echo(f"{name} cannot be read and may affect more artifacts: {why}")


def _print_change(found: "Trace", answer: "Forgetting") -> None:
    if not answer.changes:
        return
    echo("\nNothing was changed. To exclude the row, add to the recipes:")
    for change in answer.changes:
        echo(f"  {change.recipe}, stage {change.stage}:  {change.text}")
    planned = " and ".join(command("plan", name) for name in dict.fromkeys(change.recipe for change in answer.changes))
    echo(f"{planned} should then list the same stages.")
    for copy in found.copies:
        echo(f"A duplicate of it remains: {copy}.")
    echo("Copies in the source, caches, exports and pushed data are not tracked here and remain.")


def _print_some(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_table(header, rows[:MOST])
    if len(rows) > MOST:
        echo(f"... and {len(rows) - MOST} more; --json has all")


def _some(words: Sequence[str]) -> str:
    """Join the first few of a list."""
    shown = [*words[:5], *([f"... and {len(words) - 5} more"] if len(words) > 5 else [])]
    return ", ".join(shown)
