"""The commands on single rows: trace, forget. Neither changes anything."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.base.texts import command
from pipelines.cli import completion
from pipelines.cli.console import AsJson, for_programs, print_table, project_here, say

if TYPE_CHECKING:
    from configs.base.project import Project
    from pipelines.lineage.trace import Trace, Wanted
    from pipelines.maintain.forget import Again, Forgetting
    from pipelines.publish.attribution import Origin

commands = typer.Typer()
MOST = 20
"""Lines of a table in words; the JSON form has all."""
Row = Annotated[str | None, typer.Argument(metavar="ROW", help="Id of a row, or its start.", show_default=False)]
AsText = Annotated[bool, typer.Option("--text", help="ROW is a text of the row, in quotes, and no id.")]
File = Annotated[Path | None, typer.Option("--file", metavar="FILE", help="A file that holds the text, instead of ROW.")]
Contains = Annotated[bool, typer.Option("--contains", help="The text, of 20 characters at least, is a part of one of the row's.")]


@commands.command()
def trace(
    row: Row = None,
    as_text: AsText = False,
    file: File = None,
    contains: Contains = False,
    within: Annotated[
        list[str] | None,
        typer.Option("--in", metavar="ADDRESS", help="Look in this artifact alone. Repeatable.", autocompletion=completion.artifacts),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where a row stands, where it was dropped and why, and which models were given it, by what way.

    Texts are compared without case and white space. Exit code 1 if nothing here holds or dropped it.
    """
    from pipelines.cli.documents import trace_document

    with for_programs(as_json) as tell:
        project, wanted = project_here(), _wanted(row, as_text, file, contains)
        found = _traced(project, wanted, within or ())
        origins = _origins(project, found)
        tell(trace_document(found, origins))
        if not as_json:
            _print_trace(found, origins)
        if not found.found:
            raise typer.Exit(1)


@commands.command()
def forget(row: Row = None, as_text: AsText = False, file: File = None, contains: Contains = False, as_json: AsJson = False) -> None:
    """Show what would have to be made again without a row, what that took last time, and what to write in the recipe. Changes nothing.

    Exit code 1 if nothing here holds or dropped it.
    """
    from pipelines.cli.documents import forget_document
    from pipelines.maintain.forget import forget as without

    with for_programs(as_json) as tell:
        project, wanted = project_here(), _wanted(row, as_text, file, contains)
        found = _traced(project, wanted, ())
        answer = without(project, found)
        tell(forget_document(found, answer))
        if not as_json:
            _print_forgetting(found, answer)
        if not found.found:
            raise typer.Exit(1)


def _wanted(row: str | None, as_text: bool, file: Path | None, contains: bool) -> "Wanted":
    from configs.base.problems import UsageProblem
    from data.store.untrusted import LONGEST_LINE, ArtifactError, read_plain
    from pipelines.lineage.trace import Wanted

    if (row is None) == (file is None):
        raise UsageProblem("give one row: its id, a text with --text, or a file that holds the text with --file")
    if row is not None and not as_text:
        if contains:
            raise UsageProblem("--contains is said of a text: add --text, or give --file")
        return Wanted(id=row)
    if file is None:
        return Wanted(text=row or "", contains=contains)
    try:
        return Wanted(text=read_plain(file, LONGEST_LINE).decode(), contains=contains)
    except (ArtifactError, OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"--file {file} cannot be read, or holds no text: name a plain file with the text of the row") from error


def _traced(project: "Project", wanted: "Wanted", within: Sequence[str]) -> "Trace":
    from pipelines.cli.telling import Telling
    from pipelines.lineage.trace import trace as look

    with Telling() as telling:
        return look(project, wanted, within, telling)


def _origins(project: "Project", found: "Trace") -> "dict[tuple[str, str], list[Origin]]":
    """(address, source) of the stages that brought it in → where it may come from."""
    from pipelines.lineage.ancestry import read_pedigree
    from pipelines.publish.attribution import origins_of_rows

    return {
        (address, source): origins_of_rows(read_pedigree(project.artifact(address)), source, project) for address, source in found.sources()
    }


def _print_trace(found: "Trace", origins: "dict[tuple[str, str], list[Origin]]") -> None:
    _print_found(found)
    for (address, source), where in origins.items():
        say(f"{address} has it from {' or '.join(map(_origin_text, where)) or f'{source}, which is made here'}")
    if found.places:
        say()
        _print_some(("stands in", "type", "rows", "which"), [_place_cells(place) for place in found.places])
    if found.dropped:
        say()
        cells = [(drop.address, drop.id, drop.reason, drop.detail) for drop in found.dropped]
        _print_some(("dropped by", "row", "reason", "evidence"), cells)
    if found.models:
        say()
        cells = [(one.address, one.content[:12], one.how + ("" if one.certain else ", perhaps"), _way(one.way)) for one in found.models]
        _print_some(("model", "content", "how", "way"), cells)
    others = [one.address for one in found.reached if one not in found.models]
    if others:
        say(f"\nMade from it or from these models, too: {_some(others)}.")
    _print_not_looked_in(found)


