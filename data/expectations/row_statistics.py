"""Statistics of each source's rows: turns, roles, lengths and languages, from a few numbers per row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pedigree.data.filters.row_filters import Counted, Row
from pedigree.data.records.messages import ALL_ROLES, ROLES, roles_of
from pedigree.data.records.scattered import Numbers

PERCENTILES = (50, 90, 99)
TURNS_OF = {role: f"turns of {role}" for role in ALL_ROLES}
"""Role → column of the index, see `noted`."""
TOKENS = "tokens"
"""Column of the index with token counts; null for rows that the chat template rejects."""


def noted(rows: Sequence[Row], counts: Sequence[Counted] | None = None) -> dict[str, pa.Array]:
    """Column → values: turns of each role per row, counting the answers of a preference as one assistant turn, and tokens, if counted."""
    turns = [roles_of(row["messages"]) for row in rows]
    for row, found in zip(rows, turns, strict=True):
        found["assistant"] += bool(row.get("answers"))
    columns = {name: pa.array([found[role] for found in turns], pa.int32()) for role, name in TURNS_OF.items()}
    if counts is not None:
        columns[TOKENS] = pa.array([count if isinstance(count, int) else None for count in counts], pa.int64())
    return columns


def summary(index: pa.Table, languages: NDArray[np.bytes_] | None, places: Numbers) -> dict[str, Any]:
    """Statistics of some rows.

    Args:
        index: one line per row, with characters (`size`) and the columns of `noted`.
        languages: language of each row from a filter; None without such a filter.
        places: positions of the rows to summarize.

    Returns:
        {"rows", "characters", "turns", "roles", "with_system", "tokens", "languages"}: number of rows, percentiles of characters and of
        turns, turns by role (calls and tool results if there are any), share of rows with a system turn, percentiles of tokens with their
        sum and the number of rows that the chat template rejects, rows by language. The last two only if known; without rows only "rows".
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
    by_code = {code or "unknown": count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
    return {**found, "languages": dict(sorted(by_code.items(), key=lambda pair: (-pair[1], pair[0])))}


def _tokens(counts: pa.ChunkedArray) -> dict[str, int]:
    known = np.asarray(counts.drop_null())
    spread = {**_spread(known), "sum": int(known.sum())} if len(known) else {}
    return {**spread, "refused": counts.null_count}


def _spread(values: NDArray[Any]) -> dict[str, int]:
    """Percentiles, which are values of actual rows, and the maximum."""
    found = np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()
    return {**{f"p{number}": int(value) for number, value in zip(PERCENTILES, found, strict=True)}, "max": int(values.max())}
