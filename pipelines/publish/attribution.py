"""External sources of an artifact, from its records: models, datasets, generators and judges, row counts per source, and the combined
license conditions.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.kind import MODELS
from pedigree.configs.base.licenses import CONDITIONS, UNKNOWN, conditions
from pedigree.configs.base.packaged import ASSETS
from pedigree.configs.base.project import Project
from pedigree.configs.language.kinds import brings_in, sources_of
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.recipe_files import recipe_names
from pedigree.configs.language.stated_sources import generators_of, licences_of
from pedigree.configs.rows.datasets import title
from pedigree.data.artifacts.artifacts import ADOPTED, Record, Run
from pedigree.data.sources.leaks import PLANTED
from pedigree.data.sources.row_files import ending
from pedigree.pipelines.json_documents import Hidden
from pedigree.pipelines.lineage.ancestry import Pedigree, read_pedigree
from pedigree.pipelines.lineage.trace import Trace

Part = Literal["model", "data", "benchmark"]
PARTS = {"model": "model", "data": "rows", "benchmark": "evaluation only"}
NO_ADVICE = (
    "This list is generated from records and is not legal advice. The text of each license is authoritative; the conditions listed here "
    "come from a table of well-known licenses and are a reading aid."
)


@dataclass(frozen=True)
class Origin:
    """An external model, dataset, or benchmark among the ancestors of an artifact."""

    name: str
    part: Hidden[Part]
    """`benchmark`: its items are used for evaluation only."""
    licences: tuple[str, ...]
    """All licenses stated for it; only `unknown` if none is stated."""
    generators: tuple[str, ...] = ()
    """Models stated to have written its answers."""
    rows: Hidden[int | None] = None
    """Rows prepared from it; None for models and where sources were not counted separately."""


@dataclass(frozen=True)
class BroughtIn:
    """A stage that imported a row."""

    address: str
    source: str
    """Name of its source there."""
    origins: tuple[Origin, ...]
    """If there are several, one of them applies; none if the rows are generated."""


@dataclass(frozen=True)
class TraceResult(Trace):
    """Where a row is used or dropped, in which models, and where it is from."""

    brought_in: tuple[BroughtIn, ...]


def origins(pedigree: Pedigree, project: Project | None = None) -> list[Origin]:
    """External sources of an artifact, deduplicated and sorted.

    A license may be added or corrected after the artifact was made, so licenses in the project's current recipes are added to the recorded
    ones.
    """
    made, own = pedigree.material(), {found.id for found in pedigree.own()}
    planted = {given.producer for found in made if makes_rows(found.record) for given in found.record.inputs}
    stated: dict[tuple[Part, str], _Stated] = {}
    for found in made:
        licences, generators = _stated_now(project, found) if project and found.id in own else ({}, {})
        counts = rows_of(found.record)
        sources = sources_of(found.record.kind, found.record.config)
        for name in dict.fromkeys(filter(None, map(title, sources))):
            part: Part = "model" if found.record.type in MODELS else "data"
            if part == "data" and not makes_rows(found.record) and found.id not in planted:
                part = "benchmark"
            known = set(licences.get(name, ())).union(*(_recorded(source, found.run) for source in sources if title(source) == name))
            if known <= {UNKNOWN} and any(given.port == ADOPTED for given in found.record.inputs):
                continue  # the licenses of an export are those of its own sources
            here = found.id in own or not any("path" in source for source in sources if title(source) == name)
            entry = stated.setdefault((part, name if here else f"{name} (of another project)"), _Stated(set(), set(), []))
            entry.licences.update(known)
            entry.generators.update(found.run.generators.get(name, ()), generators.get(name, ()))
            entry.rows.append(counts.get(name))
        if not found.record.inputs and not brings_in(found.record.kind):
            stated.setdefault(("data", found.address), _Stated(set(), set(), [None]))  # its sources are not recorded
    order = list(PARTS)
    return [
        Origin(name, part, tuple(sorted(entry.licences - {UNKNOWN})) or (UNKNOWN,), tuple(sorted(entry.generators)), entry.total)
        for (part, name), entry in sorted(stated.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    ]


def trace_result(project: Project, found: Trace) -> TraceResult:
    """A trace with the origins of the rows that its stages imported."""
    brought_in = []
    for address, name in found.sources():
        pedigree = read_pedigree(project.artifact(address))
        titles = {title(source) for source in brought(sources_of(pedigree.record.kind, pedigree.record.config), name)}
        possible = tuple(origin for origin in origins(pedigree, project) if origin.name in titles)
        brought_in.append(BroughtIn(address, name, possible))
    return TraceResult(**vars(found), brought_in=tuple(brought_in))


def brought(sources: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """External sources of a stage that rows with this `source` name may come from.

    The source with that name if there is one. Otherwise all external sources, since rows may carry their own source name, but none if the
    rows may be generated here or come from another stage.
    """
    others = [source for source in sources if title(source)]
    own = {source.get("type") for source in sources} - {source.get("type") for source in others}
    made_here = name in own or ("leaks" in own and name in PLANTED) or "artifact" in own
    return [source for source in others if rows_called(source) == name] or ([] if made_here else others)


def rows_called(source: Mapping[str, Any]) -> str:
    """Default `source` name of a source's rows."""
    path = PurePosixPath(str(title(source)))
    match source.get("type"):
        case "files":
            return path.name.removesuffix(ending(path))
        case "program":
            return path.stem
        case _:
            return path.name