def _print_not_looked_in(found: "Trace") -> None:
    if found.not_looked_in:
        say(f"\nNot looked in, {len(found.not_looked_in)}:")
        _print_some(("artifact", "why"), list(found.not_looked_in.items()))


def _print_found(found: "Trace") -> None:
    if not found.found:
        say(f"none of the {found.looked_in} artifacts of rows that are here holds it or has dropped it")
    elif len(found.ids) == 1:
        say(f"row {found.ids[0]}")
    elif found.ids:
        say(f"{len(found.ids)} rows: {_some(found.ids)}")
    else:
        say("a row that never had an id: it could not be read")


def _place_cells(place: Any) -> tuple[str, str, str, str]:
    if place.scores:
        return place.address, place.type, str(len(place.ids)), _some([f"{policy} {score}" for _, policy, score in place.scores])
    answered = _some([f"{label} ({address or 'unknown here'}, {content[:12]})" for label, address, content in place.policies])
    return place.address, place.type, str(len(place.ids)), f"answers of {answered}" if place.policies else _some(place.ids)


def _origin_text(origin: "Origin") -> str:
    written = f", written by {', '.join(origin.generators)}" if origin.generators else ""
    return f"{origin.name} (licence {' or '.join(origin.licences)}{written})"


def _way(addresses: Sequence[str]) -> str:
    """The recipe of a stage stands only where it is another one than before."""
    words, before = [], ""
    for address in addresses:
        recipe, _, stage = address.partition("/")
        words.append(stage if recipe == before else address)
        before = recipe
    return " > ".join(words)


def _print_forgetting(found: "Trace", answer: "Forgetting") -> None:
    from pipelines.maintain.forget import PARTS

    _print_found(found)
    if found.found and not answer.changes:
        say(_unchanged(found, answer))
    for part in PARTS:
        some = [one for one in answer.again if one.part == part]
        if some:
            say(f"\nWould be made again, {part}:")
            cells = [_again_cells(one) for one in some]
            filled = [number for number in range(len(AGAIN)) if any(row[number] for row in cells)]
            print_table([AGAIN[number] for number in filled], [[row[number] for number in filled] for row in cells])
    _print_sum(answer)
    _print_change(found, answer)
    _print_not_looked_in(found)


def _unchanged(found: "Trace", answer: "Forgetting") -> str:
    """Why there is nothing to write in a recipe."""
    if answer.missing:
        recipe, _, variant = answer.missing[0].partition("/")[0].partition("+")
        pull = command("pull", recipe) + (" with the overrides of that variant" if variant else "")
        return f"The stage that brought it in is not here, or damaged: {pull}, then ask again."
    if answer.again:
        return "No stage that brings rows in has it: no filter would leave it out."
    where = "No stage of a recipe brings it in any more" if found.places else "It stands in no artifact that a stage brought in"
    return f"{where}: nothing would be made again. What evidence says of dropped rows holds their first characters."


AGAIN = ("stage", "kind", "why", "took", "GPU-hours", "named")


def _again_cells(one: "Again") -> tuple[str, ...]:
    from pipelines.quantities import duration

    took = "?" if one.seconds is None else duration(one.seconds)
    return one.address, one.kind, one.why, took, "" if one.gpu_hours is None else f"{one.gpu_hours:.2f}", ", ".join(one.names)


def _print_sum(answer: "Forgetting") -> None:
    from pipelines.quantities import counted, duration

    if answer.again:
        known = [one.seconds for one in answer.again if one.seconds is not None]
        hours = sum(one.gpu_hours or 0 for one in answer.again)
        gpus = f", {hours:.2f} GPU-hours" if hours else ""
        say(f"\n{counted(len(answer.again), 'stage')}; the last time they took {duration(sum(known))} one after another{gpus}.")
    if answer.unmade:
        say(f"Below it, and not made or not here: {_some(answer.unmade)}.")
    if answer.strays:
        say(f"No recipe makes these any more, and they hold the row or were made from it: {_some(answer.strays)}.")
    for name, why in answer.unread.items():
        say(f"{name} cannot be read, and may make more of it: {why}")


def _print_change(found: "Trace", answer: "Forgetting") -> None:
    if not answer.changes:
        return
    say("\nNothing was changed. To leave it out, write in the recipes:")
    for change in answer.changes:
        say(f"  {change.recipe}, stage {change.stage}:  {change.text}")
    planned = " and ".join(command("plan", name) for name in dict.fromkeys(change.recipe for change in answer.changes))
    say(f"{planned} shows the same stages then.")
    for copy in found.copies:
        say(f"Another row like it stays, for whose sake it was dropped elsewhere: {copy}.")
    say("The source still has it, so have caches, exports and what was pushed; the records here name none of those.")


def _print_some(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_table(header, rows[:MOST])
    if len(rows) > MOST:
        say(f"... and {len(rows) - MOST} more; --json has all")


def _some(words: Sequence[str]) -> str:
    """The first few of many."""
    shown = [*words[:5], *([f"... and {len(words) - 5} more"] if len(words) > 5 else [])]
    return ", ".join(shown)
