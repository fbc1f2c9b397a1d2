"""Texts that could forge a turn of a conversation, where nobody knows how a server reads them."""

import re
from collections.abc import Sequence

from data.records.records import Message

CONTROL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|<bos>|<(?:start|end)_of_turn>|<</?SYS>>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)
"""What chat templates of the field begin and end turns with; `<s>` and `</s>`, which in HTML strike a text out, are left out."""


def control_token(messages: Sequence[Message]) -> str | None:
    """A token of a chat template that a message spells out: a server whose tokenizer takes it for one would read what follows as somebody
    else's turn, be it its own."""
    return next((found.group() for found in (CONTROL.search(message["content"]) for message in messages) if found), None)
