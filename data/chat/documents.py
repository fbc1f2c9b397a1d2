"""What rows become for training: the pieces of one or two documents, and their tokens packed as they lie in a file.

Nothing here needs torch: processes that do nothing but tokenise start without it.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from configs.methods.training import Lists, TrainOn
from data.chat.chat import Chat, Piece
from data.chat.encoding import Encoder, Ids

Row = Mapping[str, Any]


class Documents(ABC):
    """How rows were taken from the data, and what a row becomes. The fields of a subclass say all that decides about it."""

    per_row: ClassVar[int] = 1
    """Documents that each row becomes."""

    @abstractmethod
    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        """The pieces of each of the row's documents.

        Raises:
            ChatError: the row cannot be trained on.
        """

    def characters(self, row: Row) -> int:
        """About how long it takes."""
        return sum(len(message["content"]) for message in row["messages"])

    @property
    def said(self) -> list[Any]:
        """What tells it from others."""
        return [type(self).__name__, sorted(vars(self).items())]


@dataclass(frozen=True)
class Conversations(Documents):
    """Whole conversations {messages}. Rows of all kinds may have `template_arguments`."""

    train_on: TrainOn

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        return (chat.conversation(row["messages"], self.train_on, row.get("template_arguments")),)


@dataclass(frozen=True)
class Pairs(Documents):
    """(chosen, rejected) of {messages, chosen, rejected, ended}, which `lists` has selected."""

    lists: Lists
    per_row: ClassVar[int] = 2

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        texts = zip((row["chosen"], row["rejected"]), row["ended"], strict=True)
        arguments = row.get("template_arguments")
        return tuple(chat.answered(row["messages"], text, ended=ended, arguments=arguments) for text, ended in texts)

    def characters(self, row: Row) -> int:
        return 2 * super().characters(row) + len(row["chosen"]) + len(row["rejected"])


@dataclass(frozen=True)
class SingleAnswers(Documents):
    """Answers {messages, text, ended} of preferences."""

    taken: str
    """Which answers of a preference, and in which order: the name of the function that has selected them."""

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        return (chat.answered(row["messages"], row["text"], ended=row["ended"], arguments=row.get("template_arguments")),)

    def characters(self, row: Row) -> int:
        return super().characters(row) + len(row["text"])


class Packed(NamedTuple):
    """Documents one after the other."""

    data: bytes
    """Of each document: its ids, then which tokens are trained, eight a byte (`np.packbits`), then zeros up to a whole number of ids."""
    index_D3: np.ndarray
    """uint32: tokens; trained tokens, the first one left out; CRC-32 of the document's data."""


def record_bytes(lengths: np.ndarray, item_bytes: int) -> np.ndarray:
    """Bytes of documents with so many tokens each."""
    return (lengths * item_bytes + (lengths + 7) // 8 + item_bytes - 1) // item_bytes * item_bytes


def pack(documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> Packed:
    """Packs documents: (ids, trained), each of shape (T,)."""
    data, index_D3 = bytearray(), np.zeros((len(documents), 3), dtype=np.uint32)
    for number, (ids, trained) in enumerate(documents):
        begun = len(data)
        data += ids.tobytes() + np.packbits(trained).tobytes()
        data += bytes(-len(data) % ids.itemsize)
        index_D3[number] = len(ids), np.count_nonzero(trained[1:]), zlib.crc32(memoryview(data)[begun:])
    return Packed(bytes(data), index_D3)


def tokenised(rows: Sequence[Row], documents: Documents, encoder: Encoder) -> Packed:
    """The documents of some rows, in their order.

    Tokens after the last trained one are left out: they have no effect. A document that trains nothing stays whole.

    Raises:
        ChatError: a row cannot be trained on; the first such row is the one that is told.
        NotEqual: the encoder is not to be trusted.
    """
    drafts = [draft for row in rows for draft in documents.pieces(encoder.chat, row)]
    ids = encoder.encode((piece.text, piece.plain) for draft in drafts for piece in draft)
    encoder.prove((piece.text, piece.plain) for piece in drafts[-1])
    return pack([_joined(draft, ids, encoder.end_of_turn) for draft in drafts])


def _joined(draft: list[Piece], ids_of: Mapping[tuple[str, bool], Ids], end_of_turn: Ids) -> tuple[Ids, np.ndarray]:
    """(ids, trained) of one document."""
    parts: list[Ids] = []
    stretches: list[tuple[int, int]] = []
    length = 0
    for piece in draft:
        begun = length
        parts += [ids_of[piece.text, piece.plain], end_of_turn][: 1 + piece.ends]
        length += len(ids_of[piece.text, piece.plain]) + piece.ends
        if piece.trained and length > begun:
            stretches.append((begun, length))
    end = stretches[-1][1] if stretches else length
    trained = np.zeros(end, dtype=np.bool_)
    for begin, after in stretches:
        trained[begin:after] = True
    return np.concatenate(parts)[:end], trained
