"""Data files to examples: the usual formats and layouts, row by row, with a place for every complaint."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data.messages import message_problem
from data.procedural import Example
from data.records import Message

SHOWN = 5


class SourceError(ValueError):
    """A source cannot give what was asked of it; the message names the rows, or the bound and the remedy."""


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of a file, or of every data file below a folder."""
    files = sorted(file for file in path.rglob("*") if file.suffix in READERS) if path.is_dir() else [path]
    if not files:
        raise SourceError(f"{path.name} holds no {', '.join(sorted(READERS))} file")
    for file in files:
        if file.suffix not in READERS:
            raise SourceError(f"{file.name}: rows are read from {', '.join(sorted(READERS))} files")
        yield from READERS[file.suffix](file)


def read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open() as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    yield f"{file.name}:{number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise SourceError(f"{file.name}:{number} is not JSON: {error}") from error


def _read_json(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise SourceError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise SourceError(f"{file.name} is not a JSON list of rows")
    yield from ((f"{file.name}[{number}]", row) for number, row in enumerate(rows))


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import parquet

    yield from ((f"{file.name}[{number}]", row) for number, row in enumerate(parquet.read_table(file).to_pylist()))


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def parse(rows: Iterable[tuple[str, Any]]) -> list[Example]:
    """Examples of rows in one of the usual layouts; columns that none of them names are ignored.

        messages [, verifier]                               chat; the last turn is the user's or the assistant's
        [messages | prompt,] chosen, rejected               preferences: answers, or whole chats with the same beginning
        instruction [, input], output                       Alpaca
        conversations [, chosen, rejected]                  ShareGPT (`from`, `value`)

    Raises:
        SourceError: rows with missing, empty or wrong-role messages; all are counted, the first five shown.
    """
    examples, problems = [], []
    for place, row in rows:
        try:
            examples.append(_checked(_parse(row)))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if problems:
        more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise SourceError(f"{len(problems)} malformed rows; mend or remove them:\n  " + "\n  ".join(problems[:SHOWN]) + more)
    return examples


def _parse(row: Any) -> Example:
    if not isinstance(row, dict):
        raise ValueError("the row is not an object with named fields")
    row = {name: value for name, value in row.items() if value is not None}
    own = row["source"] if isinstance(row.get("source"), str) else None
    if {"chosen", "rejected"} & set(row):
        return _preference(row, own)
    if "instruction" in row:
        question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return Example([{"role": "user", "content": question}], row.get("output"), source=own)
    messages = _turns(row)
    if messages and messages[-1]["role"] == "assistant":
        return Example(messages[:-1], messages[-1]["content"], verifier=row.get("verifier"), source=own)
    return Example(messages, verifier=row.get("verifier"), source=own)


def _preference(row: dict[str, Any], own: str | None) -> Example:
    """Chosen and rejected as answers to a given beginning, or as two whole chats with one beginning."""
    if not {"chosen", "rejected"} <= set(row):
        raise ValueError("only one of chosen and rejected is there")
    before = _turns(row) if {"messages", "conversations", "prompt"} & set(row) else None
    chosen, rejected = (_chat(row[side]) for side in ("chosen", "rejected"))
    if len(chosen) > 1 or len(rejected) > 1:
        if chosen[:-1] != rejected[:-1]:
            raise ValueError("chosen and rejected do not answer the same beginning")
        before = chosen[:-1]
    if before is None:
        raise ValueError("there is no prompt: neither messages, prompt nor conversations")
    for side, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns or turns[-1]["role"] != "assistant":
            raise ValueError(f"{side} does not end with the assistant's turn")
    return Example(before, chosen[-1]["content"], rejected[-1]["content"], source=own)


def _turns(row: dict[str, Any]) -> list[Message]:
    for column in ("messages", "conversations", "prompt"):
        if column in row:
            given = row[column]
            return [{"role": "user", "content": given}] if isinstance(given, str) else _chat(given)
    raise ValueError("there are no messages")


def _chat(given: Any) -> list[Message]:
    """A list of messages, one ShareGPT message, or the text of one answer, as messages."""
    if isinstance(given, str):
        return [{"role": "assistant", "content": given}]
    turns = given if isinstance(given, list) else [given]
    return [_message(turn, number) for number, turn in enumerate(turns)]


def _message(turn: Any, number: int) -> Message:
    if isinstance(turn, dict) and {"from", "value"} <= set(turn):
        speakers = {"human": "user", "gpt": "assistant", "system": "system"}
        turn = {"role": speakers.get(turn["from"], turn["from"]), "content": turn["value"]}
    if not isinstance(turn, dict) or not {"role", "content"} <= set(turn):
        raise ValueError(f"message {number} is not {{role, content}}")
    return {"role": turn["role"], "content": turn["content"]}


def _checked(example: Example) -> Example:
    problem = message_problem(example.messages, last="user")
    if problem:
        raise ValueError(problem)
    for side, text in (("answer", example.answer), ("rejected answer", example.rejected)):
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise ValueError(f"the {side} is empty")
    return example
