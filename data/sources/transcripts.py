"""Conversations stored as one text, as in Anthropic's hh-rlhf (Bai et al. 2022, arXiv 2204.05862) and Nectar:

    \\n\\nHuman: How old is it?\\n\\nAssistant: Nobody knows.

or in HelpSteer2's multi-turn prompts (arXiv 2406.08673):

    How old is it?
    <extra_id_1>Assistant
    Which one?
    <extra_id_1>User
    The tree.
"""

import re

from pedigree.data.records.records import Message

TURN = re.compile(r"\n\n(Human|Assistant):")
MARK = "<extra_id_1>"
MARKED = re.compile(rf"\n?{MARK}(User|Assistant)\n")
ROLES = {"User": "user", "Human": "user", "Assistant": "assistant"}


def is_transcript(text: object) -> bool:
    return isinstance(text, str) and text.startswith("\n\nHuman:")


def messages_of(transcript: str) -> list[Message]:
    """The turns of a transcript, stripped; a turn may be empty.

    A turn that itself contains a marker is split there, because nothing distinguishes the two. Raises ValueError if the text does not
    begin with a marker.
    """
    before, *turns = TURN.split(transcript)
    if before or not turns:
        raise ValueError(f"the text begins with {transcript[:20]!r}, and not with a blank line and Human:")
    return [{"role": ROLES[name], "content": text.strip()} for name, text in zip(turns[::2], turns[1::2], strict=True)]


def marked(prompt: str) -> list[Message]:
    """The turns of a prompt with markers on separate lines, stripped. Raises ValueError for one without User or Assistant after it."""
    first, *turns = MARKED.split(prompt)
    if any(MARK in text for text in (first, *turns)):
        raise ValueError(f"the prompt has {MARK} and neither User nor Assistant on the same line after it")
    named = zip(("User", *turns[::2]), (first, *turns[1::2]), strict=True)
    return [{"role": ROLES[name], "content": text.strip()} for name, text in named]