def rows_of(record: Record) -> dict[str, int]:
    """Source title → row count, for sources that row names identify uniquely."""
    counted = record.metrics.get("sources")
    sources = sources_of(record.kind, record.config)
    if not sources or not isinstance(counted, dict):
        return {}
    if any(source.get("type") == "artifact" for source in sources):  # rows of other stages may carry the same names
        return {}
    found: dict[str, int] = {}
    unsure: set[str] = set()
    for name, rows in counted.items():
        titles = {str(title(source)) for source in brought(sources, str(name))}
        if len(titles) == 1 and isinstance(rows, int):
            found[min(titles)] = found.get(min(titles), 0) + rows
        else:
            unsure |= titles
    return {name: rows for name, rows in found.items() if name not in unsure}


@dataclass
class _Stated:
    """Statements about one external source, collected from all stages that import it."""

    licences: set[str]
    generators: set[str]
    rows: list[int | None]

    @property
    def total(self) -> int | None:
        known = [rows for rows in self.rows if rows is not None]
        return sum(known) if len(known) == len(self.rows) else None


def handed_on(found: Collection[Origin]) -> list[Origin]:
    """Origins that the artifact was made from, i.e. all but benchmarks."""
    return [origin for origin in found if origin.part != "benchmark"]


def all_licences(found: Collection[Origin]) -> list[str]:
    """The licenses of all origins that the artifact was made from, sorted; may include `unknown`."""
    return sorted({licence for origin in handed_on(found) for licence in origin.licences}, key=str.lower)


def section(found: Collection[Origin]) -> str:
    """License section of a card, in Markdown."""
    if not found:
        return f"## Licenses\n\nThe records name no external sources: all rows and weights are generated procedurally.\n\n{NO_ADVICE}"
    table = "\n".join(["| source | used as | license | conditions | rows | written by |", "|---|---|---|---|---|---|", *map(_line, found)])
    return f"## Licenses\n\n{table}\n\n{_together(found)}\n\n{NO_ADVICE}"


def _line(origin: Origin) -> str:
    rows = "" if origin.rows is None else f"{origin.rows:,}"
    licences, generators = cell(", ".join(origin.licences)), cell(", ".join(origin.generators))
    return f"| {cell(origin.name)} | {PARTS[origin.part]} | {licences} | {_asks(origin)} | {rows} | {generators} |"


def makes_rows(record: Record) -> bool:
    """Whether an artifact of rows, other than benchmark items, may come from outside the recipe."""
    return brings_in(record.kind) and record.type not in (*MODELS, "item")


def _recorded(source: Mapping[str, Any], run: Run) -> set[str]:
    asset = ASSETS.get(str(source.get("asset")))
    if asset is not None and source.get("sha256") in (None, asset.sha256):
        return {asset.licence}
    return set(run.licences.get(title(source) or "", ()))


def _stated_now(project: Project, found: Pedigree) -> tuple[Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]]:
    """Licenses and generators stated for a stage's sources in its current recipe, by title."""
    recipe, _, stage = found.address.partition("/")
    recipe = recipe.partition("+")[0]
    if (found.record.inputs and not brings_in(found.record.kind)) or recipe not in recipe_names(project.recipes):
        return {}, {}
    try:
        config = load_recipe(project.recipes, recipe).find(stage).config
    except (ConfigError, KeyError):
        return {}, {}
    return licences_of(config), generators_of(config)


def _asks(origin: Origin) -> str:
    if origin.part == "benchmark":
        return ""
    if len(origin.licences) > 1:
        return "conflicting licenses are stated: find out which one applies"
    licence = "".join(origin.licences)
    if licence == UNKNOWN:
        return "**unknown**: find out before you redistribute this"
    asked = conditions(licence)
    if asked is None:
        return "not in the table of known licenses: read its text"
    return "; ".join(CONDITIONS[condition] for condition in asked) or "none"


def _together(found: Collection[Origin]) -> str:
    """Combined conditions, strictest first, followed by sources with unknown conditions."""
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
        lines.append(f"- the conditions of unknown or unlisted licenses: {', '.join(map(cell, open_questions))}")
    if not counted:
        return "No external model or data went into this artifact."
    return "Redistribution must meet all these conditions:\n\n" + "\n".join(lines) if lines else "None of these licenses sets conditions."


def cell(text: str) -> str:
    """Escape a text from records for a Markdown table cell."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
