"""What the rows of each source are like: how many turns they have, whose and how long, from a few numbers of each row."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.messages import ROLES
from data.row_filters import Row
from data.scattered import Numbers

PERCENTILES = (50, 90, 99)
TURNS_OF = {role: f"turns of {role}" for role in ROLES}
"""Columns of the index, see `noted`."""


def noted(rows: Sequence[Row]) -> Iterator[tuple[str, pa.Array]]:
    """By role, how many turns each row has of it; the answers of a preference are one of the assistant's."""
    turns = [Counter(message["role"] for message in row["messages"]) for row in rows]
    for row, found in zip(rows, turns, strict=True):
        found["assistant"] += bool(row.get("answers"))
    for role, name in TURNS_OF.items():
        yield name, pa.array([found[role] for found in turns], pa.int32())


def summary(index: pa.Table, languages: NDArray[np.bytes_] | None, places: Numbers) -> dict[str, Any]:
    """What some rows are like.

    Args:
        index: a line for each row: characters (`size`), and what `noted` notes.
        languages: of each row, as a filter has told them; None where there was no such filter.
        places: of the rows that are meant.

    Returns:
        {"rows", "characters", "turns", "roles", "with_system", "languages"}: number, numbers by percentile, the same, turns by role,
        share of the rows with a turn of the system, rows by language; of no rows the number alone.
    """
    if not len(places):
        return {"rows": 0}
    size = np.asarray(index["size"])[places]
    turns = {role: np.asarray(index[name])[places] for role, name in TURNS_OF.items()}
    found = {
        "rows": len(places),
        "characters": _spread(size),
        "turns": _spread(turns["user"] + turns["assistant"]),
        "roles": {role: int(counts.sum()) for role, counts in turns.items()},
        "with_system": round(float((turns["system"] > 0).mean()), 4),
    }
    if languages is None:
        return found
    codes, counts = np.unique(languages[places].astype(str), return_counts=True)
    told = {code or "unknown": count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
    return {**found, "languages": dict(sorted(told.items(), key=lambda pair: (-pair[1], pair[0])))}


def _spread(values: NDArray[Any]) -> dict[str, int]:
    """Percentiles that are values of some row, and the largest value."""
    found = np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()
    return {**{f"p{number}": int(value) for number, value in zip(PERCENTILES, found, strict=True)}, "max": int(values.max())}
