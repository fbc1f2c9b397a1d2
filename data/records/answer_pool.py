"""Selection among any number of policy answers: a first pass keeps a few hundred bytes per answer; the rows of chosen answers are read
again on writing, a file's worth at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import records
from pedigree.data.records.messages import ROW_FAULTS, message_problem
from pedigree.data.records.scattered import Lookup, Scattered

WORDS = (
    "id", "source", "messages", "template_arguments", "text", "finish_reason", "win_rate", "policy", "policy_content", "on_policy",
)  # fmt: skip
"""Fields of an answer that derived rows need."""


class AnswerFacts(NamedTuple):
    """An answer's metadata, without its text."""

    place: int
    """Position among all answers."""
    id: str
    prompt_id: str
    policy: str
    on_policy: bool
    text: bytes
    """Hash of the text, and of the assistant's turns before it, which differ between conversations with an environment."""
    blank: bool
    """Whether the text, or one of those turns, is only whitespace."""
    ended: bool
    length: int
    """Characters of the answer."""
    asked: int
    """Characters of the prompt, including template arguments."""
    value: float | None
    """The number by which answers are compared."""
    rewards: tuple[float, ...]
    """Raw score of each reward model; empty unless all of them scored."""
    relaxed: bool = False
    """Whether it answers the prompt from which this one was derived."""
    malformed: bool = False
    """Whether prompt and text are no conversation: an environment may say anything between answers."""


def value_of(one: AnswerFacts) -> float:
    """The value of an answer that has one."""
    assert one.value is not None
    return one.value


@dataclass(frozen=True)
class AnswerPool:
    """Judgments or completions."""

    facts: Sequence[AnswerFacts]
    rows: Scattered
    record: type

    def by_prompt(self) -> dict[str, list[AnswerFacts]]:
        """Prompt id → its answers, sorted by prompt id."""
        groups: dict[str, list[AnswerFacts]] = {}
        for one in self.facts:
            groups.setdefault(one.prompt_id, []).append(one)
        return dict(sorted(groups.items()))

    def concat(self, other: "AnswerPool") -> "AnswerPool":
        """These complete answers followed by others of the same type."""
        moved = [one._replace(place=len(self.facts) + one.place) for one in other.facts]
        return replace(self, facts=[*self.facts, *moved], rows=self.rows.concat(other.rows))

    def read(self, places: Iterable[int]) -> Lookup:
        """Read the `WORDS` of answers, see `Scattered.lookup`."""
        return self.rows.lookup(places, self.record, WORDS)


Value = Callable[[Mapping[str, Any]], float | None]
"""Computes the value by which rows are compared."""


def read(artifact: Artifact, by: str | Value | None) -> AnswerPool:
    """Read the metadata of all answers of judgments or completions. `by` is the field with their value, or a function of the row.

    Raises:
        PedigreeError: duplicate answer ids.
    """
    same: dict[str, str] = {}
    facts = [noted(place, row, by, same) for place, row in enumerate(records.stream(artifact.payload))]
    records.check_ids(one.id for one in facts)
    return AnswerPool(facts, Scattered.of(artifact, [one.asked + one.length for one in facts]), records.RECORDS[artifact.type])


def noted(place: int, row: Mapping[str, Any], by: str | Value | None, same: dict[str, str]) -> AnswerFacts:
    """The metadata of the answer at this position; `by` as in `read`, and `same` has the interned strings seen so far."""
    rewards = tuple(row.get("rewards", {}).values())
    texts = [*(message["content"] for message in row["messages"] if message["role"] == "assistant"), row["text"]]
    return AnswerFacts(
        place=place,
        id=row["id"],
        prompt_id=same.setdefault(row["prompt_id"], row["prompt_id"]),
        policy=same.setdefault(row["policy"], row["policy"]),
        on_policy=row["on_policy"],
        text=blake2b("\0".join(texts).encode(), digest_size=16).digest(),
        blank=not all(text.strip() for text in texts),
        ended=records.ended(row),
        length=len(row["text"]),
        asked=sum(map(len, records.texts(row))),
        value=row[by] if isinstance(by, str) else by(row) if by else None,
        rewards=() if None in rewards else rewards,
        malformed=message_problem([*row["messages"], {"role": "assistant", "content": row["text"]}], "assistant", ROW_FAULTS) is not None,
    )
