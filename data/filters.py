"""Which rows to keep, and why not the others.

A filter looks at each row by itself, in any process, and notes a fact; what it takes to decide is all facts, without the rows.
"""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.datasets import ExactDuplicates, Filter, Keywords, MaxCharacters
from data.records import texts_within

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])
"""What rows have in common that a filter compares: a hash of 128 bits, of which no two of 2⁴⁰ different ones are equal by chance."""
Facts = dict[int, str] | NDArray[np.void]
"""What a filter says against a row, by its place; or of each row the `KEY` that equal ones share."""


@dataclass(frozen=True)
class Drop:
    """Why a row goes."""

    reason: str
    """The filter's name: what drops are counted by."""
    evidence: str
    """What it saw in this row."""


def look(filters: Sequence[Filter], rows: Sequence[dict[str, Any]]) -> list[Facts]:
    """By filter, what it notes of the rows."""
    return [_facts(one, rows) for one in filters]


def joined(facts: Sequence[Facts], sizes: Sequence[int]) -> Facts:
    """One filter's facts of all rows, from those of one part of them after the other.

    Args:
        facts: of each part.
        sizes: rows of each part.
    """
    starts = np.cumsum([0, *sizes]).tolist()
    keys = [part for part in facts if not isinstance(part, dict)]
    if keys:
        return np.concatenate(keys)
    parts = [part for part in facts if isinstance(part, dict)]
    return {start + place: seen for start, part in zip(starts, parts, strict=False) for place, seen in part.items()}


def decide(filters: Sequence[Filter], facts: Sequence[Facts], ids: Sequence[str]) -> dict[int, Drop]:
    """By place, the rows that go; each filter decides about what those before it kept.

    Args:
        filters: in the recipe's order.
        facts: of each filter, of all rows, see `look`.
        ids: of all rows.
    """
    drops: dict[int, Drop] = {}
    for one, seen in zip(filters, facts, strict=True):
        if isinstance(seen, dict):
            found = {place: evidence for place, evidence in seen.items() if place not in drops}
        else:
            left = np.setdiff1d(np.arange(len(seen)), np.fromiter(drops, np.int64, len(drops)))
            found = {place: f"same text as {ids[first]}" for place, first in _repeated(seen, left).items()}
        drops |= {place: Drop(one.type, evidence) for place, evidence in found.items()}
    return drops


def _repeated(keys: NDArray[np.void], places: NDArray[np.int64]) -> dict[int, int]:
    """Of these places: those whose key stands at an earlier one → the first of them."""
    keys = keys[places]
    order = np.lexsort((keys["low"], keys["high"]))  # stable: equal ones stay in the order of their places
    ranked = keys[order]
    fresh = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, bool)
    firsts = order[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    return dict(zip(places[order[~fresh]].tolist(), places[firsts[~fresh]].tolist(), strict=True))


def texts(row: dict[str, Any]) -> list[str]:
    """Every text of a row: its messages, the answers of a preference, and what its template arguments say."""
    said = [message["content"] for message in row["messages"]] + [answer["text"] for answer in row.get("answers", ())]
    return said + list(texts_within(row.get("template_arguments")))


def _facts(one: Filter, rows: Sequence[dict[str, Any]]) -> Facts:
    match one:
        case MaxCharacters(limit=limit):
            lengths = [sum(len(text) for text in texts(row)) for row in rows]
            return {place: f"{length} > {limit}" for place, length in enumerate(lengths) if length > limit}
        case ExactDuplicates():
            return np.frombuffer(b"".join(_folded(row) for row in rows), KEY)
        case Keywords(words=words):
            pattern = re.compile("|".join(rf"(?<!\w){re.escape(word.casefold())}(?!\w)" for word in words))
            found = (pattern.search("\n".join(texts(row)).casefold()) for row in rows)
            return {place: match.group() for place, match in enumerate(found) if match}


def _folded(row: dict[str, Any]) -> bytes:
    """The key of the row's texts, their case and space apart."""
    text = "\x00".join(" ".join(unicodedata.normalize("NFC", part).casefold().split()) for part in texts(row))
    return hashlib.blake2b(text.encode(), digest_size=KEY.itemsize).digest()
