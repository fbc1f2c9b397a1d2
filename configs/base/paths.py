"""Validation of paths: in records relative and normalized; sources of recipes may be anywhere on this machine."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from pedigree.configs.base.texts import UNSEEN, shown

LONGEST_PATH, LONGEST_PART, DEEPEST_PATH = 1024, 255, 32


@lru_cache(maxsize=4096)  # the records of a lineage name the same files again and again
def relative_path(value: str) -> str:
    """Validate a normalized relative POSIX path, e.g. `data/rows.jsonl`."""
    parts = value.split("/")
    named = shown(repr(value if len(value) <= 80 else f"{value[:80]}…"))
    if not value or value.startswith("/"):
        raise ValueError(f"{named} must be a path inside the project or folder, relative to its root")
    if UNSEEN.search(value) or "\\" in value:
        raise ValueError(f"{named} contains a control character or a backslash: rename the file")
    if len(value) > LONGEST_PATH or len(parts) > DEEPEST_PATH or any(len(part.encode()) > LONGEST_PART for part in parts):
        raise ValueError(
            f"{named} is too long: at most {LONGEST_PATH} characters, {DEEPEST_PATH} folders, and {LONGEST_PART} bytes per name"
        )
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{named} must be a normalized path inside the project or folder: no `..`, `.`, repeated or trailing slash")
    return value


RelativePath = Annotated[str, AfterValidator(relative_path)]
OUTSIDE = "outside"
"""Folder of the project, ignored by git, for copies of sources that are elsewhere on another machine."""


class OutsidePath(str):
    """`outside/NAME`, the name of a source outside the project in keys, records and reports, which have no path of this machine."""

    written: str
    """The path in the recipe."""


def source_path(value: str) -> str:
    """Validate the path of a source: relative to the project, or anywhere: absolute, with `~` or with `..`."""
    if not value.startswith(("/", "~")) and ".." not in value.split("/"):
        return relative_path(value)
    name = value.rstrip("/").rpartition("/")[2]
    if name in ("", "~", "..", "."):
        raise ValueError(f"{value!r} must end in the name of a file or a folder")
    found = OutsidePath(relative_path(f"{OUTSIDE}/{name}"))
    found.written = value
    return found


SourcePath = Annotated[str, AfterValidator(source_path)]


def place_of(root: Path, source: str) -> Path:
    """Where a source is on this machine: as written, else in the project under its name."""
    if isinstance(source, OutsidePath):
        written = root / Path(source.written).expanduser()
        if written.exists():
            return written
    return root / source


def written_of(source: str) -> str:
    """A source as its recipe names it."""
    return source.written if isinstance(source, OutsidePath) else source
