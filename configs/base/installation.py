"""How this Pedigree was installed, for the remedies in messages."""

import json
from functools import cache
from importlib.metadata import Distribution, distributions
from typing import Any


@cache
def is_clone() -> bool:
    """Whether it runs from a clone, where `make setup` installs everything, rather than from an installed package."""
    return not any(found.read_text("INSTALLER") and not _is_editable(found) for found in distributions(name="pedigree"))


def set_up(installed: str) -> str:
    """The command that completes the installation: `make setup`, or this one for an installed package."""
    return f"run `{'make setup' if is_clone() else installed}`"


def missing(extras: str) -> str:
    """The command that installs the packages of these extras, for this version from where it came: PyPI's `pedigree` is another project."""
    found = next(iter(distributions(name="pedigree")), None)
    origin = _origin(found) if found else {}
    place = origin.get("url")
    if version := origin.get("vcs_info"):
        place = f"{version['vcs']}+{place}@{version['commit_id']}"
    where = f" @ {place}" if place else f"=={found.version}" if found else ""
    return set_up(f"pip install 'pedigree[{extras}]{where}'")


def _origin(found: Distribution) -> dict[str, Any]:
    """Where pip found a distribution, if not in an index."""
    return json.loads(found.read_text("direct_url.json") or "{}")


def _is_editable(found: Distribution) -> bool:
    return bool(_origin(found).get("dir_info", {}).get("editable"))
