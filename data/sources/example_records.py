"""Examples as rows of a record type."""

from collections.abc import Callable
from typing import Any

from pedigree.configs.rows.row_sources import RecordType
from pedigree.data.records.messages import CALL
from pedigree.data.records.records import Message, ended
from pedigree.data.sources.procedural import Example


def record_of(example: Example, record: RecordType, task: str | None, source: str) -> dict[str, Any]:
    """The example as a row of one type, without its id.

    Raises:
        ValueError: the example lacks a part that the type requires.
    """
    lacks, need = NEEDS.get(record, (lambda example: False, ""))
    if lacks(example):
        raise ValueError(f"{record} rows need {need}, which this one lacks")
    row: dict[str, Any] = {"source": source, "messages": example.messages}
    if example.template_arguments:
        row["template_arguments"] = example.template_arguments
    match record:
        case "conversation":
            return row | {"messages": [*example.messages, *_last_turn(example)]}
        case "prompt":
            return row | {"verifier": example.verifier}
        case "item":
            if example.template_arguments:
                names = ", ".join(example.template_arguments)
                raise ValueError(f"a suite asks all policies alike, and the row has template arguments ({names}): leave their column out")
            return row | {"task": task, "verifier": example.verifier}
        case "preference":
            if example.calls:
                raise ValueError("the answer calls tools, and answers that are compared are texts")
            return row | {"answers": list(example.answers), "strength": example.strength}


def _last_turn(example: Example) -> list[Message]:
    """The answer and its tool calls."""
    answer: Message = {"role": "assistant", "content": example.answers[0]["text"]}
    turn = [answer] if answer["content"] or not example.calls else []
    turn += [Message(role=CALL, content=call) for call in example.calls]
    if example.train is not None:
        for message in turn:
            message["train"] = example.train
    if not ended(example.answers[0]):
        turn[-1]["finish_reason"] = "length"
    return turn


NEEDS: dict[RecordType, tuple[Callable[[Example], bool], str]] = {
    "conversation": (lambda example: not example.answers, "an answer"),
    "item": (lambda example: example.verifier is None, "a verifier"),
    "preference": (
        lambda example: not example.answers or (len(example.answers) == 1 and example.answers[0]["score"] is None),
        "two answers, or one with a score or a label",
    ),
}
"""Record type → (whether an example lacks the required part, name of that part)."""
