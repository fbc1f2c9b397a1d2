"""How this Pedigree was installed, for the remedies in messages."""

import json
from functools import cache
from importlib.metadata import Distribution, distributions


@cache
def is_clone() -> bool:
    """Whether it runs from a clone, where `make setup` installs everything, rather than from an installed package."""
    return not any(found.read_text("INSTALLER") and not _is_editable(found) for found in distributions(name="pedigree"))


def set_up(installed: str) -> str:
    """The command that completes the installation: `make setup`, or this one for an installed package."""
    return f"run `{'make setup' if is_clone() else installed}`"


def missing(extras: str) -> str:
    """The command that installs the packages of these extras, for this version: another project has the same name on PyPI."""
    version = next((found.version for found in distributions(name="pedigree")), "")
    return set_up(f"pip install 'pedigree[{extras}]=={version}'")


def _is_editable(found: Distribution) -> bool:
    return bool(json.loads(found.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))
