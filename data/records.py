"""The rows that stages exchange. On disk each is one line of `payload/rows.jsonl`.

Messages are `{"role": "system" | "user" | "assistant", "content": str}`; an assistant's may have a mark `"train": true | false`,
which all data stages keep. A verifier is a name and its arguments, e.g. `{"name": "arithmetic", "answer": "42"}` (see
`stages/core/verifiers.py`), or null where nothing can be checked.

An answer that was cut off by its length limit has the `finish_reason` `length` in every record that it goes through, up to its tokens:
no end-of-turn token is added to what did not end, so that nothing is taught to stop there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from data.artifacts import Artifact, read_rows, write_rows

FinishReason = Literal["stop", "length"]
"""How an answer ended: by its end token, or cut off by the length limit."""


class Message(TypedDict):
    role: str
    content: str
    train: NotRequired[bool]
    """Of the assistant's turns: whether SFT with `train_on: marked` trains it."""
    finish_reason: NotRequired[FinishReason]
    """Of the last turn, where it is the assistant's; `stop` where it is absent."""


class Conversation(TypedDict):
    """{"id": "arithmetic-3f2a", "source": "arithmetic", "messages": [user, assistant, ...]}; the last turn is the assistant's."""

    id: str
    source: str
    messages: list[Message]


class Prompt(TypedDict):
    """A conversation that ends with the user's turn, and how to check an answer."""

    id: str
    source: str
    messages: list[Message]
    verifier: dict[str, Any] | None


class Item(TypedDict):
    """A prompt of a benchmark."""

    id: str
    source: str
    task: str
    messages: list[Message]
    verifier: dict[str, Any]


class Answer(TypedDict):
    """What was said to a prompt, and how good it was found; null where nobody gave a number."""

    text: str
    score: float | None
    finish_reason: NotRequired[FinishReason]
    """`stop` where it is absent."""
    win_rate: NotRequired[float | None]
    """P(it is better than an answer that the sampled policies give to the prompt), see `stages.core.win_rates`."""


class Preference(TypedDict):
    """Answers to one prompt, best first: two are a pair, more a ranked list, one is a scored single (1 good, 0 bad)."""

    id: str
    source: str
    messages: list[Message]
    answers: list[Answer]
    strength: float | None
    """P(the first answer is better than the second), of pairs only; null means certain."""


class Completion(TypedDict):
    """One sampled answer and all that says where it came from."""

    id: str
    """`PROMPT_ID/POLICY_LABEL/INDEX`."""
    prompt_id: str
    source: str
    messages: list[Message]
    verifier: dict[str, Any] | None
    policy: str
    """Label of the policy at the stage's input."""
    policy_content: str
    """Content hash of that policy."""
    index: int
    seed: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """Of each response token under the sampling distribution."""
    text: str
    finish_reason: FinishReason
    """`stop`: the end token was drawn, and is the last of `response_ids`."""


class Judgment(TypedDict):
    """One answer and its scores; a judge that could not score leaves null, never a number."""

    id: str
    prompt_id: str
    source: str
    messages: list[Message]
    policy: str
    text: str
    finish_reason: FinishReason
    response_length: int
    verifier_score: float | None
    rewards: dict[str, float | None]
    """Label of a reward model → its score, raw; empty where none was asked."""
    reward: float | None
    """What the ensemble makes of them: in standard deviations of the members' held-out answers."""
    disagreement: float | None
    """Standard deviation of the normalised rewards over the members, of two or more."""
    score: float | None
    win_rate: float | None
    """Of the scored answers: P(it is better than one of them, itself included, drawn at random), see `stages.core.win_rates`."""


class ItemScore(TypedDict):
    """One policy's answer to one benchmark item."""

    id: str
    task: str
    policy: str
    text: str
    answer: str | None
    """What the verifier extracted."""
    score: float
    reason: str


def ended(row: Mapping[str, Any]) -> bool:
    """Whether an answer, completion, judgment or message came to its end."""
    return row.get("finish_reason") != "length"


def load(artifact: Artifact) -> list[dict[str, Any]]:
    """All rows of a data artifact."""
    return read_rows(artifact.payload / "rows.jsonl")


def save(out: Path, rows: list[Any]) -> None:
    """Writes a data artifact's rows below its output folder."""
    write_rows(out / "payload" / "rows.jsonl", rows)
