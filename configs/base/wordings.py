"""Default word lists of filters, `configs/wordings.yaml`."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pedigree.configs.base.document import read_document

WORDINGS = Path(__file__).parents[1] / "wordings.yaml"
ENGLISH = "en"


@cache
def wordings(name: str, languages: tuple[str, ...] = (ENGLISH,)) -> tuple[str, ...]:
    """One list, cached on first use; a list by language merges `all` with the given languages, without duplicates."""
    found = _read()[name]
    parts = [found] if isinstance(found, list) else [found.get(language, []) for language in ("all", *languages)]
    return tuple(dict.fromkeys(text for part in parts for text in part))


@cache
def worded() -> tuple[str, ...]:
    """Languages with their own lists, English first."""
    return tuple(_read()["refusals"])


@cache
def _read() -> Mapping[str, Any]:
    return read_document(WORDINGS).value
