"""Report what would have to be rebuilt to forget rows; nothing is changed here.

A row is forgotten by a filter in the stages that bring it in (`configs.rows.filters.Ids`). So the stages to rebuild are those and all
that their recipes, and variants of them, derive from them: what a plan would show after that change.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from pedigree.configs.base.kind import DATASETS, MODELS
from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.kinds import KINDS, imports_rows
from pedigree.data.artifacts.artifacts import ArtifactError, Run, read_run
from pedigree.pipelines.lineage.named_models import Named, named_models, versions
from pedigree.pipelines.lineage.trace import Trace
from pedigree.pipelines.maintain.every_graph import every_graph

Part = Literal["data", "models", "scores"]
PARTS: tuple[Part, ...] = ("data", "models", "scores")
HELD, AFTER = "holds it", "reads a rebuilt input"


@dataclass(frozen=True)
class Again:
    """A stage that would run again."""

    address: str
    kind: str
    part: Part
    why: str
    """How its artifact relates to the row; `reads a rebuilt input`: it runs only if that input comes out different."""
    names: tuple[str, ...]
    """Names that recipes give to its model, each with its tagged versions."""
    seconds: float | None
    """Duration of its last run."""
    gpu_hours: float | None
    """The same times the number of GPUs; None if no GPU took part, or nothing is known."""


@dataclass(frozen=True)
class Change:
    """An edit to a recipe."""

    recipe: str
    stage: str
    filters: tuple[Mapping[str, Any], ...]
    """The complete filters of the stage."""

    @property
    def text(self) -> str:
        """As a line of YAML."""
        listed = yaml.safe_dump(list(self.filters), default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20)
        return f"filters: {listed.strip()}"


@dataclass(frozen=True)
class Forgetting:
    """What it takes to rebuild everything without some rows."""

    ids: tuple[str, ...]
    """Of the rows, without copy numbers."""
    copies: tuple[str, ...]
    """Evidence of other rows that were kept in place of these."""
    not_looked_in: Mapping[str, str]
    """Address → why it could not be searched."""
    changes: tuple[Change, ...]
    again: tuple[Again, ...]
    """In order of execution."""
    unmade: tuple[str, ...]
    """Addresses of descendant stages that have never been made, or are not here."""
    strays: tuple[str, ...]
    """Addresses of artifacts that contain the row, or were made from it, but belong to no current recipe."""
    unread: Mapping[str, str]
    """Unreadable recipe or variant → reason."""
    missing: tuple[str, ...]
    """If nothing shows which stage brought the row in: addresses of candidates that are not here or could not be searched."""


def forget(project: Project, trace: Trace) -> Forgetting:
    """Find what would be rebuilt without the rows traced in all artifacts, by the project's recipes and variants."""
    graphs, unread = every_graph(project, both=False)
    held = {place.address for place in trace.places}  # all places, because the stage that brought it in may not be here
    nodes = {address: graph.nodes[address] for graph in graphs for address in _below(graph, held)}
    changes = _changes(trace, nodes, {address: node for graph in graphs for address, node in graph.nodes.items()})
    why = {place.address: HELD if place.type != "scores" else "scored on it" for place in trace.places}
    why |= {found.address: found.how for found in trace.reached}
    named = named_models(project)
    made: dict[str, Run] = {}
    for address in nodes:
        with suppress(ArtifactError):
            made[address] = read_run(project.artifact(address) / "run.json")
    again = [_again(project, node, made[address], why.get(address, AFTER), named) for address, node in nodes.items() if address in made]
    strays = sorted(address for address in why if address not in nodes and (project.artifact(address) / "record.json").is_file())
    return Forgetting(
        ids=trace.ids,
        copies=tuple(trace.copies),
        not_looked_in=trace.not_looked_in,
        changes=changes,
        again=tuple(again),
        unmade=tuple(address for address in nodes if address not in made),
        strays=tuple(strays),
        unread=unread,
        missing=() if changes else _missing(project, graphs, trace),
    )


