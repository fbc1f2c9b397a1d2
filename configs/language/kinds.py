"""All kinds of stages, found by their folders: each package of `stages` with a module `kind`."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.kind import Family, Kind
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


def kind_of(config: Frozen) -> Kind:
    """The kind that a config belongs to."""
    return _OF_CONFIGS[type(config)]


def measures(kind: str, port: str) -> bool:
    """Whether the output of a kind is only measured by what arrives at a port; False for kinds that this version does not know."""
    known = KINDS.get(kind)
    return known is not None and port in known.inputs and known.inputs[port].measures


def removes_overlaps(kind: str) -> bool:
    """Whether a kind leaves out rows that overlap with benchmark items; False for kinds that this version does not know."""
    return kind in KINDS and KINDS[kind].removes_overlaps


def is_frozen(kind: str) -> bool:
    """Whether unseen suites may measure models of a kind; False for kinds that this version does not know."""
    return kind in KINDS and KINDS[kind].frozen


def brings_in(kind: str) -> bool:
    """Whether artifacts of a kind may come from outside the recipe; False for kinds that this version does not know."""
    return kind in KINDS and KINDS[kind].sources is not None


def imports_rows(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether some rows of a recorded config come from no other stage; False for kinds that this version does not know."""
    sources = sources_of(kind, config)
    return brings_in(kind) and not (sources and all(source.get("type") == "artifact" for source in sources))


def sources_of(kind: str, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sources in a recorded config of a kind; none for kinds that this version does not know."""
    sources = KINDS[kind].sources if kind in KINDS else None
    return [source for source in sources(config) if isinstance(source, Mapping)] if sources else []


def family_of(kind: str) -> Family:
    """The family of a kind; `source` for what comes from elsewhere."""
    return KINDS[kind].family if kind in KINDS else "source"
