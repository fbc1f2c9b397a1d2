"""How this Pedigree was installed, for the remedies in messages."""

import json
import sys
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@cache
def is_clone() -> bool:
    """Whether it runs in the `.venv` of a clone, where `make setup` installs everything, rather than in any other environment."""
    return not any(found.read_text("INSTALLER") and not _is_set_up(found) for found in distributions(name="pedigree"))


def set_up(installed: str) -> str:
    """The command that completes the installation: `make setup`, or this one in any other environment."""
    return f"run `{'make setup' if is_clone() else installed}`"


def missing(extras: str, *, gpu: bool = True) -> str:
    """The command that installs the packages of these extras, for this version from where it came: PyPI's `pedigree` is another project.

    Without a `gpu` it installs the lock for the CPU, since the extras would install the builds for CUDA.
    """
    found = next(iter(distributions(name="pedigree")), None)
    if found is None or is_clone():
        return set_up("")
    clone, origin = _clone(found), _origin(found)
    if not gpu:
        lock = (clone or Path(str(found.locate_file("pedigree")))) / "requirements" / "cpu.txt"
        return set_up(f"pip install --no-deps -r '{lock}'") + " after installing the CPU build of torch (docs/install.md)"
    if clone:
        return set_up(f"pip install --editable '{clone}[{extras}]'")
    place = origin.get("url")
    if version := origin.get("vcs_info"):
        place = f"{version['vcs']}+{place}@{version['commit_id']}"
    return set_up(f"pip install 'pedigree[{extras}]{f' @ {place}' if place else f'=={found.version}'}'")


def _origin(found: Distribution) -> dict[str, Any]:
    """Where pip found a distribution, if not in an index."""
    return json.loads(found.read_text("direct_url.json") or "{}")


def _clone(found: Distribution) -> Path | None:
    """The clone of an editable installation."""
    origin = _origin(found)
    return Path(unquote(urlsplit(origin["url"]).path)) if origin.get("dir_info", {}).get("editable") else None


def _is_set_up(found: Distribution) -> bool:
    clone = _clone(found)
    return clone is not None and Path(sys.prefix).resolve() == (clone / ".venv").resolve()
