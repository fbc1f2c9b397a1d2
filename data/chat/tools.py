"""Tools in conversations, and template arguments (`enable_thinking`), in external formats and in rows.

A call is a separate message, `{"role": "call", "content": '{"name": ..., "arguments": {...}}'}`, after the assistant's text in the same
turn, if any; a result is `{"role": "tool", "content": ...}`. Code that processes texts therefore sees both, and rows without tools need no
further fields. Offered tools are the template argument `tools`, a JSON text that preserves the order of names.
"""

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pedigree.data.records.messages import CALL, RESULT
from pedigree.data.records.records import Message, texts_within

OFFERED = "tools"
"""Template argument with a row's tools."""
OFFERS = ("tools", "functions")
"""Columns with tools; the second is OpenAI's older name."""
ARGUMENT_COLUMNS = ("template_arguments", "chat_template_kwargs")
"""Columns with template arguments; the first that exists is used."""
BLANK = ("", "[]", "{}", "null")
"""Texts that are empty as JSON."""
OF_IDS, LENGTH_OF_IDS = string.digits + string.ascii_letters, 9
"""Alphabet and length of generated call ids, for templates that write them; rows have none."""


# --- external formats --------------------------------------------------------------------------------------------------


def calls_in(given: Any, which: str) -> list[Message]:
    """Parse one call or a list, each {name, arguments} or OpenAI's {type, function: {name, arguments}}, or their JSON text.

    Raises:
        ValueError: malformed; `which` names their owner.
    """
    given = _of_json(given, which)
    calls = given if isinstance(given, list) else [given]
    if not calls:
        raise ValueError(f"{which} is a list of no calls")
    return [{"role": CALL, "content": _call(one, which)} for one in calls]


def _call(given: Any, which: str) -> str:
    function = given.get("function", given) if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if function is None or not isinstance(name, str) or not name:
        raise ValueError(f"{which} is no call {{name, arguments}}: {given!r:.80}")
    arguments = function.get("arguments")
    arguments = {} if _is_blank(arguments) else _of_json(arguments, f"{which}: what {name:.40} is called with")
    if not isinstance(arguments, dict):
        raise ValueError(f"{which} calls {name:.40} with arguments that are no object: {arguments!r:.80}")
    return _json({"name": name, "arguments": arguments}, which)


def tools_in(row: Mapping[str, Any]) -> str | None:
    """The JSON text of a row's tools, schemas in OpenAI's form {type, function: {name, ...}}; None if there are none.

    Raises:
        ValueError: malformed.
    """
    column = next((name for name in OFFERS if name in row and is_there(row[name])), None)
    return None if column is None else offered(row[column], column)


def offered(given: Any, which: str) -> str:
    """Convert a list of tools, or its JSON text, from {name, ...} or {type, function: {name, ...}} to JSON in the latter form.

    Raises:
        ValueError: malformed.
    """
    tools = _of_json(given, which)
    if not isinstance(tools, list):
        raise ValueError(f"{which} is no list of tools: {given!r:.80}")
    return _json([_tool(_of_json(one, which), which) for one in tools], which)


def _tool(given: Any, which: str) -> dict[str, Any]:
    tool = given if isinstance(given, dict) and "function" in given else {"type": "function", "function": given}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{which} has something that is no tool {{name, description, parameters}}: {given!r:.80}")
    return tool


def _of_json(given: Any, which: str) -> Any:
    """Decode a JSON text; from other values remove nulls, with which tables fill missing fields."""
    try:
        return json.loads(given) if isinstance(given, str) else _without_nulls(given)
    except ValueError as error:
        raise ValueError(f"{which} is no JSON: {given[:80]!r}") from error
    except RecursionError as error:
        raise ValueError(f"{which} is nested too deeply") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _json(value: Any, which: str) -> str:
    """JSON in which texts are unchanged except for quotes, backslashes and control characters."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{which} holds something that JSON has no form for ({error!s:.80})") from error


def is_there(value: Any) -> bool:
    """Whether a column's value in this row is not blank."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return not all(_is_blank(part) for part in parts)


def _is_blank(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in BLANK
    return value is None or (isinstance(value, (list, Mapping)) and not value)


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
    column = next((name for name in ARGUMENT_COLUMNS if row.get(name) is not None), None)
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


# --- for templates and searches ----------------------------------------------------------------------------------------


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form for chat templates, with a turn's calls in `tool_calls`.

    A turn takes `train` from its first message and `finish_reason` from its last. Each call has an `id`, which its result has as
    `tool_call_id`: results belong to the preceding calls, in order; surplus results have no id.
    """
    turns: list[dict[str, Any]] = []
    due: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == CALL:
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({**message, "role": "assistant", "content": ""})
            call = {"type": "function", "id": _id_of(message["content"], place), "function": json.loads(message["content"])}
            turns[-1].setdefault("tool_calls", []).append(call)
            due = [one["id"] for one in turns[-1]["tool_calls"]]
            if "finish_reason" in message:
                turns[-1]["finish_reason"] = message["finish_reason"]
        elif message["role"] == RESULT and due:
            turns.append({**message, "tool_call_id": due.pop(0)})
        else:
            turns.append({**message})
            due = []
    return turns


def _id_of(call: str, place: int) -> str:
    """A Mistral-style id that depends only on the call and its position in the conversation."""
    number = int.from_bytes(hashlib.blake2b(f"{place} {call}".encode(), digest_size=8).digest(), "big")
    return "".join(OF_IDS[number // len(OF_IDS) ** digit % len(OF_IDS)] for digit in range(LENGTH_OF_IDS))


def arguments_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Template arguments for rendering, with tools decoded."""
    found = dict(given or {})
    if isinstance(found.get(OFFERED), str):
        found[OFFERED] = json.loads(found[OFFERED])
    return found


def texts_called(row: Mapping[str, Any]) -> Iterator[str]:
    """The strings in a row's calls, decoded from JSON."""
    for message in row["messages"]:
        if message["role"] == CALL:
            yield from texts_within(json.loads(message["content"]))


def texts_offered(row: Mapping[str, Any]) -> Iterator[str]:
    """The strings in a row's offered tools, decoded from JSON."""
    arguments = row.get("template_arguments") or {}
    if isinstance(arguments.get(OFFERED), str):
        yield from texts_within(json.loads(arguments[OFFERED]))
