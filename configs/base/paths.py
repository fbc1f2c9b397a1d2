"""Paths as they may stand in recipes and records: relative and in normal form."""

from typing import Annotated

from pydantic import AfterValidator

from configs.base.texts import UNSEEN, shown

LONGEST_PATH, LONGEST_PART, DEEPEST_PATH = 1024, 255, 32


def relative_path(value: str) -> str:
    """A relative POSIX path in normal form, `data/rows.jsonl`."""
    parts = value.split("/")
    said = shown(repr(value if len(value) <= 80 else f"{value[:80]}…"))
    if not value or value.startswith("/"):
        raise ValueError(f"{said} must be a path inside the project or folder, relative to its root")
    if UNSEEN.search(value) or "\\" in value:
        raise ValueError(f"{said} holds a control character or a backslash: rename the file")
    if len(value) > LONGEST_PATH or len(parts) > DEEPEST_PATH or any(len(part.encode()) > LONGEST_PART for part in parts):
        raise ValueError(f"{said} is too long: at most {LONGEST_PATH} characters, {DEEPEST_PATH} folders, and {LONGEST_PART} bytes a name")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{said} must be a path inside the project or folder, in normal form: no `..`, `.`, doubled or last slash")
    return value


RelativePath = Annotated[str, AfterValidator(relative_path)]
