"""Training documents: the pieces of a row's one or two documents, and their tokens packed as in a token file.

This module does not need torch, so tokenizing processes start without it.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pedigree.configs.methods.training import Lists, TrainOn
from pedigree.data.chat.chat import Chat, Piece
from pedigree.data.chat.encoding import Encoder, Ids

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

    def characters(self, row: Row) -> int:
        """Estimate of the tokenizing cost."""
        return sum(len(message["content"]) for message in row["messages"])

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
    per_row: ClassVar[int] = 2

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        texts = zip((row["chosen"], row["rejected"]), row["ended"], strict=True)
        arguments = row.get("template_arguments")
        return tuple(chat.answered(row["messages"], text, ended=ended, arguments=arguments) for text, ended in texts)

    def characters(self, row: Row) -> int:
        return 2 * super().characters(row) + len(row["chosen"]) + len(row["rejected"])


@dataclass(frozen=True)
class SingleAnswers(Documents):
    """Answers {messages, text, ended} from preferences."""

    taken: str
    """Name of the function that selected and ordered the answers."""

    def pieces(self, chat: Chat, row: Row) -> tuple[list[Piece], ...]:
        return (chat.answered(row["messages"], row["text"], ended=row["ended"], arguments=row.get("template_arguments")),)

    def characters(self, row: Row) -> int:
        return super().characters(row) + len(row["text"])


class Packed(NamedTuple):
    """Concatenated documents."""

    data: bytes
    """For each document: its ids, its training mask as bits (`np.packbits`), and zero padding to a whole number of ids."""
    index_D3: np.ndarray
    """uint32: number of tokens; of trained tokens, except the first token; CRC-32 of the document's data."""


def record_bytes(lengths: np.ndarray, item_bytes: int) -> np.ndarray:
    """Bytes of documents with these numbers of tokens."""
    return (lengths * item_bytes + (lengths + 7) // 8 + item_bytes - 1) // item_bytes * item_bytes


def pack(documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> Packed:
    """Pack documents (ids, trained), each of shape (T,)."""
    data, index_D3 = bytearray(), np.zeros((len(documents), 3), dtype=np.uint32)
    for number, (ids, trained) in enumerate(documents):
        begun = len(data)
        data += ids.tobytes() + np.packbits(trained).tobytes()
        data += bytes(-len(data) % ids.itemsize)
        index_D3[number] = len(ids), np.count_nonzero(trained[1:]), zlib.crc32(memoryview(data)[begun:])
    return Packed(bytes(data), index_D3)


def tokenised(rows: Sequence[Row], documents: Documents, encoder: Encoder) -> Packed:
    """Tokenize the documents of rows, in order.

    Tokens after the last trained one are dropped, because they have no effect. A document without trained tokens stays whole.

    Raises:
        ChatError: a row cannot be trained on; reports the first such row.
        EncodingMismatch: the encoder's fast path gives different ids.
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
