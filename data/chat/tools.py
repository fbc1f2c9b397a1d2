"""Tools in conversations: what is offered, what the assistant calls and what comes back, as others write them and as rows have them.

A call is a message of its own, `{"role": "call", "content": '{"name": ..., "arguments": {...}}'}`, after what the assistant says in the
same turn, if anything; a result is `{"role": "tool", "content": ...}`. So whatever looks at texts sees both, and rows without tools are
stored as if there were none. What is offered is the template argument `tools`, JSON in a text, in which names keep their order.
"""

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data.records.messages import CALL, RESULT
from data.records.records import Message, texts_within

OFFERED = "tools"
"""The template argument with the tools that a row offers."""
OFFERS = ("tools", "functions")
"""Columns of rows that have them; OpenAI's older name."""
BLANK = ("", "[]", "{}", "null")
"""Texts that say as JSON that nothing is there."""
OF_IDS, LENGTH_OF_IDS = string.digits + string.ascii_letters, 9
"""What calls are known by where a template writes it: rows have no ids."""


# --- as others write them ----------------------------------------------------------------------------------------------


def calls_in(given: Any, which: str) -> list[Message]:
    """Calls, one or a list, each {name, arguments} or OpenAI's {type, function: {name, arguments}}, or all of it as JSON in a text.

    Args:
        given: the calls.
        which: names what has them in errors.

    Raises:
        ValueError: they are something else.
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
    """The tools that a row offers, JSON schemas in OpenAI's form {type, function: {name, ...}}, as JSON; None where there are none.

    Raises:
        ValueError: a column for them holds something else.
    """
    column = next((name for name in OFFERS if name in row and is_there(row[name])), None)
    return None if column is None else offered(row[column], column)


def offered(given: Any, which: str) -> str:
    """Tools, a list or one as JSON in a text, of {name, ...} or {type, function: {name, ...}}, as JSON in the latter form.

    Raises:
        ValueError: they are something else.
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
    """What a text says as JSON; anything else without what is null in it, as tables fill in what single rows lack."""
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
    """Texts stand in it as they are, but for quotes, backslashes and line ends."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{which} holds something that JSON has no form for ({error!s:.80})") from error


def is_there(value: Any) -> bool:
    """Whether a column that tables have for all rows says something for this one."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return not all(_is_blank(part) for part in parts)


def _is_blank(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in BLANK
    return value is None or (isinstance(value, (list, Mapping)) and not value)


# --- as templates and searches read them -------------------------------------------------------------------------------


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them, the calls of a turn in its `tool_calls`, as OpenAI has them.

    The mark of a turn is that of its first message, its end that of its last one. Each call has an `id`, which its result has as
    `tool_call_id`: results are of the calls before them, in order, and one more than these has no id.
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
    """Letters and digits as Mistral's ids have them, the same for a call at this place of a conversation whatever follows."""
    number = int.from_bytes(hashlib.blake2b(f"{place} {call}".encode(), digest_size=8).digest(), "big")
    return "".join(OF_IDS[number // len(OF_IDS) ** digit % len(OF_IDS)] for digit in range(LENGTH_OF_IDS))


def arguments_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Template arguments as chat templates read them."""
    found = dict(given or {})
    if isinstance(found.get(OFFERED), str):
        found[OFFERED] = json.loads(found[OFFERED])
    return found


def texts_called(row: Mapping[str, Any]) -> Iterator[str]:
    """The texts within the calls of a row, one by one, as they were before they became JSON."""
    for message in row["messages"]:
        if message["role"] == CALL:
            yield from texts_within(json.loads(message["content"]))


def texts_offered(row: Mapping[str, Any]) -> Iterator[str]:
    """The same of the tools that it offers."""
    arguments = row.get("template_arguments") or {}
    if isinstance(arguments.get(OFFERED), str):
        yield from texts_within(json.loads(arguments[OFFERED]))
