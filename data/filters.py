"""Which rows to keep, and why not the others."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.datasets import ExactDuplicates, Filter, Keywords, MaxCharacters


@dataclass(frozen=True)
class Keep:
    """The row stays."""


@dataclass(frozen=True)
class Drop:
    """The row goes."""

    reason: str
    """The filter's name: what drops are counted by."""
    evidence: str
    """What it saw in this row."""


Decision = Keep | Drop
KEEP = Keep()


@dataclass(frozen=True)
class Dropped:
    """A row that a filter took out."""

    row: dict[str, Any]
    drop: Drop


def apply(filters: Iterable[Filter], rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Dropped]]:
    """(kept rows, dropped rows with reasons), both in the given order; each filter sees what the one before it kept."""
    decide = [_decider(one) for one in filters]
    kept, dropped = [], []
    for row in rows:
        drop = next((decision for one in decide if isinstance(decision := one(row), Drop)), None)
        if drop is None:
            kept.append(row)
        else:
            dropped.append(Dropped(row, drop))
    return kept, dropped


def texts(row: dict[str, Any]) -> list[str]:
    """Every text of a row: its messages, and the answers of a preference."""
    return [message["content"] for message in row["messages"]] + [answer["text"] for answer in row.get("answers", ())]


def _decider(one: Filter) -> Callable[[dict[str, Any]], Decision]:
    match one:
        case MaxCharacters(limit=limit):
            return lambda row: _max_characters(row, limit)
        case ExactDuplicates():
            seen: dict[str, str] = {}
            return lambda row: _exact_duplicates(row, seen)
        case Keywords(words=words):
            pattern = re.compile("|".join(rf"(?<!\w){re.escape(word.casefold())}(?!\w)" for word in words))
            return lambda row: _keywords(row, pattern)


def _max_characters(row: dict[str, Any], limit: int) -> Decision:
    length = sum(len(text) for text in texts(row))
    return Drop("max_characters", f"{length} > {limit}") if length > limit else KEEP


def _exact_duplicates(row: dict[str, Any], seen: dict[str, str]) -> Decision:
    """`seen` maps a text to the id of the row that had it first."""
    text = "\x00".join(" ".join(unicodedata.normalize("NFC", part).casefold().split()) for part in texts(row))
    first = seen.setdefault(text, row["id"])
    return KEEP if first == row["id"] else Drop("exact_duplicates", f"same text as {first}")


def _keywords(row: dict[str, Any], pattern: re.Pattern[str]) -> Decision:
    found = pattern.search("\n".join(texts(row)).casefold())
    return Drop("keywords", found.group()) if found else KEEP
