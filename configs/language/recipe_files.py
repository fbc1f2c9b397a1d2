"""Read recipe files: parents merged in, rounds unrolled, overrides applied; nothing of a stage's body is validated yet."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from pedigree.configs.base.document import ConfigError, Place, Problem, YamlDocument, read_document
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.mistakes import nearest, unknown_key, validated
from pedigree.configs.base.naming import MODEL_NAME, Model
from pedigree.configs.base.published import Published
from pedigree.configs.language.rounds import is_stage, unroll

RECIPE_NAME = re.compile(r"[a-z][a-z0-9_-]*")
T = TypeVar("T", bound=Frozen)
RECIPE_KEYS = {"description", "execution", "extends", "models", "published", "reproduce", "stages"}


class Reproduce(Frozen):
    """Tolerances for reproduction where bits cannot agree, e.g. on another processor. Not part of any identity."""

    score_tolerance: float = Field(ge=0, le=1)
    """Maximum difference of a policy's mean score on a task between the recorded and the repeated evaluation."""


@dataclass(frozen=True)
class RawStage:
    """A stage body after unrolling, before validation."""

    body: dict[str, Any]
    document: YamlDocument
    place: Place

    def problem(self, inner: Place, message: str) -> Problem:
        return self.document.problem((*self.place, *inner), message)


@dataclass(frozen=True)
class RoundGroup:
    """A group of rounds."""

    body: dict[str, Any]
    """Its `rounds`, `first` and `stages`."""
    unrolled: tuple[str, ...]
    """The stages of all rounds, in order."""


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's raw stages, with its parents' merged in and its rounds unrolled."""

    document: YamlDocument
    extends: str | None
    execution: str
    """The name of its profile, or of that of the recipe that it extends."""
    stages: dict[str, RawStage]
    groups: dict[str, RoundGroup]
    models: dict[str, tuple[YamlDocument, Model]]
    """Name → file that defines it, and model."""
    published: Published | None
    """Its own block, or that of the recipe that it extends."""
    problems: tuple[Problem, ...]
    """Problems outside the stages."""

    def stage_of(self, name: str) -> str:
        """The last stage of the last round for the name of a group; any other name as it is."""
        return self.groups[name].unrolled[-1] if name in self.groups else name


def recipe_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_recipe_file(folder: Path, path: Path, changes: Mapping[str, Any], below: tuple[str, ...] = ()) -> RecipeFile:
    """Read a recipe file and those that it extends; `changes` (dotted paths) apply to groups before and to stages after unrolling.

    Raises:
        ConfigError: a file cannot be read, or a stage is missing, so that references to it would cause follow-up errors.
    """
    document = _recipe_document(folder, path, below)
    problems = _faults_of_keys(path, document)
    own = document.value.get("stages", {})
    if not isinstance(own, dict) or not (own or document.value.get("extends")):
        if any("did you mean stages" in problem.message for problem in problems):
            raise ConfigError(problems)
        raise ConfigError([*problems, document.problem(("stages",), "`stages` must be a mapping with at least one stage")])
    own = copy.deepcopy(own)
    models, published = _models(document, problems), _validated(Published, document, ("published",), problems)
    parent = _parent(folder, path, document, below, problems)
    stages, inherited = (dict(parent.stages), dict(parent.groups)) if parent else ({}, {})
    of_groups, of_stages = _split(changes, own, inherited)
    for place, value in of_groups.items():
        _set(own, place.split("."), value)
    _replace_groups(stages, inherited, own)
    missing = _remove(stages, own, document, parent)
    unrolled, groups = _unroll(document, own, missing)
    if missing:
        raise ConfigError([*problems, *missing])
    for name, raw in unrolled.items():
        stages[name] = replace(raw, body=_merged(stages[name].body, raw.body)) if name in stages else raw
    for place, value in of_stages.items():
        _override(stages, path.stem, place, value, problems)

    if parent:
        groups, models = inherited | groups, parent.models | models
        published = published.over(parent.published) if published else parent.published
    extends = document.value["extends"] if parent else None
    execution = str(document.value.get("execution", parent.execution if parent else "cpu"))
    return RecipeFile(document, extends, execution, stages, groups, models, published, tuple(problems))


def _recipe_document(folder: Path, path: Path, below: tuple[str, ...]) -> YamlDocument:
    if path.stem in below:
        cycle = " -> ".join([*below, path.stem])
        raise ConfigError([Problem(path.name, None, f"recipes extend each other in a cycle: {cycle}")])
    if not os.path.exists(path):  # `exists` also handles invalid file names
        names = recipe_names(folder)
        known = (", ".join(names) or "none") + nearest(path.stem, names)
        raise ConfigError([Problem(path.name, None, f"there is no recipe {path.stem!r}; available: {known}")])
    return read_document(path)


def _faults_of_keys(path: Path, document: YamlDocument) -> list[Problem]:
    problems: list[Problem] = []
    if not RECIPE_NAME.fullmatch(path.stem):
        problems.append(Problem(path.name, None, f"recipe name {path.stem!r} must match {RECIPE_NAME.pattern}"))
    for key in set(document.value) - RECIPE_KEYS:
        problems.append(document.problem((key,), f"{key}: {unknown_key(key, sorted(RECIPE_KEYS), 'a recipe has')}"))
    for key in ("description", "execution"):
        if not isinstance(document.value.get(key, ""), str):
            problems.append(document.problem((key,), f"{key}: must be text, not {document.value[key]!r}"))
    _validated(Reproduce, document, ("reproduce",), problems)
    return problems


def _split(
    changes: Mapping[str, Any], own: Mapping[str, Any], inherited: Mapping[str, RoundGroup]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Overrides of groups of rounds, and those of stages."""
    groups = {name for name, body in own.items() if isinstance(body, dict) and "rounds" in body} | inherited.keys()
    of_groups = {place: value for place, value in changes.items() if place.split(".")[0] in groups}
    return of_groups, {place: value for place, value in changes.items() if place not in of_groups}


