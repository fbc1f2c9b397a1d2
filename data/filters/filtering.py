"""Which rows to keep, and why not the others.

A filter looks at each row by itself, in any process, and notes a fact; what it takes to decide is all facts, and for pairs that might be
near duplicates these rows once more.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.rows.filters import ExactDuplicates, Filter, Ids, Language, Licences, NearDuplicates, Tokens, Values
from data.filters import row_filters, row_values
from data.filters.row_filters import Counted, Row, Seen
from data.filters.row_values import Said

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])
"""What rows have in common that a filter compares: a hash of 128 bits, of which no two of 2⁴⁰ different ones are equal by chance."""
Facts = Seen | NDArray[Any]
"""What a filter says against a row, by its place; or a line for each row: the `KEY` that equal ones share, the bands of near ones, a
language."""
Places = NDArray[np.int64]
Read = Callable[[Places], Sequence[Row]]
"""The rows at some places."""


@dataclass(frozen=True)
class Drop:
    """Why a row goes."""

    reason: str
    """The filter's name: what drops are counted by."""
    evidence: str
    """What it saw in this row."""


@dataclass(frozen=True)
class Beside:
    """What is known of some rows of one source besides what stands in them, a line for each; empty where no filter goes by it."""

    counts: Sequence[Counted] = ()
    """Their tokens."""
    said: Sequence[Said] = ()
    """By their data set."""
    source: int = 0
    """Its number in the recipe."""


def look(filters: Sequence[Filter], rows: Sequence[Row], beside: Beside = Beside()) -> list[Facts]:
    """By filter, what it notes of the rows."""
    return [_facts(one, rows, beside) for one in filters]


def _facts(one: Filter, rows: Sequence[Row], beside: Beside) -> Facts:
    match one:
        case Tokens():
            return row_filters.noted(row_filters.too_few_or_many(one, count) for count in beside.counts)
        case Values():
            return row_filters.noted(row_values.against(one, said) for said in beside.said)
        case Licences(stated=stated):
            return row_filters.noted(row_values.unlicensed(one, said, stated[beside.source]) for said in beside.said)
        case ExactDuplicates():
            return np.frombuffer(b"".join(row_filters.fingerprint(row, KEY.itemsize) for row in rows), KEY)
        case NearDuplicates(threshold=threshold, shingle=size):
            from data.filters import near_duplicates  # numba takes half a second

            return near_duplicates.bands([row_filters.folded(row) for row in rows], size, threshold)
        case Language():
            return row_filters.language_codes(one, rows)
        case Ids(ids=ids):
            named = frozenset(ids)
            return {place: row["id"] for place, row in enumerate(rows) if row["id"] in named}
        case _:
            return row_filters.seen(one, rows)


def joined(facts: Sequence[Facts], sizes: Sequence[int]) -> Facts:
    """One filter's facts of all rows, from those of one part of them after the other.

    Args:
        facts: of each part.
        sizes: rows of each part.
    """
    starts = np.cumsum([0, *sizes]).tolist()
    lines = [part for part in facts if not isinstance(part, dict)]
    if lines:
        return np.concatenate(lines)
    parts = [part for part in facts if isinstance(part, dict)]
    return {start + place: seen for start, part in zip(starts, parts, strict=False) for place, seen in part.items()}


def decide(filters: Sequence[Filter], facts: Sequence[Facts], ids: Sequence[str], read: Read, workers: int = 1) -> dict[int, Drop]:
    """By place, the rows that go; each filter decides about what those before it kept.

    Args:
        filters: in the recipe's order.
        facts: of each filter, of all rows, see `look`.
        ids: of all rows.
        read: the rows again, of which some are compared.
        workers: processes that compare them.
    """
    drops: dict[int, Drop] = {}
    for one, noted in zip(filters, facts, strict=True):
        if isinstance(noted, dict):
            seen = {place: evidence for place, evidence in noted.items() if place not in drops}
        else:
            left = np.setdiff1d(np.arange(len(noted)), np.fromiter(drops, np.int64, len(drops)))
            seen = _judged(one, noted[left], left, ids, read, workers)
        drops |= {place: Drop(one.type, evidence) for place, evidence in seen.items()}
    return drops


def _judged(one: Filter, lines: NDArray[Any], places: Places, ids: Sequence[str], read: Read, workers: int) -> Seen:
    """What a filter that notes a line for each row says against some of those at these places."""
    match one:
        case NearDuplicates():
            return _near(one, lines, places, ids, read, workers)
        case Language(codes=codes, unknown=unknown):
            stays = {*codes, *([""] if unknown == "keep" else [])}
            return {
                place: code or "unknown"
                for place, code in zip(places.tolist(), lines.astype(str).tolist(), strict=True)
                if code not in stays
            }
        case _:
            return {place: f"same text as {ids[first]}" for place, first in _repeated(lines, places).items()}


def _near(one: NearDuplicates, lines: NDArray[Any], places: Places, ids: Sequence[str], read: Read, workers: int) -> Seen:
    from data.filters import near_duplicates

    compare = near_duplicates.comparing(lambda numbers: [row_filters.folded(row) for row in read(places[numbers])], one.shingle, workers)
    at: list[int] = places.tolist()
    return {
        at[number]: near_duplicates.evidence(near, one.threshold, ids[at[near.kept]], ids[at[near.by]])
        for number, near in near_duplicates.near(lines, one.threshold, compare).items()
    }


def languages(filters: Sequence[Filter], facts: Sequence[Facts]) -> NDArray[np.bytes_] | None:
    """The language of each row, where a filter by languages noted it."""
    return next((np.asarray(noted) for one, noted in zip(filters, facts, strict=True) if isinstance(one, Language)), None)


def _repeated(keys: NDArray[np.void], places: Places) -> dict[int, int]:
    """Of these places: those whose key stands at an earlier one → the first of them.

    Args:
        keys: at these places.
        places: ascending.
    """
    order = np.lexsort((keys["low"], keys["high"]))  # stable: equal ones stay in the order of their places
    ranked = keys[order]
    fresh = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, bool)
    firsts = order[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    return dict(zip(places[order[~fresh]].tolist(), places[firsts[~fresh]].tolist(), strict=True))


def unknown_columns(filters: Sequence[Filter], known: Collection[str]) -> list[str]:
    """Columns that a filter goes by, none of which any row has.

    Args:
        filters: in the recipe's order.
        known: those that some row has.
    """
    named = (one.columns for one in filters if isinstance(one, Values))
    return [column for columns in named if not set(columns) & set(known) for column in columns]


def unknown_ids(filters: Sequence[Filter], facts: Sequence[Facts]) -> list[str]:
    """Ids that a filter names and no row has.

    Args:
        filters: in the recipe's order.
        facts: of each filter, of all rows, see `look`.
    """
    named = {name for one in filters if isinstance(one, Ids) for name in one.ids}
    noted = [seen for one, seen in zip(filters, facts, strict=True) if isinstance(one, Ids) and isinstance(seen, dict)]
    return sorted(named.difference(*(seen.values() for seen in noted)))
