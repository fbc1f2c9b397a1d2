"""Bulk token counts of rows as in training (`data/chat/encoding.py`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pedigree.configs.rows.row_sources import RecordType
from pedigree.data.chat.chat import Chat, ChatError, Piece
from pedigree.data.chat.encoding import Encoder, Ids
from pedigree.data.filters.row_filters import Counted
from pedigree.data.records.records import ended

Row = Mapping[str, Any]
ANY_ID = np.dtype("<u4")
TODAY = "strftime_now"
"""Function by which chat templates get the date."""


class TokenCounter:
    """Counts tokens of rows under a model's tokenizer and chat template."""

    def __init__(self, folder: Path, record: RecordType, fast: bool) -> None:
        """
        Args:
            folder: model folder.
            record: record type of the rows.
            fast: see `Encoder`.

        Raises:
            ChatError: its template or tokenizer is unusable for training.
        """
        self._encoder, self._documents = Encoder(Chat(folder), ANY_ID, fast), DOCUMENTS[record]

    @property
    def reads_the_clock(self) -> bool:
        """Whether the template may render the current date."""
        return TODAY in self._encoder.chat.template

    def counts(self, rows: Sequence[Row]) -> list[Counted]:
        """Tokens of each row's longest document, up to the last trained one, as training compares them with `max_length`.

        A conversation is one document; a preference has one per answer, including the prompt. A prompt counts up to where the assistant's
        answer begins.

        Raises:
            EncodingMismatch: the fast path gives different ids.
        """
        drafts = [self._drafts(row) for row in rows]
        rendered = [draft for found in drafts if not isinstance(found, str) for draft in found]
        ids = self._encoder.encode((piece.text, piece.plain) for draft in rendered for piece in draft)
        if rendered:
            self._encoder.prove((piece.text, piece.plain) for piece in rendered[-1])
        return [found if isinstance(found, str) else max(_length(draft, ids) for draft in found) for found in drafts]

    def _drafts(self, row: Row) -> list[list[Piece]] | str:
        """The pieces of each of the row's documents, or why the template rejects it, without the model's path."""
        chat = self._encoder.chat
        try:
            return self._documents(chat, row)
        except ChatError as error:
            return str(error).replace(f" in {chat.folder}", "")


def _conversation(chat: Chat, row: Row) -> list[list[Piece]]:
    """Training only the last turn gives the same count as training all, and rejects no row that some training accepts."""
    return [chat.conversation(row["messages"], "last_turn", row.get("template_arguments"))]


def _prompt(chat: Chat, row: Row) -> list[list[Piece]]:
    return [chat.prompt_pieces(row["messages"], row.get("template_arguments"))]


def _answers(chat: Chat, row: Row) -> list[list[Piece]]:
    arguments = row.get("template_arguments")
    return [chat.answered(row["messages"], one["text"], ended=ended(one), arguments=arguments) for one in row["answers"]]


DOCUMENTS: Mapping[str, Callable[[Chat, Row], list[list[Piece]]]] = {
    "conversation": _conversation,
    "prompt": _prompt,
    "preference": _answers,
}
"""Record type → the pieces of each of a row's documents."""


def _length(draft: Sequence[Piece], ids_of: Mapping[tuple[str, bool], Ids]) -> int:
    """Number of tokens up to the last trained one; all if none is trained."""
    total = trained = 0
    for piece in draft:
        tokens = len(ids_of[piece.text, piece.plain]) + piece.ends
        total += tokens
        trained = total if piece.trained and tokens else trained
    return trained or total
