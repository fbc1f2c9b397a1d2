"""Names that a recipe gives to its models."""

import re

from pydantic import Field

from configs.base.frozen import Frozen

MODEL_NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
"""What DVC takes as the name of an artifact, without the characters that stand between the parts of an address."""


class Model(Frozen):
    """A model with a name of its own: for `pedigree models`, for `NAME@REVISION`, and for `dvc artifacts get`."""

    stage: str
    """The stage that makes it; after loading, its address."""
    desc: str = ""
    """One line for people."""
    labels: tuple[str, ...] = Field(default=(), strict=False)
    """Words to find it by, in DVC's tools."""
