"""Conversation trees as exported by OpenAssistant (Köpf et al. 2023, arXiv 2304.07327): every turn has several replies.

{"message_tree_id": ..., "prompt": {"text": ..., "role": "prompter", "replies": [{"text": ..., "role": "assistant", "rank": 0, ...}]}}
"""

from collections.abc import Iterator
from typing import Any

from pedigree.data.records.records import Message

ROLES = {"prompter": "user", "assistant": "assistant"}


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
        role = node.get("role")
        way = [*before, Message(role=ROLES.get(str(role), str(role)), content=node.get("text", ""))]
        yield way, node
        waiting += [(way, reply) for reply in reversed(_replies(node))]


def _replies(node: dict[str, Any]) -> list[dict[str, Any]]:
    given = node.get("replies")
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(reply, dict) for reply in given):
        raise ValueError(f"replies {given!r:.80} of a turn in the tree of conversations are no list of turns")
    return given
