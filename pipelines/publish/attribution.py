"""What an artifact goes back to that others have made, from its records: models, rows, and what answered or judged; who wrote the rows, how
many there are of each source, and what all licences together ask for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from configs.base.document import ConfigError
from configs.base.licenses import CONDITIONS, UNKNOWN, conditions
from configs.base.packaged import ASSETS
from configs.base.project import Project
from configs.language.recipe import load_recipe, recipe_names
from configs.rows.datasets import generators_of, licences_of, title
from data.artifacts.artifacts import Record, Run
from data.sources.row_files import ending
from pipelines.lineage.ancestry import Pedigree

Part = Literal["model", "data", "benchmark"]
PARTS = {"model": "model", "data": "rows", "benchmark": "measured against only"}
NO_ADVICE = (
    "This list was made from records and is no legal advice. What counts is the text of each licence; what a table of well-known ones says "
    "of it is a reading aid."
)


@dataclass(frozen=True)
class Origin:
    """Something that others have made, and that an artifact goes back to."""

    name: str
    part: Part
    """`benchmark`: its items are measured against, and nothing is made from them."""
    licences: tuple[str, ...]
    """All that are stated for it; `unknown` alone where none is."""
    generators: tuple[str, ...] = ()
    """Models that are said to have written its answers."""
    rows: int | None = None
    """That were prepared of it; None where nobody counted them apart, and of models."""


def origins(pedigree: Pedigree, project: Project | None = None) -> list[Origin]:
    """Everything from outside that an artifact goes back to, each once, sorted.

    A licence may be stated or put right after the artifact was made: what the project's recipes say now counts beside what was recorded.

    Args:
        pedigree: of the artifact.
        project: whose recipes are asked; None: the records alone.
    """
    made = pedigree.material()
    planted = {given.producer for found in made if _makes_rows(found.record) for given in found.record.inputs}
    stated: dict[tuple[Part, str], _Stated] = {}
    for found in made:
        now = _stated_now(project, found) if project else _Said({}, {})
        counts = rows_of(found.record)
        for name in dict.fromkeys(filter(None, map(title, sources_of(found.record)))):
            part: Part = "model" if found.record.kind == "source_model" else "data"
            if part == "data" and not _makes_rows(found.record) and found.id not in planted:
                part = "benchmark"
            entry = stated.setdefault((part, name), _Stated(set(), set(), []))
            entry.licences.update(*(_recorded(source, found.run) for source in sources_of(found.record) if title(source) == name))
            entry.licences.update(now.licences.get(name, ()))
            entry.generators.update(found.run.generators.get(name, ()), now.generators.get(name, ()))
            entry.rows.append(counts.get(name))
        if not found.record.inputs and found.record.kind not in ("source_model", "prepare_data"):
            stated.setdefault(("data", found.address), _Stated(set(), set(), [None]))  # nobody here knows what it brings in
    order = list(PARTS)
    return [
        Origin(name, part, tuple(sorted(said.licences - {UNKNOWN})) or (UNKNOWN,), tuple(sorted(said.generators)), said.total)
        for (part, name), said in sorted(stated.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1]))
    ]


def origins_of_rows(pedigree: Pedigree, name: str, project: Project | None = None) -> list[Origin]:
    """Where rows of one name come from that a stage has brought in: several, where nothing tells which of its sources they are of, and none
    where a rule made them.

    Args:
        pedigree: of what the stage made.
        name: the rows' `source`.
        project: see `origins`.
    """
    titles = {title(source) for source in brought(sources_of(pedigree.record), name)}
    return [origin for origin in origins(pedigree, project) if origin.name in titles]


def brought(sources: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """Of the sources of a stage those from which rows of this name may come: the one that it is the name of, else, as rows may say for
    themselves what they are called, all that others have written; none where a rule made them here, or another stage may have.

    Args:
        sources: as the config says.
        name: the rows' `source`.
    """
    others = [source for source in sources if title(source)]
    own = {source.get("type") for source in sources} - {source.get("type") for source in others}
    made_here = name in own or ("leaks" in own and name.startswith("leak-")) or "artifact" in own
    return [source for source in others if rows_called(source) == name] or ([] if made_here else others)


def rows_called(source: Mapping[str, Any]) -> str:
    """What a source calls its rows, where they do not say it for themselves."""
    path = PurePosixPath(str(title(source)))
    match source.get("type"):
        case "files":
            return path.name.removesuffix(ending(path))
        case "program":
            return path.stem
        case _:
            return path.name


def rows_of(record: Record) -> dict[str, int]:
    """Title of a source → how many rows it has given, where that can be told from the names of the rows."""
    counted = record.metrics.get("sources")
    if record.kind != "prepare_data" or not isinstance(counted, dict):
        return {}
    if any(source.get("type") == "artifact" for source in record.config["sources"]):  # rows of other stages have such names too
        return {}
    found: dict[str, int] = {}
    unsure: set[str] = set()
    for name, rows in counted.items():
        titles = {str(title(source)) for source in brought(record.config["sources"], str(name))}
        if len(titles) == 1 and isinstance(rows, int):
            found[min(titles)] = found.get(min(titles), 0) + rows
        else:
            unsure |= titles
    return {name: rows for name, rows in found.items() if name not in unsure}


@dataclass
class _Stated:
    """What is said of something from outside, by all that brought it in."""

    licences: set[str]
    generators: set[str]
    rows: list[int | None]

    @property
    def total(self) -> int | None:
        known = [rows for rows in self.rows if rows is not None]
        return sum(known) if len(known) == len(self.rows) else None


@dataclass(frozen=True)
class _Said:
    """What a recipe says of the sources of a stage, by title."""

    licences: Mapping[str, Sequence[str]]
    generators: Mapping[str, Sequence[str]]


def sources_of(record: Record) -> list[dict[str, Any]]:
    """What a stage takes from outside of the recipe, as its config says."""
    if record.kind == "source_model":
        return [record.config["source"]]
    return list(record.config["sources"]) if record.kind == "prepare_data" else []


def handed_on(found: Collection[Origin]) -> list[Origin]:
    """Those that something is made from."""
    return [origin for origin in found if origin.part != "benchmark"]


def agreed(found: Collection[Origin]) -> str | None:
    """The one licence of all that the artifact was made from, or None."""
    licences = {licence for origin in handed_on(found) for licence in origin.licences}
    return licences.pop() if len(licences) == 1 else None


def combined(found: Collection[Origin]) -> str:
    """All licences together, in the form of an SPDX expression, names of other registries and `unknown` in it."""
    licences = {licence for origin in handed_on(found) for licence in origin.licences}
    return " AND ".join(f"({licence})" if " " in licence else licence for licence in sorted(licences, key=str.lower))


def section(found: Collection[Origin]) -> str:
    """The chapter of a card on licences, in Markdown."""
    if not found:
        return f"## Licences\n\nThe records name nothing that others have made: rows and weights come from formulas.\n\n{NO_ADVICE}"
    table = "\n".join(["| made from | part | licence | asks to | rows | written by |", "|---|---|---|---|---|---|", *map(_line, found)])
    return f"## Licences\n\n{table}\n\n{_together(found)}\n\n{NO_ADVICE}"


def _line(origin: Origin) -> str:
    rows = "" if origin.rows is None else f"{origin.rows:,}"
    licences, generators = cell(", ".join(origin.licences)), cell(", ".join(origin.generators))
    return f"| {cell(origin.name)} | {PARTS[origin.part]} | {licences} | {_asks(origin)} | {rows} | {generators} |"


def _makes_rows(record: Record) -> bool:
    """Rows that something may learn from; items of a benchmark are measured against, unless they are planted among rows."""
    return record.kind == "prepare_data" and record.config.get("record") != "item"


def _recorded(source: Mapping[str, Any], run: Run) -> set[str]:
    asset = ASSETS.get(str(source.get("asset")))
    if asset is not None and source.get("sha256") in (None, asset.sha256):
        return {asset.licence}
    return set(run.licences.get(title(source) or "", ()))


def _stated_now(project: Project, found: Pedigree) -> _Said:
    """What the recipe of a stage says of its sources today."""
    recipe, _, stage = found.address.partition("/")
    recipe = recipe.partition("+")[0]
    if (found.record.inputs and found.record.kind != "prepare_data") or recipe not in recipe_names(project.recipes):
        return _Said({}, {})
    try:
        node = load_recipe(project.recipes, recipe).find(stage)
    except (ConfigError, KeyError):
        return _Said({}, {})
    return _Said(licences_of(node.config), generators_of(node.config))


def _asks(origin: Origin) -> str:
    if origin.part == "benchmark":
        return ""
    if len(origin.licences) > 1:
        return "it is stated in more than one way: find out which holds"
    licence = "".join(origin.licences)
    if licence == UNKNOWN:
        return "**unknown**: find out before you hand this on"
    asked = conditions(licence)
    if asked is None:
        return "not in the table: read it"
    return "; ".join(CONDITIONS[condition] for condition in asked) or "nothing"


def _together(found: Collection[Origin]) -> str:
    """What all of them ask for together, the strictest first, and what nobody knows."""
    counted = handed_on(found)
    asked: dict[str, list[str]] = {}
    open_questions = []
    for origin in counted:
        known = [conditions(licence) for licence in origin.licences]
        for condition in {condition for found in known for condition in found or ()}:
            asked.setdefault(condition, []).append(origin.name)
        if None in known:
            open_questions.append(origin.name)
    lines = [f"- {CONDITIONS[name]} ({', '.join(map(cell, asked[name]))})" for name in reversed(CONDITIONS) if name in asked]
    if open_questions:
        lines.append(f"- and whatever the unknown or unlisted licences ask: {', '.join(map(cell, open_questions))}")
    if not counted:
        return "Nothing that others have made went into it."
    return "Whoever hands it on has to hold to all of them:\n\n" + "\n".join(lines) if lines else "None of them asks for anything."


def cell(text: str) -> str:
    """A text from records in a table of Markdown."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
