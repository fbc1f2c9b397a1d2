"""Detect texts that could forge a conversation turn on a server with an unknown tokenizer."""

import re
from collections.abc import Sequence

from pedigree.data.records.records import Message

CONTROL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|<bos>|<(?:start|end)_of_turn>|<end_of_utterance>|<sop>|<</?SYS>>"
    r"|<\|(?:turn|channel|tool(?:_call|_response)?)>|<(?:turn|channel|tool(?:_call|_response)?)\|>"
    r"|\[gMASK\]|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)
"""Control tokens of common chat templates, except `<s>` and `</s>`, which are also HTML strikethrough tags. Those with one pipe, which
are Gemma 4's, are named, because `x<y|>f()` may be code."""


def control_token(messages: Sequence[Message]) -> str | None:
    """The first chat-template token that a message contains as text. A server that parses it as a control token would take the text after
    it for another turn, possibly the model's own."""
    return next((found.group() for found in (CONTROL.search(message["content"]) for message in messages) if found), None)
