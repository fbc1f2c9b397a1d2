"""Convert turns in external formats to messages; fields that messages cannot represent are rejected by name.

    {role, content [, tool_calls] [, weight]}     OpenAI; the content is a text or a list of parts, [{"type": "text", "text": ...}, ...]
    {from, value [, weight]}                      ShareGPT

`developer` is OpenAI's newer name for `system`. Text parts are concatenated without separator, as in chat templates. Weights apply to
assistant turns: 0 means not trained; if any turn has a weight, turns without one count as 1. Marks (`train`) are the assistant's too, and
say nothing where they are false on other turns, as Axolotl has them. `name` and unknown keys are ignored.

Tool calls are keys of the assistant's turn, or separate turns whose text is JSON (`from: function_call`). Results with a `tool_call_id` are
put in the order of their calls, and rejected unless they belong to the first calls, one each; ids are not used otherwise.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

from pedigree.configs.rows.row_sources import OutOfTurn
from pedigree.data.chat.tools import calls_in, is_there
from pedigree.data.records.messages import ALL_ROLES, CALL, MARKED, RESULT
from pedigree.data.records.messages import ROLES as SPEAKERS
from pedigree.data.records.records import Message

ROLES: Mapping[str, str] = {
    "human": "user",
    **dict.fromkeys(("gpt", "model"), "assistant"),
    "developer": "system",
    **dict.fromkeys(("function", "ipython", "environment", "observation", "function_response", "tool_response"), RESULT),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
}
"""External role, in lower case → ours; those of `ALL_ROLES` are their own."""
CALLS = ("tool_calls", "function_call", "function_calls")
"""Keys of a turn with the assistant's calls; the first that is not blank is used."""
BETWEEN = "\n\n"
"""Between the texts of joined turns."""
OF_CALLS = frozenset(CALLS)
OF_TURNS: Mapping[str, str] = {
    **dict.fromkeys(("tools", "functions"), "what is offered stands in the row's column tools"),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "what is to be trained stands in the content"),
}
"""Keys of a turn → reason for rejecting them."""
OF_ROWS: Mapping[str, str] = {
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), "only text is trained"),
    **dict.fromkeys(("function_call", "function_calls"), "calls stand in a turn, or in the column tool_calls"),
}
"""Columns of a row → reason for rejecting them."""


