"""All kinds of stages, found by their folders: each package of `stages` with a module `kind`."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from configs.base.frozen import Frozen
from configs.base.kind import Family, Kind


def _found() -> Iterator[tuple[str, Kind]]:
    stages = importlib.import_module("stages")  # at run time: nothing in `configs` depends on any one kind
    for package in pkgutil.iter_modules(stages.__path__):
        if package.ispkg and any(Path(folder, package.name, "kind.py").exists() for folder in stages.__path__):
            yield package.name, importlib.import_module(f"stages.{package.name}.kind").KIND


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


def family_of(kind: str) -> Family:
    """The family of a kind; `source` for what comes from elsewhere."""
    return KINDS[kind].family if kind in KINDS else "source"
