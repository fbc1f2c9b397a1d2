"""Which overlaps are no evidence that an item was copied: those of short items in longer texts, and of words that many items share."""

from collections.abc import Mapping
from typing import Any

from data.coverage import Benchmarks, Gram, Overlap, compared, lines_of
from data.reading import ASCII_OPERATORS, NAME, NUMBER, readings

BELOW, SHORT, COMMON = "below the threshold", "short item", "common words"
"""What the doubts are."""


class Rarity:
    """Tells n-grams that many items of a benchmark hold, such as `which of the following statements is correct`."""

    def __init__(self, benchmarks: Benchmarks, abstracted: bool, many: int) -> None:
        """Reads all items: what is held by `many` of a benchmark is common."""
        self._many = many
        self._texts = {label: b"".join(_whole(row, abstracted) for row in rows) for label, rows in benchmarks.items()}
        self._known: dict[tuple[str, Gram], bool] = {}

    def common(self, overlap: Overlap) -> bool:
        """Whether all n-grams of an overlap are common."""
        return all(self._common(overlap.benchmark, gram) for gram in overlap.grams)

    def _common(self, benchmark: str, gram: Gram) -> bool:
        if (benchmark, gram) not in self._known:
            self._known[benchmark, gram] = self._held(self._texts[benchmark], b" %b " % b" ".join(gram))
        return self._known[benchmark, gram]

    def _held(self, lines: bytes, wanted: bytes) -> bool:
        found, at = 0, lines.find(wanted)
        while at >= 0 and found < self._many:
            found += 1
            at = lines.find(wanted, lines.index(b"\n", at))
        return found >= self._many


def _whole(item: Mapping[str, Any], abstracted: bool) -> bytes:
    """A line with all turns of an item in all readings: one space between tokens, more between turns."""
    return b"".join(b" %b " % b" ".join(turn.split()) for turns in readings(compared(item), abstracted) for turn in turns) + b"\n"


def ordinary_words(item: Mapping[str, Any]) -> int:
    """Different words of an item as it is written, names and numbers apart."""
    (turns, *_) = readings(compared(item), abstracted=True)
    return len({token for turn in turns for token in turn.split() if token not in (NAME, NUMBER) and token not in ASCII_OPERATORS})


def fewest_tokens(text: str, abstracted: bool) -> int:
    """Tokens of a text in the reading that has the fewest."""
    return min(len(line.split()) for line in lines_of([text], abstracted))
