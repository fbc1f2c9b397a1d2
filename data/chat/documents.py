"""Training documents: the pieces of a row's one or two documents, and their tokens as in a token file.

This module does not need torch, so tokenizing processes start without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from pedigree.configs.methods.training import Lists, TrainOn
from pedigree.data.chat.chat import Chat, Piece

Row = Mapping[str, Any]


class Documents(ABC):
    """How rows were selected and become documents. A subclass's fields contain everything that affects the result."""

    per_row: ClassVar[int] = 1
    """Documents per row."""

    @abstractmethod
    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        """The pieces of each of the row's documents.

        Raises:
            ChatError: the row cannot be trained on.
        """

    @property
    def key(self) -> list[Any]:
        """Identity, for cache keys."""
        return [type(self).__name__, sorted(vars(self).items())]


@dataclass(frozen=True)
class Conversations(Documents):
    """Whole conversations {messages}. All rows may have `template_arguments`."""

    train_on: TrainOn

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        return (chat.conversation(row["messages"], self.train_on, row.get("template_arguments")),)


@dataclass(frozen=True)
class Pairs(Documents):
    """(chosen, rejected) from {messages, chosen, rejected, ended}, as selected by `lists`."""

    lists: Lists
    scored: bool = False
    """As reward models read them, see `Chat.scored`."""
    per_row: ClassVar[int] = 2

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        texts = zip((row["chosen"], row["rejected"]), row["ended"], strict=True)
        arguments = row.get("template_arguments")
        pieces = chat.scored if self.scored else chat.answered
        return tuple(pieces(row["messages"], text, ended=ended, arguments=arguments) for text, ended in texts)


@dataclass(frozen=True)
class SingleAnswers(Documents):
    """Answers {messages, text, ended} from preferences."""

    taken: str
    """Name of the function that selected and ordered the answers."""

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        return (chat.answered(row["messages"], row["text"], ended=row["ended"], arguments=row.get("template_arguments")),)


def schema(most: int) -> pa.Schema:
    """Columns of tokenized documents: their token ids up to `most`, training mask (`np.packbits`), and number of trained tokens, except
    the first token."""
    ids = pa.uint16() if most < 1 << 16 else pa.uint32()
    return pa.schema({"ids": pa.list_(ids), "trained_bits": pa.binary(), "num_trained": pa.uint32()})


def tokenized(rows: Sequence[Row], documents: Documents, chat: Chat, form: pa.Schema) -> pa.RecordBatch:
    """Tokenize the documents of rows, in order.

    Tokens after the last trained one are dropped, because they have no effect. A document without trained tokens stays whole.

    Raises:
        ChatError: a row cannot be trained on; reports the first such row.
    """
    drafts = [draft for row in rows for draft in documents.pieces(chat, row)]
    ids_of = chat.bulk_ids(piece for draft in drafts for piece in draft)
    return pa.RecordBatch.from_pylist([_joined(draft, ids_of, chat.eos_id) for draft in drafts], form)


def _joined(draft: Sequence[Piece], ids_of: Mapping[Piece, Sequence[int]], end_of_turn: int) -> dict[str, Any]:
    ids: list[int] = []
    trained: list[bool] = []
    for piece in draft:
        ids += [*ids_of[piece], end_of_turn] if piece.ends else ids_of[piece]
        trained += [piece.trained] * (len(ids) - len(trained))
    end = len(trained) - trained[::-1].index(True) if True in trained else len(trained)
    return {"ids": ids[:end], "trained_bits": np.packbits(trained[:end]).tobytes(), "num_trained": sum(trained[1:end])}
