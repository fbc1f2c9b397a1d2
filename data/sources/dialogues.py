"""Conversations stored in other forms: as one text, or as a tree.

One text is a transcript, as in Anthropic's hh-rlhf (Bai et al. 2022, arXiv 2204.05862) and Nectar:

    \\n\\nHuman: How old is it?\\n\\nAssistant: Nobody knows.

or one of HelpSteer2's multi-turn prompts (arXiv 2406.08673):

    How old is it?
    <extra_id_1>Assistant
    Which one?
    <extra_id_1>User
    The tree.

In a tree as exported by OpenAssistant (Köpf et al. 2023, arXiv 2304.07327), every turn has several replies:

    {"message_tree_id": ..., "prompt": {"text": ..., "role": "prompter", "replies": [{"text": ..., "role": "assistant", "rank": 0, ...}]}}
"""

import re
from collections.abc import Iterator
from typing import Any

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


def is_tree(row: Any) -> bool:
    """Whether to read a row as a tree, even a broken one."""
    return isinstance(row, dict) and isinstance(row.get("prompt"), dict) and "replies" in row["prompt"]


def conversations(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per path from the root to a final answer; trailing user turns without an answer are omitted.

    Raises ValueError, as does `comparisons`, if replies are not a list of turns.
    """
    for way, node in _nodes(tree):
        if node.get("role") == "assistant" and not any(_replies(reply) for reply in _replies(node)):
            yield {"messages": way}


def comparisons(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per user turn with at least two ranked answers (0 is best); unranked answers are omitted."""
    for way, node in _nodes(tree):
        ranked = [reply for reply in _replies(node) if reply.get("rank") is not None]
        if node.get("role") == "prompter" and len(ranked) > 1:
            yield {"messages": way, "answers": [{"answer": reply.get("text"), "rank": reply["rank"]} for reply in ranked]}


def _nodes(tree: dict[str, Any]) -> Iterator[tuple[list[Message], dict[str, Any]]]:
    """(conversation up to and including the turn, turn), depth-first in reply order."""
    waiting: list[tuple[list[Message], dict[str, Any]]] = [([], tree["prompt"])]
    while waiting:
        before, node = waiting.pop()
        role = "user" if node.get("role") == "prompter" else str(node.get("role"))
        way = [*before, Message(role=role, content=node.get("text", ""))]
        yield way, node
        waiting += [(way, reply) for reply in reversed(_replies(node))]


def _replies(node: dict[str, Any]) -> list[dict[str, Any]]:
    given = node.get("replies")
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(reply, dict) for reply in given):
        raise ValueError(f"replies {given!r:.80} of a turn in the tree of conversations are no list of turns")
    return given
