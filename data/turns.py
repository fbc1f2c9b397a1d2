"""Turns of a conversation as others write them, as messages of ours; what a message has no place for is refused by name.

    {role, content [, weight]}        OpenAI's; the content is a text, or a list of parts, [{"type": "text", "text": ...}, ...]
    {from, value [, weight]}          ShareGPT's

A developer is OpenAI's newer name for the system. Texts of several parts follow each other with nothing between them, as chat templates
write them. Weights are those of the assistant's turns: 0 is not trained, and beside a turn with a weight one without counts 1. Who speaks
by what `name`, and keys that nobody knows, are ignored.
"""

from collections.abc import Mapping
from typing import Any

from data.records import Message

ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
"""Of the names that others have, ours."""
TOOL_ROLES = ("tool", "function", "ipython", "environment", "observation", "function_call", "function_response", "tool_call")
TOOLS = "conversations with tools are not read yet"
OF_TOOLS: Mapping[str, str] = dict.fromkeys(("tools", "functions", "tool_calls", "function_call", "function_calls"), TOOLS)
"""Keys of a turn, or columns of a row, with what can be called and what is → why they are refused."""
OF_TURNS: Mapping[str, str] = {
    **OF_TOOLS,
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "what is to be trained stands in the content"),
}
OF_ROWS: Mapping[str, str] = {
    **OF_TOOLS,
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), "only text is trained"),
}
BLANK = ("", "[]", "{}", "null")
"""Texts that say as JSON that nothing is there."""


def refuse_more_than_messages(row: Mapping[str, Any]) -> None:
    """Raises ValueError for a row whose columns hold what belongs to its conversation, and is no text of a turn."""
    _refuse(row, OF_ROWS, "the row")


def messages_from(turns: list[Any]) -> list[Message]:
    """Turns as messages, each of the assistant's with the mark that it, or its weight, gives.

    Raises:
        ValueError: one is no turn, holds more than text, or has another weight than 0 or 1.
    """
    messages = [_message(turn, number) for number, turn in enumerate(turns)]
    if any(turn.get("weight") is not None for turn in turns):
        for number, (turn, message) in enumerate(zip(turns, messages, strict=True)):
            if message["role"] == "assistant":
                message.setdefault("train", _is_trained(turn, number))
    return messages


def _message(turn: Any, number: int) -> Message:
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        turn = {**turn, "role": turn["from"], "content": turn["value"]}
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise ValueError(f"message {number} is not {{role, content}}")
    role: Any = ROLES.get(str(turn["role"]), turn["role"])
    if role in TOOL_ROLES:
        raise ValueError(f"message {number} is a turn of role {role}: {TOOLS}")
    if len(turn) > 2:
        _refuse(turn, OF_TURNS, f"message {number} ({role})")
    content = turn["content"]
    message: Message = {"role": role, "content": _text(content, f"message {number} ({role})") if isinstance(content, list) else content}
    if turn.get("finish_reason") == "length":
        message["finish_reason"] = "length"
    if turn.get("train") is not None:
        message["train"] = turn["train"]
    return message


def _refuse(given: Mapping[str, Any], refused: Mapping[str, str], which: str) -> None:
    for name, value in () if refused.keys().isdisjoint(given) else given.items():
        if name in refused and _is_there(value):
            raise ValueError(f"{which} has {name}: {refused[name]}")


def _text(parts: list[Any], which: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"{which} holds a part of type {kind}: only text is trained")
        if kind is None or not isinstance(part.get("text"), str):
            raise ValueError(f"{which} is a list, of which not every part is {{type, text}}")
        texts.append(part["text"])
    return "".join(texts)


def _is_trained(turn: dict[str, Any], number: int) -> bool:
    weight = 1 if turn.get("weight") is None else turn["weight"]
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"message {number} has the weight {weight!r:.80}: 0 or 1 is meant")
    return weight == 1


def _is_there(value: Any) -> bool:
    """Whether a column that tables have for all rows says something for this one."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return not all(_is_blank(part) for part in parts)


def _is_blank(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in BLANK
    return value is None or (isinstance(value, (list, Mapping)) and not value)
