"""Decide which rows to keep, with evidence for the dropped ones.

Filters first note facts about single rows, in any process. Decisions need all facts, and, for candidate near duplicates, the rows again.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pedigree.configs.rows.filters import ExactDuplicates, Filter, Ids, Language, Licences, NearDuplicates, Tokens, Values
from pedigree.data.filters import row_filters, row_values
from pedigree.data.filters.row_filters import Counted, Row
from pedigree.data.filters.row_values import ColumnValues

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])
"""128-bit hash for comparing rows; 2⁴⁰ different ones have no collision by chance."""
Facts = NDArray[Any]
"""What a filter notes, one value per row: evidence against it or None, the `KEY` shared by equal rows, MinHash bands, or a language."""
Places = NDArray[np.int64]
Read = Callable[[Places], Sequence[Row]]
"""Reads the rows at given positions."""


@dataclass(frozen=True)
class Drop:
    """Why a row is dropped."""

    reason: str
    """The filter's name, by which drops are counted."""
    evidence: str
    """What the filter found in this row."""


@dataclass(frozen=True)
class RowContext:
    """Further data about rows of one source, one entry per row; empty if no filter needs it."""

    counts: Sequence[Counted] = ()
    """Token counts."""
    values: Sequence[ColumnValues] = ()
    """Further columns of the dataset."""
    source: int = 0
    """The source's number in the recipe."""


def look(filters: Sequence[Filter], rows: Sequence[Row], beside: RowContext = RowContext()) -> list[Facts]:
    """Each filter's facts about the rows."""
    return [_facts(one, rows, beside) for one in filters]


def _facts(one: Filter, rows: Sequence[Row], beside: RowContext) -> Facts:
    match one:
        case Tokens():
            return row_filters.noted(row_filters.too_few_or_many(one, count) for count in beside.counts)
        case Values():
            return row_filters.noted(row_values.against(one, row) for row in beside.values)
        case Licences(stated=stated):
            return row_filters.noted(row_values.unlicensed(one, row, stated[beside.source]) for row in beside.values)
        case ExactDuplicates():
            return np.frombuffer(b"".join(row_filters.fingerprint(row, KEY.itemsize) for row in rows), KEY)
        case NearDuplicates(threshold=threshold, shingle=size):
            from pedigree.data.filters import near_duplicates  # importing numba takes half a second

            return near_duplicates.bands([row_filters.folded(row) for row in rows], size, threshold)
        case Language():
            return row_filters.language_codes(one, rows)
        case Ids(ids=ids):
            named = frozenset(ids)
            return row_filters.noted(row["id"] if row["id"] in named else None for row in rows)
        case _:
            return row_filters.evidence_of(one, rows)


def decide(filters: Sequence[Filter], facts: Sequence[Facts], ids: Sequence[str], read: Read, workers: int = 1) -> dict[int, Drop]:
    """Position → drop; each filter decides on the rows kept by earlier ones, by its facts about all rows (`look`). Rows are read again for
    comparison, in `workers` processes."""
    drops: dict[int, Drop] = {}
    for one, noted in zip(filters, facts, strict=True):
        left = np.setdiff1d(np.arange(len(noted)), np.fromiter(drops, np.int64, len(drops)))
        drops |= {place: Drop(one.type, evidence) for place, evidence in _judged(one, noted[left], left, ids, read, workers).items()}
    return drops


def _judged(one: Filter, lines: NDArray[Any], places: Places, ids: Sequence[str], read: Read, workers: int) -> dict[int, str]:
    """Evidence against rows, by position; `lines` are the facts about the rows at `places`."""
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
        case ExactDuplicates():
            return {place: f"same text as {ids[first]}" for place, first in _repeated(lines, places).items()}
        case _:
            return {place: evidence for place, evidence in zip(places.tolist(), lines.tolist(), strict=True) if evidence is not None}


def _near(one: NearDuplicates, lines: NDArray[Any], places: Places, ids: Sequence[str], read: Read, workers: int) -> dict[int, str]:
    from pedigree.data.filters import near_duplicates

    compare = near_duplicates.comparing(lambda numbers: [row_filters.folded(row) for row in read(places[numbers])], one.shingle, workers)
    at: list[int] = places.tolist()
    return {
        at[number]: near_duplicates.evidence(near, one.threshold, ids[at[near.kept]], ids[at[near.by]])
        for number, near in near_duplicates.near(lines, one.threshold, compare).items()
    }


def languages(filters: Sequence[Filter], facts: Sequence[Facts]) -> NDArray[np.bytes_] | None:
    """The language of each row, if there is a language filter."""
    return next((np.asarray(noted) for one, noted in zip(filters, facts, strict=True) if isinstance(one, Language)), None)


def _repeated(keys: NDArray[np.void], places: Places) -> dict[int, int]:
    """Position of a row with a repeated key → first position with that key; `keys` are those at the ascending positions `places`."""
    order = np.lexsort((keys["low"], keys["high"]))  # stable: equal keys stay in order of position
    ranked = keys[order]
    fresh = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, bool)
    firsts = order[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    return dict(zip(places[order[~fresh]].tolist(), places[firsts[~fresh]].tolist(), strict=True))


def unknown_columns(filters: Sequence[Filter], known: Collection[str]) -> list[str]:
    """Columns of filters for which no row has any of their columns; `known` are those that some row has."""
    named = (one.columns for one in filters if isinstance(one, Values))
    return [column for columns in named if not set(columns) & set(known) for column in columns]


def unknown_ids(filters: Sequence[Filter], facts: Sequence[Facts]) -> list[str]:
    """Ids named by filters that no row has; `facts` are each filter's about all rows, see `look`."""
    named = {name for one in filters if isinstance(one, Ids) for name in one.ids}
    return sorted(named.difference(*(noted.tolist() for one, noted in zip(filters, facts, strict=True) if isinstance(one, Ids))))
