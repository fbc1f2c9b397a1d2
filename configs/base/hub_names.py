"""Names on the Hugging Face hub as they may stand in recipes: repositories, and commits or the wish for one."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

PIN_ME = "pin me"
"""A revision that is still to be chosen: `pedigree pin` writes the newest commit in its place."""
COMMIT = re.compile(r"[0-9a-f]{40}")


def full_commit(value: str) -> str:
    """A full commit hash, or `pin me`."""
    if value != PIN_ME and not COMMIT.fullmatch(value):
        raise ValueError(
            f"{value!r} is no full commit hash (40 hexadecimal digits), and names like main move: write a commit, or `{PIN_ME}`, which "
            "`pedigree pin` replaces by the newest one"
        )
    return value


Revision = Annotated[str, AfterValidator(full_commit)]
Repository = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?$")]
"""`OWNER/NAME`, or `NAME` alone."""
