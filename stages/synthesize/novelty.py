"""Novelty of a text by ROUGE-L against all earlier texts, without comparing all pairs.

ROUGE-L is the F1 of the longest common subsequence of words, 2 LCS / (m + n) of texts of m and n words (Lin 2004, §3.1). Above θ a pair has
LCS > θ (m + n) / 2, so that each of the two shares more than θ / (2 - θ) of its own words with the other. If the words of both are sorted
in the same order, their prefixes share a word, where a prefix leaves less than that share of the words (prefix filtering: Chaudhuri, Ganti
and Kaushik 2006). Only such pairs are compared.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from pedigree.data.contamination.reading import CJK

WORD = re.compile(rf"[{CJK}]|(?:(?![{CJK}])\w)+")
"""In scripts without spaces, each character is a word."""


def words_of(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def rouge_l(one: Sequence[str], other: Sequence[str]) -> float:
    """ROUGE-L of two lists of words; 0 if either is empty."""
    return 2 * _common(one, other) / (len(one) + len(other)) if one and other else 0.0


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence, computing a table row at a time as the bits of an integer (Hyyrö 2004)."""
    places: dict[str, int] = defaultdict(int)
    for place, word in enumerate(one):
        places[word] |= 1 << place
    full = (1 << len(one)) - 1
    row = full
    for word in other:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(one) - row.bit_count()


class Novelty:
    """Index of earlier texts that finds resembling ones."""

    def __init__(self, bound: float, texts: Iterable[str]) -> None:
        """`texts` are all texts to be compared; their word frequencies affect only the speed."""
        self._bound = bound
        self._frequency = Counter(word for text in texts for word in set(words_of(text)))
        self._texts: list[tuple[str, list[str]]] = []
        self._places: dict[tuple[str, int], list[int]] = defaultdict(list)

    def resembled(self, text: str) -> tuple[str, float] | None:
        """(name, ROUGE-L) of the first earlier text above the bound; None if the text is new."""
        words = words_of(text)
        near = {place for word in self._prefix(words) for place in self._places.get(word, ())}
        for place in sorted(near):
            name, other = self._texts[place]
            if 2 * min(len(words), len(other)) > self._bound * (len(words) + len(other)):
                found = rouge_l(words, other)
                if found > self._bound:
                    return name, found
        return None

    def add(self, name: str, text: str) -> None:
        """Add a text under a name."""
        words = words_of(text)
        for word in self._prefix(words):
            self._places[word].append(len(self._texts))
        self._texts.append((name, words))

    def _prefix(self, words: Sequence[str]) -> list[tuple[str, int]]:
        """The rarest words of a text, where the k-th occurrence of a word counts as a separate word."""
        times: Counter[str] = Counter()
        numbered: list[tuple[str, int]] = []
        for word in words:
            numbered.append((word, times[word]))
            times[word] += 1
        numbered.sort(key=lambda one: (self._frequency[one[0]], one))
        shared = math.floor(self._bound / (2 - self._bound) * len(words)) + 1
        return numbered[: max(0, len(words) - shared + 1)]
