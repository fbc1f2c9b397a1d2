"""Well-formedness of message lists."""

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

ROLES = ("system", "user", "assistant")
CALL, RESULT = "call", "tool"
"""Roles of a tool call in the assistant's turn and of its result, see `data/chat/tools.py`."""
ALL_ROLES = (*ROLES, CALL, RESULT)
MARKED = ("assistant", CALL)
"""Roles whose messages may have `train` and `finish_reason`."""
AFTER = {
    "system": ("user",),
    "user": MARKED,
    "assistant": ("user", CALL, RESULT),
    CALL: (RESULT, CALL),
    RESULT: ("assistant", CALL, RESULT),
}
"""Role → roles that may follow, the expected one first."""
LAST = {"assistant": MARKED, "user": ("user", RESULT)}
"""Required last speaker → allowed roles of the last message; a tool result also requests an answer."""
SPELLED_CALL = re.compile(r"<tool_call>|<code>")
"""Tool calls written in the assistant's text, as Hermes and SmolLM3 do."""
FINISH_REASONS = ("stop", "length")
FAULTS = frozenset(("assistant_first", "same_role", "late_system"))
"""Orders of turns with which sources may keep rows (`OutOfTurn` in `configs/rows/row_sources.py`)."""
UNCALLED = "uncalled_result"
"""A tool result after an answer with no call of a known form: an environment parses calls of any form, and a source's row has lost it."""
ROW_FAULTS = FAULTS | {UNCALLED}
"""What rows of artifacts may have."""


def message_problem(messages: Any, last: str, kept: Collection[str] = ()) -> str | None:
    """The first problem of a list of messages, or None.

    Well-formed: an optional system turn, then alternating user and assistant turns, beginning with the user, ending with `last` ("user" or
    "assistant"), apart from the faults in `kept`; contents are non-empty texts; only assistant turns have `train`, and only the last one
    `finish_reason`. An assistant turn may end with calls, followed by their results, which may be empty, and then by another assistant
    turn.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        return "there are no messages"
    for number, message in enumerate(messages):
        problem = _problem_of_one(message, number, number == len(messages) - 1)
        if problem:
            return problem
    return _problem_of_order(messages, last, kept)


def _problem_of_one(message: Any, number: int, is_last: bool) -> str | None:
    if not isinstance(message, dict) or set(message) - {"train", "finish_reason"} != {"role", "content"}:
        return f"message {number} is not {{role, content}}"
    role, content = message["role"], message["content"]
    if "train" in message and (role not in MARKED or not isinstance(message["train"], bool)):
        return f"message {number} ({role}) has train {message['train']!r}: true or false is meant, on the assistant's turns"
    if "finish_reason" in message and (role not in MARKED or message["finish_reason"] not in FINISH_REASONS):
        found = f"has finish_reason {message['finish_reason']!r}"
        return f"message {number} ({role}) {found}: stop or length is meant, on the assistant's turns"
    if message.get("finish_reason") == "length" and not is_last:
        return f"message {number} was cut off (finish_reason length) and is not the last"
    if role not in ALL_ROLES:
        return f"message {number} has role {role!r}, which is none of {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"message {number} ({role}) has no text"
    if not content.strip() and role != RESULT:
        return f"message {number} ({role}) is empty"
    if not is_unicode(content):
        return f"message {number} ({role}) holds half of a surrogate pair, which is no character"
    if role == CALL and not _is_call(content):
        return f"message {number} ({role}) is no {{name, arguments}} as JSON"
    return None


def fault_at(turns: Sequence[Any], number: int) -> str | None:
    """The fault of a turn that is out of order, None if it has no name; `turns` are those after a first system turn."""
    role, before = turns[number]["role"], turns[number - 1]["role"] if number else "system"
    if role == before:
        return "same_role"
    if role == "system" or (number and before == "system"):
        return "late_system"
    return "assistant_first" if role == "assistant" and not number else None


def _problem_of_order(messages: Sequence[Any], last: str, kept: Collection[str]) -> str | None:
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    before = {"role": "system", "content": ""}
    for number, message in enumerate(turns):
        role = message["role"]
        fault = fault_at(turns, number)
        if role not in AFTER[before["role"]] and fault not in kept:
            rule = f": see `out_of_turn.{fault}`" if fault else ""
            return f"turn {number} is the {role}'s where the {AFTER[before['role']][0]}'s is due{rule}"
        called = role != RESULT or before["role"] != "assistant" or SPELLED_CALL.search(before["content"])
        if not called and UNCALLED not in kept:
            return f"turn {number} is the result of a call that was not made"
        before = message
    if all(message["role"] != "user" for message in turns):
        return "there is no turn of the user"
    if before["role"] == CALL and last == "user":
        return "the result of the last call is missing"
    if before["role"] not in LAST[last]:
        return f"the last turn is the {before['role']}'s, not the {last}'s"
    return None


def _is_call(text: str) -> bool:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(given, dict) and set(given) == {"name", "arguments"}
        and isinstance(given["name"], str) and isinstance(given["arguments"], dict)
    )  # fmt: skip


def roles_of(messages: Sequence[Any]) -> Counter[str]:
    """Role → number of turns; calls count as calls, and also as an assistant turn if no assistant text precedes them."""
    found = Counter(message["role"] for message in messages)
    if CALL in found:
        roles = [message["role"] for message in messages]
        found["assistant"] += sum(role == CALL and before not in MARKED for before, role in pairwise(roles))
    return found


def divided(messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(messages before the final assistant turn, that turn's text and calls); the turn is empty if another role is last."""
    end = len(messages)
    while end and messages[end - 1]["role"] == CALL:
        end -= 1
    if end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return list(messages[:end]), list(messages[end:])


def text_and_calls(turn: Sequence[Any]) -> tuple[Any, tuple[str, ...]]:
    """(text of an assistant turn, empty if it only calls tools; its calls)."""
    calls = tuple(message["content"] for message in turn if message["role"] == CALL)
    return turn[0]["content"] if len(calls) < len(turn) else "", calls


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded; JSON may contain lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def user_turns(messages: list[dict[str, str]]) -> list[str]:
    """The texts of the user's turns, in order."""
    return [message["content"] for message in messages if message["role"] == "user"]
