"""Template arguments of rows: values for further variables of a chat template, e.g. `enable_thinking`.

The tools that a row offers are one of them, see `data/chat/tools.py`.
"""

import json
from typing import Any

from pedigree.data.chat.tools import OFFERED, offered, tools_in

COLUMNS = ("template_arguments", "chat_template_kwargs")
"""Columns with template arguments; the first that exists is used."""


def arguments_in(row: Any) -> dict[str, Any] | None:
    """A row's template arguments, including its tools; None if it has none.

    Null and empty arguments are dropped, because a table has every argument in every row.

    Raises:
        ValueError: they are not a mapping of names to JSON values, or the tools are invalid or given twice.
    """
    if not isinstance(row, dict):
        return None
    given, tools = _given(row), tools_in(row)
    if tools is not None and OFFERED in given:
        raise ValueError("tools stand both in a column and among the template arguments: leave one of them out by `columns`")
    return given | ({} if tools is None else {OFFERED: tools}) or None


def _given(row: dict[str, Any]) -> dict[str, Any]:
    column = next((name for name in COLUMNS if row.get(name) is not None), None)
    if column is None:
        return {}
    try:
        given = json.loads(row[column] or "{}") if isinstance(row[column], str) else row[column]
        json.dumps(given, allow_nan=False)  # a table may hold dates and bytes, and Python's JSON allows NaN
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{column} is nothing that JSON has a form for ({error!s:.80})") from error
    if not isinstance(given, dict) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise ValueError(f"{column} {given!r:.80} is no mapping of names to values")
    found = {name: value for name, value in given.items() if value is not None and value not in ("", [], {})}
    if OFFERED in found:
        found[OFFERED] = offered(found[OFFERED], f"{OFFERED} in {column}")
    return found