def _parent(folder: Path, path: Path, document: YamlDocument, below: tuple[str, ...], problems: list[Problem]) -> RecipeFile | None:
    """The recipe that a file extends; its problems, and that of the name, are added."""
    name = document.value.get("extends")
    if name is None:
        return None
    if not (isinstance(name, str) and RECIPE_NAME.fullmatch(name)):  # never look outside the folder
        problems.append(document.problem(("extends",), f"extends {name!r}: it must be the name of a recipe in {folder.name}/"))
        return None
    parent = read_recipe_file(folder, folder / f"{name}.yaml", {}, (*below, path.stem))
    problems += parent.problems
    return parent


def _replace_groups(stages: dict[str, RawStage], inherited: dict[str, RoundGroup], own: dict[str, Any]) -> None:
    """Replace the inherited groups that a file names: their unrolled stages go, and what the file states is merged into their bodies."""
    for name in [name for name in own if name in inherited]:
        group, body = inherited.pop(name), own[name]
        for stage in group.unrolled:
            stages.pop(stage, None)
        if body is None:
            del own[name]
        elif isinstance(body, dict) and "kind" not in body:
            own[name] = _merged(group.body, body)


def _remove(stages: dict[str, RawStage], own: dict[str, Any], document: YamlDocument, parent: RecipeFile | None) -> list[Problem]:
    """Remove the inherited stages that a file sets to null; problems with those that are not inherited."""
    problems = []
    for name in [name for name, body in own.items() if body is None]:
        del own[name]
        if stages.pop(name, None) is None:
            what = f"{document.value['extends']} has {', '.join(stages)}" if parent else "this recipe extends no other"
            problems.append(document.problem(("stages", name), f"stage {name} is null, which removes an inherited stage: {what}"))
    return problems


