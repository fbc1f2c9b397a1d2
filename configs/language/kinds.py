"""All kinds of stages, found by their folders: each package of `stages` with a module `kind`."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.kind import Family, Kind
from pedigree.configs.base.licenses import UNKNOWN
from pedigree.configs.base.packaged import ASSETS
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.rows.datasets import PrepareData, title


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
    return list(sources(config)) if sources else []


def stated_sources(config: Frozen) -> list[Mapping[str, Any]]:
    """The sources in the config of a stage, including worked examples, with the fields that dumps and records leave out."""
    sources = kind_of(config).sources
    if sources is None:
        return []
    whole = _whole(config)
    shots = [whole["shots"]["source"]] if isinstance(config, PrepareData) and config.shots else []
    return [*sources(whole), *shots]


def _whole(value: Any) -> Any:
    if isinstance(value, Frozen):
        return {name: _whole(getattr(value, name)) for name in (*type(value).model_fields, *type(value).model_computed_fields)}
    if isinstance(value, Mapping):
        return {name: _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list | tuple) else value


def hub_sources(config: Frozen) -> list[Mapping[str, Any]]:
    """The stage's sources on the Hugging Face Hub: datasets have a `split`, models have none."""
    return [source for source in stated_sources(config) if source.get("type") == "hub"]


def licences_of(config: Frozen) -> dict[str, list[str]]:
    """Title → stated licenses, for the external sources of a stage."""
    found: dict[str, set[str]] = {}
    for source in stated_sources(config):
        if (named := title(source)) is not None:
            asset = ASSETS.get(source.get("asset", ""))
            found.setdefault(named, set()).add(asset.licence if asset else source.get("licence", UNKNOWN))
    return {named: sorted(stated) for named, stated in sorted(found.items())}


def generators_of(config: Frozen) -> dict[str, list[str]]:
    """Title → models that wrote the rows, for external sources that state them."""
    found: dict[str, set[str]] = {}
    for source in stated_sources(config):
        if writers := source.get("generator"):
            found.setdefault(str(title(source)), set()).update([writers] if isinstance(writers, str) else writers)
    return {named: sorted(stated) for named, stated in sorted(found.items())}


def family_of(kind: str) -> Family:
    """The family of a kind; `source` for what comes from elsewhere."""
    return KINDS[kind].family if kind in KINDS else "source"
