"""What would have to be made again without a row: nothing is changed here.

It would go by a filter of the stages that bring it in (`configs.filters.Ids`), so what would be made again are those stages and all that
their recipes, and variants of them, make from them: what a plan would show after that change.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from configs.compile import source_file
from configs.datasets import PrepareData
from configs.declarations import DECLARATIONS
from configs.document import ConfigError
from configs.filters import Ids, base_id
from configs.graph import Graph, Node
from configs.project import Project
from configs.recipe import load_recipe, recipe_names
from data.artifacts import ArtifactError, Run, read_run
from data.untrusted import read_source
from pipelines.lineage.named_models import Named, named_models, versions
from pipelines.lineage.trace import MODELS, Trace

Part = Literal["data", "models", "scores"]
PARTS: tuple[Part, ...] = ("data", "models", "scores")
HELD, AFTER = "holds it", "reads what is made again"


@dataclass(frozen=True)
class Again:
    """A stage that would run again."""

    address: str
    kind: str
    part: Part
    why: str
    """What its artifact is to the row; `reads what is made again`: it runs only where that comes out different."""
    names: tuple[str, ...]
    """That recipes give to its model, each with the versions that tags name."""
    seconds: float | None
    """That it took the last time."""
    gpu_hours: float | None
    """The same times the GPUs; None where none took part, or nothing is known."""


@dataclass(frozen=True)
class Change:
    """What to write in a recipe."""

    recipe: str
    stage: str
    filters: tuple[Mapping[str, Any], ...]
    """All of the stage's."""

    @property
    def text(self) -> str:
        """As a line of YAML."""
        listed = yaml.safe_dump(list(self.filters), default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20)
        return f"filters: {listed.strip()}"


@dataclass(frozen=True)
class Forgetting:
    """What it takes to make everything without some rows."""

    changes: tuple[Change, ...]
    again: tuple[Again, ...]
    """The first that reads it first, each after what it is made from."""
    unmade: tuple[str, ...]
    """Addresses of stages below which have never been made, or are not here."""
    strays: tuple[str, ...]
    """Addresses of artifacts with the row in them, or made from it, that no recipe makes any more."""
    unread: Mapping[str, str]
    """Recipe or variant that cannot be read → why."""


def forget(project: Project, trace: Trace) -> Forgetting:
    """What would be made again without the rows that were found.

    Args:
        project: whose recipes and variants are asked.
        trace: of the rows, in all artifacts.
    """
    unread: dict[str, str] = {}
    graphs = list(_graphs(project, unread))
    holding: dict[str, list[str]] = {}
    for place in trace.places:
        if place.kind == "prepare_data":
            holding.setdefault(place.address, []).extend(sorted({base_id(name) for name in place.ids}))
    nodes = {address: graph.nodes[address] for graph in graphs for address in _below(graph, holding)}
    why = {place.address: HELD if place.type != "scores" else "scored on it" for place in trace.places}
    why |= {found.address: found.how for found in trace.reached}
    named = named_models(project)
    made = {address: run for address in nodes if (run := _run(project, address)) is not None}
    again = [_again(project, node, made[address], why.get(address, AFTER), named) for address, node in nodes.items() if address in made]
    touched = sorted(address for address in why if address not in nodes and (project.artifact(address) / "record.json").is_file())
    return Forgetting(
        changes=_changes(holding, nodes),
        again=tuple(again),
        unmade=tuple(address for address in nodes if address not in made),
        strays=tuple(touched),
        unread=unread,
    )


def _graphs(project: Project, unread: dict[str, str]) -> Iterator[Graph]:
    """All recipes and variants; those that cannot be read are noted."""
    loads: dict[str, Callable[[], Graph]] = {}
    for name in recipe_names(project.recipes):
        loads[name] = lambda name=name: load_recipe(project.recipes, name)
    for path in sorted(project.artifacts.glob("*/source.json")):
        loads[path.parent.name] = lambda name=path.parent.name: _compiled(project, name)
    for name, load in loads.items():
        try:
            yield load()
        except (ArtifactError, ConfigError) as error:
            unread[name] = str(error).partition("\n")[0]


def _compiled(project: Project, name: str) -> Graph:
    source = read_source(project.root / source_file(name))
    return load_recipe(project.recipes, source.recipe, source.overrides)


def _below(graph: Graph, holding: Mapping[str, Any]) -> list[str]:
    """Addresses of the stages that hold the row and of all that are made from them, parents first."""
    below = graph.descendants(address for address in holding if address in graph.nodes)
    return [address for address in graph.nodes if address in below]


def _run(project: Project, address: str) -> Run | None:
    try:
        return read_run(project.artifact(address) / "run.json")
    except ArtifactError:
        return None


def _again(project: Project, node: Node, run: Run, why: str, named: list[Named]) -> Again:
    part: Part = "models" if node.output in MODELS else "scores" if node.output in ("scores", "report") else "data"
    mine = [model for model in named if model.address == node.address]
    names = tuple(" ".join([model.full, *(f"({version})" for version in versions(project, model))]) for model in mine)
    return Again(node.address, node.kind, part, why, names, run.seconds, gpu_hours(node, run))


def gpu_hours(node: Node, run: Run) -> float | None:
    """Of a job that has run; None where no GPU took part, or no time was recorded."""
    ranks = [run.numerics.get(name) for name in ("world_size", "tensor_parallel")]
    gpus = max((found for found in ranks if isinstance(found, int)), default=1)
    used = run.numerics.get("device") == "cuda" and DECLARATIONS[node.kind].engine != "none"
    return run.seconds / 3600 * gpus if used and run.seconds is not None else None


def _changes(holding: Mapping[str, list[str]], nodes: Mapping[str, Node]) -> tuple[Change, ...]:
    """By recipe and stage; a variant's stage has its filters from the recipe."""
    wanted: dict[tuple[str, str], tuple[PrepareData, set[str]]] = {}
    for address, ids in holding.items():
        node = nodes.get(address)
        if node is not None and isinstance(node.config, PrepareData) and node.config.brings_in:  # others take what is left out already
            wanted.setdefault((node.recipe.partition("+")[0], node.name), (node.config, set()))[1].update(ids)
    return tuple(Change(recipe, stage, without(config, ids)) for (recipe, stage), (config, ids) in sorted(wanted.items()))


def without(config: PrepareData, ids: set[str]) -> tuple[Mapping[str, Any], ...]:
    """The filters of a stage that would leave these rows out too; one by ids stands last."""
    others = [one for one in config.filters if not isinstance(one, Ids)]
    named = {name for one in config.filters if isinstance(one, Ids) for name in one.ids}
    return tuple(one.model_dump(mode="json") for one in [*others, Ids(type="ids", ids=tuple(sorted(named | ids)))])
