"""A finding of `pedigree doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """One finding; `remedy` is empty if no action is needed."""

    name: str
    ok: bool
    value: str
    remedy: str = ""