def _override(stages: dict[str, RawStage], recipe: str, place: str, value: Any, problems: list[Problem]) -> None:
    name, *inner = place.split(".")
    if name not in stages:
        known = ", ".join(stages) + nearest(name, [*stages])
        problems.append(Problem("--set", None, f"{place}: recipe {recipe} has no stage {name!r}: it has {known}"))
        return
    body = copy.deepcopy(stages[name].body)
    _set(body, inner, value)
    stages[name] = replace(stages[name], body=body)


def score_tolerance(folder: Path, recipe: str) -> float | None:
    """The score tolerance of a recipe (by name, by the name of a variant, `RECIPE+HASH`, or by path), its own or inherited.

    Raises:
        ConfigError: the file cannot be read, or the value is invalid.
    """
    named = recipe.partition("+")[0]
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else folder / f"{named}.yaml"
    seen: set[Path] = set()
    while path not in seen and RECIPE_NAME.fullmatch(path.stem) and path.exists():
        seen.add(path)
        document = read_document(path)
        problems: list[Problem] = []
        found = _validated(Reproduce, document, ("reproduce",), problems)
        if problems:
            raise ConfigError(problems)
        if found:
            return found.score_tolerance
        path = folder / f"{document.value.get('extends')}.yaml"
    return None


def _models(document: YamlDocument, problems: list[Problem]) -> dict[str, tuple[YamlDocument, Model]]:
    """The named models of a file, each with the file."""
    given = document.value.get("models", {})
    if not isinstance(given, dict):
        problems.append(document.problem(("models",), "`models` must map names to stages: {NAME: {stage: STAGE}}"))
        return {}
    found = {}
    for name in given:
        if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
            problems.append(document.problem(("models", name), f"model name {name!r} must match {MODEL_NAME.pattern}"))
        elif model := _validated(Model, document, ("models", name), problems):
            found[name] = (document, model)
    return found


def _validated(model: type[T], document: YamlDocument, place: tuple[str, ...], problems: list[Problem]) -> T | None:
    """The value at a place in a file, if it has one; problems are added."""
    value: Any = document.value
    for part in place:
        if part not in value:
            return None
        value = value[part]
    try:
        return validated(model, document, place, value)
    except ConfigError as error:
        problems += error.problems
        return None


def _set(target: dict[str, Any], place: Sequence[str], value: Any) -> None:
    for part in place[:-1]:
        inner = target.get(part)
        if not isinstance(inner, dict):
            inner = target[part] = {}
        target = inner
    target[place[-1]] = value


def _merged(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """Merge a child's stage into the parent's: mappings merge, everything else replaces. A different `kind` or `type` replaces the parent's
    mapping."""
    if child.get("kind", parent.get("kind")) != parent.get("kind"):
        return child
    merged = dict(parent)
    for key, value in child.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        tagged = both and value.get("type", merged[key].get("type")) != merged[key].get("type")
        merged[key] = _merged(merged[key], value) if both and not tagged else value
    return merged


def _unroll(document: YamlDocument, stages: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, RawStage], dict[str, RoundGroup]]:
    """Stages with all groups of rounds unrolled, and the groups."""
    found: dict[str, RawStage] = {}
    groups: dict[str, RoundGroup] = {}
    for name, body in stages.items():
        place: Place = ("stages", name)
        if not is_stage(document, place, body, problems):
            continue
        if "rounds" in body:
            bodies = unroll(document, name, body, problems)
            unrolled = {stage: RawStage(inner, document, (*place, "stages", template)) for stage, (template, inner) in bodies.items()}
            groups |= {name: RoundGroup(body, tuple(unrolled))} if unrolled else {}
        else:
            unrolled = {name: RawStage(body, document, place)}
        for twice in sorted(unrolled.keys() & found.keys()):
            problems.append(document.problem(place, f"two stages are named {twice}, one of them in a group of rounds: rename one"))
        found |= unrolled
    return found, groups
