"""What the rows of each source are like: how many turns they have, whose and how long, from a few numbers of each row."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.filters.row_filters import Counted, Row
from data.records.messages import ALL_ROLES, ROLES, roles_of
from data.records.scattered import Numbers

PERCENTILES = (50, 90, 99)
TURNS_OF = {role: f"turns of {role}" for role in ALL_ROLES}
"""Columns of the index, see `noted`."""
TOKENS = "tokens"
"""Column of the index where tokens are counted: null for rows that the chat template refuses."""


def noted(rows: Sequence[Row], counts: Sequence[Counted] | None = None) -> Iterator[tuple[str, pa.Array]]:
    """By role, how many turns each row has of it; the answers of a preference are one of the assistant's. And its tokens, where they were
    counted."""
    turns = [roles_of(row["messages"]) for row in rows]
    for row, found in zip(rows, turns, strict=True):
        found["assistant"] += bool(row.get("answers"))
    for role, name in TURNS_OF.items():
        yield name, pa.array([found[role] for found in turns], pa.int32())
    if counts is not None:
        yield TOKENS, pa.array([count if isinstance(count, int) else None for count in counts], pa.int64())


def summary(index: pa.Table, languages: NDArray[np.bytes_] | None, places: Numbers) -> dict[str, Any]:
    """What some rows are like.

    Args:
        index: a line for each row: characters (`size`), and what `noted` notes.
        languages: of each row, as a filter has told them; None where there was no such filter.
        places: of the rows that are meant.

    Returns:
        {"rows", "characters", "turns", "roles", "with_system", "tokens", "languages"}: number, numbers by percentile, the same, turns by
        role (calls and results of tools where there are some), share of the rows with a turn of the system, tokens by percentile with their
        sum and the number of rows that the chat template refuses, rows by language; the last two where they are known, of no rows their
        number alone.
    """
    if not len(places):
        return {"rows": 0}
    size = np.asarray(index["size"])[places]
    turns = {role: np.asarray(index[name])[places] for role, name in TURNS_OF.items()}
    found = {
        "rows": len(places),
        "characters": _spread(size),
        "turns": _spread(turns["user"] + turns["assistant"]),
        "roles": {role: int(counts.sum()) for role, counts in turns.items() if role in ROLES or counts.any()},
        "with_system": round(float((turns["system"] > 0).mean()), 4),
    }
    if TOKENS in index.column_names:
        found["tokens"] = _tokens(index[TOKENS].take(pa.array(places)))
    if languages is None:
        return found
    codes, counts = np.unique(languages[places].astype(str), return_counts=True)
    told = {code or "unknown": count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
    return {**found, "languages": dict(sorted(told.items(), key=lambda pair: (-pair[1], pair[0])))}


def _tokens(counts: pa.ChunkedArray) -> dict[str, int]:
    known = np.asarray(counts.drop_null())
    spread = {**_spread(known), "sum": int(known.sum())} if len(known) else {}
    return {**spread, "refused": counts.null_count}


def _spread(values: NDArray[Any]) -> dict[str, int]:
    """Percentiles that are values of some row, and the largest value."""
    found = np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()
    return {**{f"p{number}": int(value) for number, value in zip(PERCENTILES, found, strict=True)}, "max": int(values.max())}
