"""Inputs of a recipe's expectations: small facts about each row, and the texts of sampled rows.

See `configs/rows/expectations.py` for names, types and meanings of the columns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from pedigree.data.filters.row_filters import turns_in
from pedigree.data.records.messages import divided
from pedigree.data.records.records import texts

Row = dict[str, Any]


def look(names: Sequence[str], rows: Sequence[Row]) -> dict[str, pa.Array]:
    """Name → fact of each row."""
    return {name: pa.array([fact(row) for row in rows], kind) for name in names for kind, fact in [OF_ROWS[name]]}


def texts_of(rows: Sequence[Row], names: Sequence[str]) -> pa.Table:
    """Table of the named texts, one line per row."""
    return pa.table({name: pa.array([OF_TEXTS[name](row) for row in rows], pa.large_string()) for name in names})


def _answer(row: Row) -> str:
    return row["answers"][0]["text"] if "answers" in row else "\n".join(message["content"] for message in divided(row["messages"])[1])


def _score_gap(row: Row) -> float | None:
    scores = [answer["score"] for answer in row["answers"] if answer["score"] is not None]
    return max(scores) - min(scores) if len(scores) > 1 else None


OF_ROWS: dict[str, tuple[pa.DataType, Callable[[Row], Any]]] = {
    "characters": (pa.int64(), lambda row: sum(map(len, texts(row)))),
    "prompt_characters": (pa.int64(), lambda row: sum(len(message["content"]) for message in divided(row["messages"])[0])),
    "turns": (pa.int64(), turns_in),
    "has_system": (pa.bool_(), lambda row: row["messages"][0]["role"] == "system"),
    "answer_characters": (pa.int64(), lambda row: len(_answer(row))),
    "verifier_name": (pa.string(), lambda row: (row["verifier"] or {}).get("name")),
    "answer_count": (pa.int64(), lambda row: len(row["answers"])),
    "best_score": (pa.float64(), lambda row: row["answers"][0]["score"]),
    "score_gap": (pa.float64(), _score_gap),
    "strength": (pa.float64(), lambda row: row["strength"]),
}
OF_TEXTS: dict[str, Callable[[Row], str]] = {"text": lambda row: "\n".join(texts(row)), "answer": _answer}
