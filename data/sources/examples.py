"""Examples, the content of rows before they become records, from records and as records."""

from dataclasses import dataclass
from typing import Any

from pedigree.configs.rows.row_sources import RecordType
from pedigree.data.records.messages import CALL, MARKED, divided, text_and_calls
from pedigree.data.records.records import Answer, Message, ended


@dataclass(frozen=True)
class Example:
    """One row's content before it becomes a record; None for what the source does not specify."""

    messages: list[Message]
    """Ends with the user's turn, or with the result of a call."""
    answers: tuple[Answer, ...] = ()
    """Best first; the first is the assistant's reply."""
    verifier: dict[str, Any] | None = None
    source: str | None = None
    """The row's own source name."""
    strength: float | None = None
    """P(the first of two answers is the better one)."""
    train: bool | None = None
    """`train` flag of the assistant turn that became the answer."""
    calls: tuple[str, ...] = ()
    """Tool calls at the end of that turn, as in `data/chat/tools.py`; the answer may then be empty."""
    template_arguments: dict[str, Any] | None = None
    """Variables of the chat template → their values."""
    out_of_turn: frozenset[str] = frozenset()
    """Faults of the order of its turns, which the source's rules cut, join or keep."""

    @property
    def answer(self) -> str | None:
        return self.answers[0]["text"] if self.answers else None

    @property
    def rejected(self) -> str | None:
        return self.answers[1]["text"] if len(self.answers) > 1 else None


def unscored(*texts: str) -> tuple[Answer, ...]:
    """Answers without scores, best first."""
    return tuple({"text": text, "score": None} for text in texts)


def example_in(row: dict[str, Any]) -> Example:
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


def record_of(example: Example, record: RecordType, task: str | None, source: str) -> dict[str, Any]:
    """The example as a row of one type, without its id. Raises ValueError if it lacks a part that the type requires."""
    match record:
        case "conversation" if not example.answers:
            need = "an answer"
        case "item" if example.verifier is None:
            need = "a verifier"
        case "preference" if not example.answers or (len(example.answers) == 1 and example.answers[0]["score"] is None):
            need = "two answers, or one with a score or a label"
        case _:
            need = None
    if need:
        why = ": set `verifier` in the source" if record == "item" else ""
        if record == "conversation" and any(turn["role"] in MARKED for turn in example.messages):
            why = ": it ends with the user's turn, see `out_of_turn.user_last`"
        raise ValueError(f"{record} rows need {need}, which this one lacks{why}")
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