def _below(graph: Graph, held: Collection[str]) -> list[str]:
    """Addresses of the stages that hold the row and of their descendants, parents first."""
    below = graph.descendants(address for address in held if address in graph.nodes)
    return [address for address in graph.nodes if address in below]


def _missing(project: Project, graphs: Sequence[Graph], trace: Trace) -> tuple[str, ...]:
    """Addresses of stages above the row's holders that bring in rows of its kind and could not be searched."""
    items = all(place.type == "scores" for place in trace.places)  # a suite does not pass its items on
    found: dict[str, None] = {}
    for graph in graphs:
        above = graph.ancestors(place.address for place in trace.places if place.address in graph.nodes)
        for address, node in graph.nodes.items():
            if address in above and _imports(node) and (node.output == "item") == items:
                if address in trace.not_looked_in or not (project.artifact(address) / "record.json").is_file():
                    found[address] = None
    return tuple(found)


def _again(project: Project, node: Node, run: Run, why: str, named: list[Named]) -> Again:
    part: Part = "models" if node.output in MODELS else "scores" if node.output in ("scores", "report") else "data"
    mine = [model for model in named if model.address == node.address]
    names = tuple(" ".join([model.full, *(f"({version})" for version in versions(project, model))]) for model in mine)
    return Again(node.address, node.kind, part, why, names, run.seconds, gpu_hours(node, run))


def gpu_hours(node: Node, run: Run) -> float | None:
    """GPU hours of a job that has run; None if no GPU took part, or no time was recorded."""
    declaration = KINDS[node.kind]
    computes = declaration.engine != "none" and any(set(declaration.inputs[edge.port].types) & set(MODELS) for edge in node.edges)
    used = run.numerics.get("device") == "cuda" and computes  # a stage that queries an endpoint has no model of its own
    return run.seconds / 3600 * _gpus(node, run) if used and run.seconds is not None else None


def _gpus(node: Node, run: Run) -> int:
    """GPUs of its job: those of its training ranks, or of all its engines if these are more; both if they work at the
    same time."""
    counts = run.numerics.get("world_size"), run.numerics.get("tensor_parallel"), run.placement.get("engines")
    ranks, of_engine, engines = (found if isinstance(found, int) else 1 for found in counts)
    kind = node.declaration
    plan = kind.sampling_plan(node.config)
    if (plan or kind.scoring_plan(node.config)) is None:
        return ranks
    of_engines = of_engine * (engines if kind.opens_engines(node.config) else 1)
    served = of_engine * len(kind.served(node.config))
    return served + (ranks + of_engines if plan and plan.beside else max(ranks, of_engines))


def _changes(trace: Trace, nodes: Mapping[str, Node], every: Mapping[str, Node]) -> tuple[Change, ...]:
    """Changes by recipe and stage; a variant's stage takes its filters from the recipe, unless its overrides give it others."""
    found: dict[str, tuple[Node, set[str]]] = {}
    for place in trace.places:
        ids, node = trace.imported_in(place), nodes.get(place.address)
        if ids and node is not None and _imports(node):  # rows passed on by others are removed there
            origin = every.get(f"{node.recipe.partition('+')[0]}/{node.name}", node)
            if _without(origin, ids) != _without(node, ids):
                origin = node
            found.setdefault(origin.address, (origin, set()))[1].update(ids)
    return tuple(
        Change(node.recipe, node.name, filters) for _, (node, ids) in sorted(found.items()) if (filters := _without(node, ids)) is not None
    )


def _without(node: Node, ids: Collection[str]) -> tuple[Mapping[str, Any], ...] | None:
    without = node.declaration.without
    return tuple(without(node.config, ids)) if without else None


def _imports(node: Node) -> bool:
    return node.output in DATASETS and imports_rows(node.kind, node.config.model_dump(mode="json"))
