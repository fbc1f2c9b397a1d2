"""Hugging Face Hub names in recipes: repositories, and revisions (a commit, or a placeholder for one)."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

PIN_ME = "pin me"
"""Placeholder for a revision; `pedigree pin` replaces it with the newest commit."""
COMMIT = re.compile(r"[0-9a-f]{40}")


def full_commit(value: str) -> str:
    """Validate a full commit hash or `pin me`."""
    if value != PIN_ME and not COMMIT.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a full commit hash (40 hexadecimal digits), and branches such as main move: write a commit, or "
            f"`{PIN_ME}`, which `pedigree pin` replaces with the newest commit"
        )
    return value


Revision = Annotated[str, AfterValidator(full_commit)]
Repository = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?$")]
"""`OWNER/NAME`, or `NAME` alone."""
