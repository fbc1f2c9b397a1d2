"""Another stage's rows as examples, which may become rows of another type."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import columns, records
from pedigree.data.records.messages import MARKED, divided, text_and_calls
from pedigree.data.records.records import Answer
from pedigree.data.sources.procedural import Example


@dataclass(frozen=True)
class RowGroup:
    """One row group of an artifact; read by the process that parses it."""

    file: Path
    number: int
    record: type

    def rows(self) -> Iterator[tuple[str, Any]]:
        """(id, row) pairs."""
        yield from ((row["id"], row) for row in columns.to_rows(columns.read_group(self.file, self.number), self.record))


def blocks(artifact: Artifact) -> Iterator[RowGroup]:
    """All row groups of a data artifact, not yet read."""
    record = records.RECORDS[artifact.type]
    for name in records.row_files(path.name for path in artifact.payload.iterdir()):
        file = artifact.payload / name
        yield from (RowGroup(file, number, record) for number in range(len(columns.groups(file))))


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
