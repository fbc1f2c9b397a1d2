"""Fully resolved recipes and stages, and validation of recipes and profiles."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pedigree.configs.base.document import ConfigError, Problem, read_document
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.paths import written_of
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import ONE_PROCESS
from pedigree.configs.language.graph import Graph, Node
from pedigree.configs.language.recipe import load_recipe, recipe_file
from pedigree.configs.language.recipe_files import score_tolerance
from pedigree.pipelines.run.checks import refuse_contradictions
from pedigree.pipelines.run.foreseen import missing_files
from pedigree.pipelines.run.opening import load_execution, profile_for


def resolved_recipe(project: Project, graph: Graph, profile: str | None = None) -> dict[str, Any]:
    """Return a standalone recipe that makes the same artifacts, with all defaults and the stages of other recipes included.

    A stage of another recipe whose name is taken remains a reference, `RECIPE/STAGE`.
    """
    counts = Counter(node.name for node in graph.nodes.values())
    names = {
        node.address: node.name if node.recipe == graph.recipe or counts[node.name] == 1 else node.address for node in graph.nodes.values()
    }
    written = {address: node for address, node in graph.nodes.items() if names[address] == node.name}
    value: dict[str, Any] = {"description": graph.description, "execution": profile or graph.execution}
    tolerance = score_tolerance(project.recipes, graph.source)
    if tolerance is not None:
        value["reproduce"] = {"score_tolerance": tolerance}
    if graph.models:
        value["models"] = {
            name: model.model_dump(mode="json", exclude_defaults=True) | {"stage": graph.nodes[model.stage].name}
            for name, model in graph.models.items()
        }
    if graph.published:
        value["published"] = graph.published.model_dump(mode="json", exclude_unset=True)
    value["stages"] = {}
    for node in written.values():
        inputs = _inputs(node, names)
        value["stages"][node.name] = {"kind": node.kind, **({"in": inputs} if inputs else {}), **_as_written(node.config)}
    return value


def resolved_stage(project: Project, graph: Graph, name: str, profile: str | None = None) -> dict[str, Any]:
    """Return one stage's config, and its numerics and placement under the profile.

    Raises:
        UsageProblem: no such stage.
        ConfigError: the profile is invalid.
    """
    node = graph.find(name)
    numerics, placement = profile_for(project, graph, profile).of(node.kind, node.name)
    if "deepspeed" not in node.declaration.engine:
        numerics = numerics.model_copy(update=ONE_PROCESS)
    return {
        "stage": node.address,
        "kind": node.kind,
        "version": node.declaration.version,
        "makes": node.output,
        "in": _inputs(node, {edge.source: edge.source for edge in node.edges}),
        "config": node.config.model_dump(mode="json"),
        "execution": profile or graph.execution,
        "numerics": numerics.model_dump(mode="json"),
        "placement": placement.model_dump(mode="json"),
    }


def problems_of(
    project: Project, recipe: str, overrides: Sequence[str] = (), profile: str | None = None
) -> tuple[list[Problem], list[str]]:
    """Return all problems of a recipe and its profile, and the files that are not here, so that they could not be checked."""
    try:
        graph = load_recipe(project.recipes, recipe, overrides)
    except ConfigError as error:
        return [*error.problems, *_problems_of_named_profile(project, recipe, profile)], []
    unchecked = [written_of(name) for node in graph.nodes.values() for name in missing_files(project, node)]
    try:
        refuse_contradictions(project, graph, profile_for(project, graph, profile), graph.nodes)
    except ConfigError as error:
        return error.problems, unchecked
    return [], unchecked


def profile_problems(project: Project, name: str) -> list[Problem]:
    try:
        load_execution(project, name)
    except ConfigError as error:
        return error.problems
    return []


def _problems_of_named_profile(project: Project, recipe: str, profile: str | None) -> list[Problem]:
    """Check the profile of an invalid recipe."""
    try:
        named = profile or read_document(recipe_file(project.recipes, recipe)).value.get("execution")
    except ConfigError:  # already reported
        return []
    return profile_problems(project, named) if isinstance(named, str) else []


def _as_written(config: Frozen) -> dict[str, Any]:
    """A config as in a recipe: sources outside the project with their paths, instead of the names that identify them."""

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: written(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [written(inner) for inner in value]
        return written_of(value) if isinstance(value, str) else value

    return written(config.model_dump())


def _inputs(node: Node, names: dict[str, str]) -> dict[str, dict[str, str]]:
    """Port → label → stage. Labels are explicit because they affect an artifact's identity; stage names do not."""
    ports: dict[str, dict[str, str]] = {}
    for edge in node.edges:
        ports.setdefault(edge.port, {})[edge.label] = names[edge.source]
    return ports
