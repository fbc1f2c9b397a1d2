"""Validation of paths in recipes and records: relative and normalized."""

from typing import Annotated

from pydantic import AfterValidator

from pedigree.configs.base.texts import UNSEEN, shown

LONGEST_PATH, LONGEST_PART, DEEPEST_PATH = 1024, 255, 32


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
