"""Load recipe files into graphs: extends, overrides, rounds, references, types, cycles, the decontamination gate.

A recipe is YAML:

    description: one line
    execution: cpu                      # default profile
    reproduce: {score_tolerance: 0.02}  # optional: tolerance on scores if `pedigree reproduce` cannot get identical bits
    extends: other                      # optional: inherit another recipe's stages; `STAGE: null` removes one of them
    models: {final: {stage: rlvr}}      # optional: names for models, with `desc` and `labels`
    published: {sources: [...]}         # optional: the work that it reproduces, see `configs/base/published.py`
    stages:
      sft:
        kind: sft
        in: {policy: base, data: clean} # a stage, RECIPE/STAGE, a list, or {label: stage}
        global_batch: 32                # the remaining keys are the stage's config
      online:
        rounds: 2                       # unrolled: sample_1, pair_1, dpo_1, sample_2, ...
        first: sft                      # the value of `previous` in round 1
        stages: {...}                   # `$round` is 1, 2, ...; `previous` the last stage of the preceding round; see `rounds.py`

Elsewhere `online` refers to the last stage of the last round. All problems are reported together.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pedigree.configs.base.document import ConfigError, Problem, parse_value, read_document, secret_problem
from pedigree.configs.base.frozen import digest
from pedigree.configs.language.building import Building
from pedigree.configs.language.compile import source_file
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe_files import read_recipe_file


def load_recipe(folder: Path, name: str, overrides: Sequence[str] = ()) -> Graph:
    """Load a recipe, by name in `folder` or by path, with `--set` overrides (which make a variant), or a variant by its name.

    Raises:
        ConfigError: lists every problem with its line.
    """
    return _Loading(folder).graph(name, overrides)


def load_recipes(folder: Path, name: str, overrides: Sequence[str] = ()) -> list[Graph]:
    """Load a recipe and all recipes that it extends or reads from; the requested one is last.

    Raises:
        ConfigError: lists every problem with its line.
    """
    loading = _Loading(folder)
    graph = loading.graph(name, overrides)
    return [*(other for other in loading.graphs.values() if other is not graph), graph]


def recipe_file(folder: Path, name: str) -> Path:
    """File of a recipe, by name in `folder` or by path."""
    return Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"


class _Loading:
    """Loads one recipe and those it refers to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs: dict[str, Graph] = {}
        self.open: list[str] = []

    def graph(self, name: str, overrides: Sequence[str] = ()) -> Graph:
        is_file = name.endswith((".yaml", ".yml"))
        of, _, stage = name.partition("/")
        if stage and not is_file and ("+" in of or recipe_file(self.folder, of).exists()):
            how = f"name the recipe, {of}; run, plan and pull select stages with `--only {stage}` or `--until {stage}`"
            raise ConfigError([Problem(name, None, f"is a stage: {how}")])
        if "+" in name and not is_file:
            return self._variant(name, overrides)
        path = recipe_file(self.folder, name)
        recipe = path.stem
        if recipe in self.graphs and not overrides:
            return self.graphs[recipe]
        if recipe in self.open:
            cycle = " -> ".join([*self.open, recipe])
            raise ConfigError([Problem(path.name, None, f"recipes refer to each other in a cycle: {cycle}")])
        changes = _parse_overrides(overrides)
        base = self.graph(name) if overrides else None
        self.open.append(recipe)
        try:
            file = read_recipe_file(self.folder, path, changes)
            shared = [base] if base else []
            if file.extends:
                try:
                    shared.append(self.graph(file.extends))
                except ConfigError as error:  # report this recipe's own problems along with them
                    file = replace(file, problems=(*file.problems, *error.problems))
            variant = f"{recipe}+{digest(changes)[:8]}" if changes else recipe
            built = Building(self.graph, variant, file, shared, changes).graph()
            inside = self.folder / f"{recipe}.yaml"
            named = recipe if inside.exists() and inside.samefile(path) else name  # a recipe of the folder is the same by path or by name
            graph = replace(built, source=named, extends=recipe if changes else file.extends or "")
        finally:
            self.open.pop()
        if not overrides:
            self.graphs[recipe] = graph
        return graph

    def _variant(self, name: str, overrides: Sequence[str]) -> Graph:
        """A variant by its name `RECIPE+HASH`, which `overrides` change further."""
        if name in self.graphs and not overrides:
            return self.graphs[name]
        artifacts = self.folder.parents[1] / "artifacts"
        path = self.folder.parents[1] / source_file(name)
        if not os.path.lexists(path):
            known = ", ".join(sorted(found.parent.name for found in artifacts.glob("*+*/source.json"))) or "none; --set makes one"
            raise ConfigError([Problem(name, None, f"there is no variant {name!r}; available: {known}")])
        source = read_document(path, source_file(name)).value
        recipe, own = source.get("recipe"), source.get("set")
        if not isinstance(recipe, str) or not isinstance(own, list) or not all(isinstance(change, str) for change in own):
            raise ConfigError([Problem(source_file(name), None, "must have `recipe`, a name, and `set`, a list: restore it from git")])
        recipe = str(self.folder.parents[1] / recipe) if recipe.endswith((".yaml", ".yml")) else recipe
        graph = self.graph(recipe, (*own, *overrides))
        if not overrides:
            if graph.recipe != name:
                raise ConfigError([Problem(source_file(name), None, f"describes {graph.recipe}, not {name}: restore it from git")])
            self.graphs[name] = graph
        return graph


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for text in overrides:
        place, equals, value = text.partition("=")
        secret = secret_problem(place if equals else "the override", text)
        if secret:
            raise ConfigError([Problem("--set", None, secret)])
        if not equals or "." not in place:
            raise ConfigError([Problem("--set", None, f"{text!r} must be STAGE.FIELD=VALUE, e.g. sft.optimizer.learning_rate=1e-4")])
        try:
            changes[place.strip()] = parse_value(value)
        except ValueError as error:
            raise ConfigError([Problem("--set", None, f"{text!r}: {error}")]) from error
    return dict(sorted(changes.items()))
