"""How many tokens rows have when they are trained on, counted in bulk (`data/chat/encoding.py`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.rows.datasets import RecordType
from data.chat.chat import Chat, ChatError, Piece
from data.chat.encoding import Encoder, Ids
from data.filters.row_filters import Counted
from data.records.records import ended

Row = Mapping[str, Any]
ANY_ID = np.dtype("<u4")
TODAY = "strftime_now"
"""By which a chat template asks for the date."""


class TokenCounter:
    """Counts what rows become under the tokenizer and the chat template of a model."""

    def __init__(self, folder: Path, record: RecordType, fast: bool) -> None:
        """
        Args:
            folder: of the model.
            record: what the rows are.
            fast: see `Encoder`.

        Raises:
            ChatError: nothing can be trained under its template or tokenizer.
        """
        self._encoder, self._documents = Encoder(Chat(folder), ANY_ID, fast), DOCUMENTS[record]

    @property
    def reads_the_clock(self) -> bool:
        """Whether the template may write the day's date into what it renders."""
        return TODAY in self._encoder.chat.template

    def counts(self, rows: Sequence[Row]) -> list[Counted]:
        """Of each row the tokens of its longest document, up to the last trained one, as training holds them against `max_length`.

        A conversation is one document, a preference one for each answer, with the prompt. A prompt is counted up to where the assistant
        begins to speak.

        Raises:
            NotEqual: the fast way is not to be taken.
        """
        drafts = [self._drafts(row) for row in rows]
        rendered = [draft for found in drafts if not isinstance(found, str) for draft in found]
        ids = self._encoder.encode((piece.text, piece.plain) for draft in rendered for piece in draft)
        if rendered:
            self._encoder.prove((piece.text, piece.plain) for piece in rendered[-1])
        return [found if isinstance(found, str) else max(_length(draft, ids) for draft in found) for found in drafts]

    def _drafts(self, row: Row) -> list[list[Piece]] | str:
        """The pieces of each of the row's documents, or why the template refuses it; where the model lies is left out."""
        chat = self._encoder.chat
        try:
            return self._documents(chat, row)
        except ChatError as error:
            return str(error).replace(f" in {chat.folder}", "")


def _conversation(chat: Chat, row: Row) -> list[list[Piece]]:
    """Trained in its last turn: so much as in all of them, and refused in none that a training could take."""
    return [chat.conversation(row["messages"], "last_turn", row.get("template_arguments"))]


def _prompt(chat: Chat, row: Row) -> list[list[Piece]]:
    return [chat.asked(row["messages"], row.get("template_arguments"))]


def _answers(chat: Chat, row: Row) -> list[list[Piece]]:
    arguments = row.get("template_arguments")
    return [chat.answered(row["messages"], one["text"], ended=ended(one), arguments=arguments) for one in row["answers"]]


DOCUMENTS: Mapping[str, Callable[[Chat, Row], list[list[Piece]]]] = {
    "conversation": _conversation,
    "prompt": _prompt,
    "preference": _answers,
}
"""Record → the pieces of each of a row's documents."""


def _length(draft: Sequence[Piece], ids_of: Mapping[tuple[str, bool], Ids]) -> int:
    """Tokens up to the last trained one; all where none is trained."""
    total = trained = 0
    for piece in draft:
        tokens = len(ids_of[piece.text, piece.plain]) + piece.ends
        total += tokens
        trained = total if piece.trained and tokens else trained
    return trained or total
