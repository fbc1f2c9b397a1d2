"""Another stage's rows as examples, which may become rows of another type."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import records
from pedigree.data.records.messages import MARKED, divided, text_and_calls
from pedigree.data.records.records import Answer, RowGroup
from pedigree.data.sources.procedural import Example
from pedigree.data.sources.row_files import Block


def blocks(artifact: Artifact) -> Iterator[Block]:
    """All row groups of a data artifact, read by the process that parses them."""
    return (partial(_in_group, group) for group in records.groups(artifact))


def _in_group(group: RowGroup) -> Iterator[tuple[str, Any]]:
    """(id, row) pairs."""
    yield from ((row["id"], row) for row in group.read())


def example_of(row: dict[str, Any]) -> Example:
    """The example in a conversation, prompt or preference; its answer is the last one, or the best one."""
    messages, source, arguments = row["messages"], row["source"], row.get("template_arguments")
    if "answers" in row:
        return Example(messages, tuple(row["answers"]), source=source, strength=row["strength"], template_arguments=arguments)
    if messages[-1]["role"] in MARKED:
        before, turn = divided(messages)
        text, calls = text_and_calls(turn)
        answer: Answer = {"text": text, "score": None}
        if "finish_reason" in turn[-1]:
            answer["finish_reason"] = turn[-1]["finish_reason"]
        return Example(before, (answer,), source=source, train=turn[0].get("train"), template_arguments=arguments, calls=calls)
    return Example(messages, verifier=row["verifier"], source=source, template_arguments=arguments)
