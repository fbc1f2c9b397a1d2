"""What a well-formed list of messages is."""

from typing import Any

ROLES = ("system", "user", "assistant")
FINISH_REASONS = ("stop", "length")


def message_problem(messages: Any, last: str) -> str | None:
    """The first thing wrong with a list of messages, or None.

    Well-formed: an optional system turn, then user and assistant in turn, beginning with the user, ending with `last`
    ("user" or "assistant"); every content is a text with something in it; `train` marks, if at all, turns of the assistant, and
    `finish_reason` the last of them.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        return "there are no messages"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) - {"train", "finish_reason"} != {"role", "content"}:
            return f"message {number} is not {{role, content}}"
        if "train" in message and (message["role"] != "assistant" or not isinstance(message["train"], bool)):
            return f"message {number} ({message['role']}) has train {message['train']!r}: true or false is meant, on the assistant's turns"
        if "finish_reason" in message and (message["role"] != "assistant" or message["finish_reason"] not in FINISH_REASONS):
            found = f"has finish_reason {message['finish_reason']!r}"
            return f"message {number} ({message['role']}) {found}: stop or length is meant, on the assistant's turns"
        if message.get("finish_reason") == "length" and number != len(messages) - 1:
            return f"message {number} was cut off (finish_reason length) and is not the last"
        if message["role"] not in ROLES:
            return f"message {number} has role {message['role']!r}, which is none of {', '.join(ROLES)}"
        if not isinstance(message["content"], str):
            return f"message {number} ({message['role']}) has no text"
        if not message["content"].strip():
            return f"message {number} ({message['role']}) is empty"
        if not is_unicode(message["content"]):
            return f"message {number} ({message['role']}) holds half of a surrogate pair, which is no character"
    turns = [message["role"] for message in messages]
    if turns[0] == "system":
        turns = turns[1:]
    for number, role in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            return f"turn {number} is the {role}'s where the {expected}'s is due"
    if not turns or turns[-1] != last:
        return f"the last turn is the {turns[-1] if turns else 'system'}'s, not the {last}'s"
    return None


def is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON may spell out halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def user_turns(messages: list[dict[str, str]]) -> list[str]:
    """The texts of the user's turns, in order."""
    return [message["content"] for message in messages if message["role"] == "user"]
