"""Names that a recipe gives to its models."""

import re

from pydantic import Field

from pedigree.configs.base.frozen import Frozen

MODEL_NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
"""Artifact names that DVC accepts, without the separators of an address."""


class Model(Frozen):
    """A named model, for `pedigree models`, `NAME@REVISION` and `dvc artifacts get`."""

    stage: str
    """The stage that makes it; its address once loaded."""
    desc: str = ""
    """One-line description."""
    labels: tuple[str, ...] = Field(default=(), strict=False)
    """Search labels for DVC's tools."""