def refuse_more_than_messages(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a row with columns that belong to its conversation but cannot be represented."""
    _refuse(row, OF_ROWS, "the row")


def messages_from(turns: list[Any]) -> list[Message]:
    """Convert turns to messages; assistant messages get `train` from their turn or its weight.

    Raises:
        ValueError: a turn is malformed, has content other than text and calls, or a weight other than 0 or 1; a result belongs to no
            preceding call, repeats one, or skips one; or a call's `train` differs from its turn's.
    """
    converted = [_messages(turn, number) for number, turn in enumerate(turns)]
    if any(turn.get("weight") is not None for turn in turns):
        for number, (turn, messages) in enumerate(zip(turns, converted, strict=True)):
            for message in messages:
                if message["role"] in MARKED:
                    message.setdefault("train", _is_trained(turn, number))
    if any("tool_call_id" in turn for turn in turns):
        converted = list(_by_call(turns, converted))
    messages = [message for messages in converted for message in messages]
    for before, message in pairwise(messages):
        if message["role"] == CALL and before["role"] in MARKED and message.get("train") != before.get("train"):
            raise ValueError("a call has another mark or weight than the turn that it belongs to: give both the same")
    return messages


class Dropped(ValueError):
    """A row is left out as its source's `out_of_turn` specifies; the text is the name of the fault."""


def in_turn(messages: Sequence[Message], rules: OutOfTurn, is_whole: bool, met: set[str]) -> list[Message]:
    """Cut and join turns that are out of order, as the rules specify; those that are refused or kept remain.

    `is_whole`: the messages are a conversation, which ends with the assistant. Each fault that is there is added to `met`.

    Raises:
        Dropped: a rule drops the row.
        ValueError: joined turns have different marks or weights.
    """
    turns = list(messages)
    if not all(isinstance(turn["content"], str) for turn in turns):  # a bad row in any case
        return turns
    beginning = [turn["role"] for turn in turns if turn["role"] != "system"][:1]
    if beginning == ["assistant"] and _applied(rules, "assistant_first", met) == "cut":
        begin = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
        turns = [*(turn for turn in turns[:begin] if turn["role"] == "system"), *turns[begin:]]
    first = next((place for place, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    late = {place for place, turn in enumerate(turns) if turn["role"] == "system" and place > first}
    match late and _applied(rules, "late_system", met):
        case "cut":
            turns = [turn for place, turn in enumerate(turns) if place not in late]
        case "join":
            asked: list[Message] = [{**turn, "role": "user"} if place in late else turn for place, turn in enumerate(turns)]
            turns = _joined(asked, lambda place: place in late or place - 1 in late)
    if any(_may_join(*two) for two in pairwise(turns)) and _applied(rules, "same_role", met) == "join":
        turns = _joined(turns, lambda place: True)
    if is_whole and turns and turns[-1]["role"] == "user" and any(turn["role"] in MARKED for turn in turns):
        while _applied(rules, "user_last", met) == "cut" and turns[-1]["role"] in ("user", "system"):
            turns.pop()
    return turns


def _applied(rules: OutOfTurn, fault: str, met: set[str]) -> str:
    """The rule for a fault that is there. Raises Dropped."""
    met.add(fault)
    rule = getattr(rules, fault)
    if rule == "drop":
        raise Dropped(fault)
    return rule


def _joined(turns: Sequence[Message], is_part: Callable[[int], bool]) -> list[Message]:
    """The turns, with those at the given places joined to the turn before, if it has the same role."""
    found = list(turns[:1])
    for place, turn in enumerate(turns[1:], start=1):
        before = found[-1]
        if not _may_join(before, turn) or not is_part(place):
            found.append(turn)
            continue
        if before.get("train") != turn.get("train"):
            raise ValueError(f"message {place} has another mark or weight than the turn before, to which it is joined: give both the same")
        content = BETWEEN.join(text for text in (before["content"], turn["content"]) if text.strip())
        found[-1] = {**turn, "content": content}
    return found


def _may_join(before: Message, turn: Message) -> bool:
    return before["role"] == turn["role"] and turn["role"] in SPEAKERS


def _messages(turn: Any, number: int) -> list[Message]:
    """The text of a turn, and its calls."""
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        turn = {**turn, "role": turn["from"], "content": turn["value"]}
    key = _key_of_calls(turn)
    if not isinstance(turn, dict) or "role" not in turn or ("content" not in turn and key is None):
        has = f"has {', '.join(map(str, turn)):.80} and" if isinstance(turn, dict) and turn else f"is a {type(turn).__name__} and"
        raise ValueError(f"message {number} {has} is not {{role, content}}")
    role: Any = turn["role"]
    if role not in ALL_ROLES:
        name = str(role).strip().lower()
        role = name if name in ALL_ROLES else ROLES.get(name, role)
    which = f"message {number} ({role})"
    if len(turn) > 2:
        _refuse(turn, OF_TURNS, which)
    content: Any = turn.get("content")
    if isinstance(content, list):
        content = _text(content, which)
    text: Message = {"role": role, "content": content}  # of any type: all messages are checked together
    if role == CALL:
        messages = calls_in(content, which)
    elif key is None:
        messages = [text]
    elif role != "assistant":
        raise ValueError(f"{which} has {key}, which are the assistant's")
    else:
        calls = calls_in(turn[key], f"{key} of {which}")
        silent = content is None or (isinstance(content, str) and not content.strip())
        messages = calls if silent else [text, *calls]
    mark = turn.get("train")
    if mark is True and role not in MARKED:
        raise ValueError(f"{which} has train True: only turns of the assistant are trained, so leave the mark out, or set it to false")
    for message in () if mark is None or (mark is False and role not in MARKED) else messages:
        message["train"] = turn["train"]
    if turn.get("finish_reason") == "length":
        messages[-1]["finish_reason"] = "length"
    return messages


def _key_of_calls(turn: Any) -> str | None:
    if not isinstance(turn, dict) or OF_CALLS.isdisjoint(turn):
        return None
    return next((key for key in CALLS if is_there(turn.get(key))), None)


def _by_call(turns: Sequence[Any], converted: Sequence[list[Message]]) -> Iterator[list[Message]]:
    """The messages of each turn, with results in the order of their calls."""
    ids: list[Any] = []
    results: dict[int, list[Message]] = {}
    for number, (turn, messages) in enumerate(zip(turns, converted, strict=True)):
        if messages[0]["role"] == RESULT:
            results[_place(turn.get("tool_call_id"), ids, results, number)] = messages
            continue
        yield from _in_order(results, ids)
        yield messages
        ids, results = _ids(turn), {}
    yield from _in_order(results, ids)


def _ids(turn: Mapping[str, Any]) -> list[Any]:
    """Ids of a turn's calls; empty if a call has none."""
    calls = turn.get("tool_calls")
    found = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [] if None in found else found


def _place(called: Any, ids: Sequence[Any], taken: Collection[int], number: int) -> int:
    """Index of the call to which a result belongs; without an id, the first call without a result."""
    if not ids:
        return len(taken)
    if called is None:
        return next(place for place in count() if place not in taken)
    if called not in ids:
        raise ValueError(f"message {number} is the result of the call {called!r:.40}, which is none of those before it")
    place = next((place for place, name in enumerate(ids) if name == called and place not in taken), None)
    if place is None:
        raise ValueError(f"message {number} is one more result of the call {called!r:.40}")
    return place


def _in_order(results: Mapping[int, list[Message]], ids: Sequence[Any]) -> Iterator[list[Message]]:
    """Results in the order of their calls, without gaps: rows store no ids, so order alone assigns results to calls."""
    for place in range(len(results)):
        if place not in results:
            raise ValueError(f"the call {ids[place]!r:.40} has no result, and one after it has")
        yield results[place]


def _refuse(given: Mapping[str, Any], refused: Mapping[str, str], which: str) -> None:
    for name, value in () if refused.keys().isdisjoint(given) else given.items():
        if name in refused and is_there(value):
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
