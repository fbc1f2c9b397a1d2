"""What filters see in single rows, each by itself."""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from configs.filters import Keywords, MaxCharacters

Row = dict[str, Any]
Seen = dict[int, str]
"""Against a row, by its place: what was seen in it."""


def texts(row: Row) -> list[str]:
    """Every text of a row: its messages, and the answers of a preference."""
    return [message["content"] for message in row["messages"]] + [answer["text"] for answer in row.get("answers", ())]


def folded(row: Row) -> str:
    """The row's texts, their case and space apart, with a sign between them."""
    return " \x00 ".join(" ".join(unicodedata.normalize("NFC", text).casefold().split()) for text in texts(row))


def fingerprint(row: Row, size: int) -> bytes:
    """A hash of so many bytes that rows with the same folded texts share."""
    return hashlib.blake2b(folded(row).encode(), digest_size=size).digest()


def max_characters(one: MaxCharacters, rows: Sequence[Row]) -> Seen:
    lengths = [sum(map(len, texts(row))) for row in rows]
    return {place: f"{length} > {one.limit}" for place, length in enumerate(lengths) if length > one.limit}


def keywords(one: Keywords, rows: Sequence[Row]) -> Seen:
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(word.casefold())}(?!\w)" for word in one.words))
    found = (pattern.search("\n".join(texts(row)).casefold()) for row in rows)
    return {place: match.group() for place, match in enumerate(found) if match}
