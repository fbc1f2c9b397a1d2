"""Bulk token counts of rows as in training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pedigree.configs.rows.row_sources import RecordType
from pedigree.data.chat.chat import Chat, Piece
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.chat.documents import Conversations, Row
from pedigree.data.filters.row_filters import Counted
from pedigree.data.records.records import ended


class TokenCounter:
    """Counts tokens of rows under a model's tokenizer and chat template."""

    def __init__(self, folder: Path, record: RecordType) -> None:
        """
        Raises:
            ChatError: the template or tokenizer in the model folder is unusable for training.
        """
        self._chat, self._documents = Chat(folder), DOCUMENTS[record]

    def counts(self, rows: Sequence[Row]) -> list[Counted]:
        """Tokens of each row's longest document, up to the last trained one, as training compares them with `max_length`.

        A conversation is one document; a preference has one per answer, including the prompt. A prompt counts up to where the assistant's
        answer begins.
        """
        drafts = [self._drafts(row) for row in rows]
        ids = self._chat.bulk_ids(piece for found in drafts if not isinstance(found, str) for draft in found for piece in draft)
        return [found if isinstance(found, str) else max(_length(draft, ids) for draft in found) for found in drafts]

    def _drafts(self, row: Row) -> Sequence[list[Piece]] | str:
        """The pieces of each of the row's documents, or why the template rejects it, without the model's path."""
        try:
            return self._documents(self._chat, row)
        except ChatError as error:
            return str(error).replace(f" in {self._chat.folder}", "")


def _answers(chat: Chat, row: Row) -> list[list[Piece]]:
    arguments = row.get("template_arguments")
    return [chat.answered(row["messages"], one["text"], ended=ended(one), arguments=arguments) for one in row["answers"]]


DOCUMENTS: Mapping[str, Callable[[Chat, Row], Sequence[list[Piece]]]] = {
    "conversation": Conversations("last_turn").pieces,  # counts the same as training all, and accepts every row that some training does
    "prompt": lambda chat, row: [chat.prompt_pieces(row["messages"], row.get("template_arguments"))],
    "preference": _answers,
}
"""Record type → the pieces of each of a row's documents."""


def _length(draft: Sequence[Piece], ids_of: Mapping[Piece, Sequence[int]]) -> int:
    """Number of tokens up to the last trained one; all if none is trained."""
    total = trained = 0
    for piece in draft:
        tokens = len(ids_of[piece]) + piece.ends
        total += tokens
        trained = total if piece.trained and tokens else trained
    return trained or total
