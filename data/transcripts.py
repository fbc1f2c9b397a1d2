"""Conversations that are written as one text, as in Anthropic's hh-rlhf (Bai et al. 2022, arXiv 2204.05862) and in Nectar:

    \\n\\nHuman: How old is it?\\n\\nAssistant: Nobody knows.
"""

import re

from data.records import Message

TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: object) -> bool:
    return isinstance(text, str) and text.startswith("\n\nHuman:")


def messages_of(transcript: str) -> list[Message]:
    """The turns of a transcript, without white space around them; one may be empty.

    Nothing tells a mark from the same words within a turn, so that such a turn is taken for several.

    Raises:
        ValueError: it does not begin with a mark.
    """
    before, *turns = TURN.split(transcript)
    if before or not turns:
        raise ValueError(f"the text begins with {transcript[:20]!r}, and not with a blank line and Human:")
    return [{"role": ROLES[name], "content": text.strip()} for name, text in zip(turns[::2], turns[1::2], strict=True)]
