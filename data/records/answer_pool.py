"""Answers that policies gave to prompts, however many: a first pass notes of each what is decided by, a few hundred bytes; the rows of
those that were chosen are read when they are written, a file's worth at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.artifacts.artifacts import Artifact
from data.records import columns, records
from data.records.scattered import Numbers, Scattered

WORDS = (
    "id", "source", "messages", "template_arguments", "text", "finish_reason", "win_rate", "policy", "policy_content", "on_policy",
)  # fmt: skip
"""Fields of an answer that go into what is made of it."""


class Said(NamedTuple):
    """What is known of an answer: all but the words."""

    place: int
    """Among all answers."""
    id: str
    prompt_id: str
    policy: str
    on_policy: bool
    text: bytes
    """Equal where texts are."""
    blank: bool
    ended: bool
    length: int
    """Characters."""
    asked: int
    """Characters of the prompt, with its template arguments."""
    value: float | None
    """The number that answers are compared by."""
    rewards: tuple[float, ...]
    """Raw, of each reward model; empty unless all of them could score."""
    relaxed: bool = False
    """Whether it was said to the prompt that this one was made of."""


def value_of(one: Said) -> float:
    """The number that an answer which has one is compared by."""
    assert one.value is not None
    return one.value


@dataclass(frozen=True)
class GivenAnswers:
    """Judgments or completions."""

    said: Sequence[Said]
    lying: Scattered
    record: type

    def by_prompt(self) -> dict[str, list[Said]]:
        """Prompt id → its answers, sorted by prompt id."""
        groups: dict[str, list[Said]] = {}
        for one in self.said:
            groups.setdefault(one.prompt_id, []).append(one)
        return dict(sorted(groups.items()))

    def beside(self, other: "GivenAnswers") -> "GivenAnswers":
        """These, which are all that there are of theirs, and others of the same type after them."""
        moved = [one._replace(place=len(self.said) + one.place) for one in other.said]
        return replace(self, said=[*self.said, *moved], lying=self.lying.beside(other.lying))

    def read(self, chosen: Iterable[Said]) -> "Words":
        """Reads the words of those answers, each file once: neither what judges said of them nor tokens and verifiers."""
        places = np.unique([one.place for one in chosen])
        return Words(places, self.lying.table(places, WORDS), self.record)


@dataclass(frozen=True)
class Words:
    """`WORDS` of answers, in columns."""

    places: Numbers
    """Sorted, one for each row."""
    table: pa.Table
    record: type

    def rows(self, chosen: Iterable[Said]) -> dict[int, dict[str, Any]]:
        """Place → row of some of them."""
        places = np.unique([one.place for one in chosen])
        table = self.table.take(pa.array(np.searchsorted(self.places, places)))
        return dict(zip(places.tolist(), columns.to_rows(table, self.record), strict=True))


Value = Callable[[Mapping[str, Any]], float | None]
"""What a row is compared by."""


def read(artifact: Artifact, by: str | Value | None) -> GivenAnswers:
    """All answers of an artifact.

    Args:
        artifact: judgments or completions.
        by: the field that is their value, or what gives it; None: they have none.

    Raises:
        PedigreeError: an answer stands there twice.
    """
    same: dict[str, str] = {}
    said = [noted(place, row, by, same) for place, row in enumerate(records.stream(artifact.payload))]
    records.check_ids(one.id for one in said)
    return GivenAnswers(said, lying(artifact, [one.asked + one.length for one in said]), records.RECORDS[artifact.type])


def noted(place: int, row: Mapping[str, Any], by: str | Value | None, same: dict[str, str]) -> Said:
    """What is known of one answer.

    Args:
        place: of the row.
        row: a judgment or a completion.
        by: see `read`.
        same: names that were met, so that each is in memory once.
    """
    rewards = tuple(row.get("rewards", {}).values())
    return Said(
        place=place,
        id=row["id"],
        prompt_id=same.setdefault(row["prompt_id"], row["prompt_id"]),
        policy=same.setdefault(row["policy"], row["policy"]),
        on_policy=row["on_policy"],
        text=blake2b(row["text"].encode(), digest_size=16).digest(),
        blank=not row["text"].strip(),
        ended=records.ended(row),
        length=len(row["text"]),
        asked=sum(len(message["content"]) for message in row["messages"])
        + sum(map(len, records.texts_within(row.get("template_arguments")))),
        value=row[by] if isinstance(by, str) else by(row) if by else None,
        rewards=() if None in rewards else rewards,
    )


def lying(artifact: Artifact, sizes: Sequence[int]) -> Scattered:
    """Where the rows of an artifact lie; `sizes` are the characters of each, see `records.bulk_of`."""
    files = [artifact.payload / name for name in records.row_files(path.name for path in artifact.payload.iterdir())]
    counts = [records.count(file) for file in files]
    return Scattered(
        files=files,
        file=np.repeat(np.arange(len(files)), counts),
        line=np.concatenate([np.arange(count) for count in counts]),
        sizes=np.asarray(sizes, np.int64),
    )
