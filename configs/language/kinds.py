"""All kinds of stages, found by their folders: each package of `stages` with a module `kind`."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.kind import Kind
from pedigree.configs.base.problems import UsageProblem


def _found() -> Iterator[tuple[str, Kind]]:
    """
    Raises:
        UsageProblem: a kind that a user adds cannot be imported, or has the name of another one.
    """
    stages = importlib.import_module("pedigree.stages")  # at run time: nothing in `configs` depends on any one kind
    names: set[str] = set()
    for place, folder in enumerate(map(Path, stages.__path__)):
        for name in sorted(path.parent.name for path in folder.glob("*/kind.py")):
            if name in names:
                raise UsageProblem(f"{folder / name}: the kind {name} exists already; rename the folder")
            names.add(name)
            try:
                yield name, importlib.import_module(f"pedigree.stages.{name}.kind").KIND
            except Exception as error:  # of a user's file, which may raise anything
                if place == 0:
                    raise
                raise UsageProblem(f"{folder / name / 'kind.py'} cannot be used: {type(error).__name__}: {error}") from error


KINDS: dict[str, Kind] = dict(_found())
_OF_CONFIGS = {kind.config: kind for kind in KINDS.values()}
_UNKNOWN = Kind(name="", version=0, config=Frozen, inputs={}, output=lambda config, inputs: "", family="source")


def kind_of(config: Frozen) -> Kind:
    """The kind that a config belongs to."""
    return _OF_CONFIGS[type(config)]


def recorded_kind(name: str) -> Kind:
    """The kind that a record names; one of the family `source` with all defaults if this version does not know it."""
    return KINDS.get(name, _UNKNOWN)


def measures(kind: str, port: str) -> bool:
    """Whether the output of a kind is only measured by what arrives at a port."""
    known = recorded_kind(kind).inputs.get(port)
    return known is not None and known.measures


def brings_in(kind: str) -> bool:
    """Whether artifacts of a kind may come from outside the recipe."""
    return recorded_kind(kind).sources is not None


def imports_rows(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether some rows of a recorded config come from no other stage."""
    sources = sources_of(kind, config)
    return brings_in(kind) and not (sources and all(source.get("type") == "artifact" for source in sources))


def sources_of(kind: str, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sources in a recorded config of a kind."""
    sources = recorded_kind(kind).sources
    return [source for source in sources(config) if isinstance(source, Mapping)] if sources else []
