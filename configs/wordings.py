"""The words that filters look for by default, `configs/wordings.yaml`."""

from functools import cache
from pathlib import Path

import yaml

WORDINGS = Path(__file__).with_name("wordings.yaml")


@cache
def wordings(name: str) -> tuple[str, ...]:
    """One of its lists, as it was when it was first asked for."""
    return tuple(yaml.safe_load(WORDINGS.read_text())[name])
