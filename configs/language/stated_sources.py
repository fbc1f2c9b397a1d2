"""What the stages of a recipe bring in from outside, with licenses and Hub revisions, by the hook `sources` of their kinds.

Jobs never import this module: their fingerprints of code would hold the code of all sources and filters.
"""

from collections.abc import Mapping
from typing import Any

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.licenses import UNKNOWN
from pedigree.configs.base.packaged import ASSETS
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.language.kinds import kind_of
from pedigree.configs.rows.datasets import PrepareData, title


def stated_sources(config: Frozen) -> list[Mapping[str, Any]]:
    """The sources in the config of a stage, including worked examples, with the fields that dumps and records leave out."""
    sources = kind_of(config).sources
    if sources is None:
        return []
    whole = _whole(config)
    shots = [whole["shots"]["source"]] if isinstance(config, PrepareData) and config.shots else []
    return [source for source in (*sources(whole), *shots) if isinstance(source, Mapping)]


def _whole(value: Any) -> Any:
    if isinstance(value, Frozen):
        return {name: _whole(getattr(value, name)) for name in (*type(value).model_fields, *type(value).model_computed_fields)}
    if isinstance(value, Mapping):
        return {name: _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list | tuple) else value


def hub_sources(config: Frozen) -> list[Mapping[str, Any]]:
    """The stage's sources on the Hugging Face Hub: datasets have a `split`, models have none.

    Raises:
        UsageProblem: a source of an added kind has no `repo` or no `revision`.
    """
    found = [source for source in stated_sources(config) if source.get("type") == "hub"]
    for source in found:
        if missing := [name for name in ("repo", "revision") if not source.get(name)]:
            raise UsageProblem(
                f"the kind {kind_of(config).name} declares a source of type hub without {' and '.join(missing)}: "
                "give it both, or another type, in the hook `sources` of its kind.py"
            )
    return found


def licences_of(config: Frozen) -> dict[str, list[str]]:
    """Title → stated licenses, for the external sources of a stage."""
    found: dict[str, set[str]] = {}
    for source in stated_sources(config):
        if (named := title(source)) is not None:
            asset = ASSETS.get(source.get("asset", ""))
            found.setdefault(named, set()).add(asset.licence if asset else source.get("licence") or UNKNOWN)
    return {named: sorted(stated) for named, stated in sorted(found.items())}


def generators_of(config: Frozen) -> dict[str, list[str]]:
    """Title → models that wrote the rows, for external sources that state them."""
    found: dict[str, set[str]] = {}
    for source in stated_sources(config):
        if writers := source.get("generator"):
            found.setdefault(str(title(source)), set()).update([writers] if isinstance(writers, str) else writers)
    return {named: sorted(stated) for named, stated in sorted(found.items())}
