"""Texts that repeat another one with other people or numbers, found by edit distance rather than by n-grams as in the tools."""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.paraphrases import SMALL, TENS

NUMBERS = frozenset([*SMALL, *TENS, "hundred", "thousand", "million"])
ONE_IN = 10
"""One of this many words may be removed, added or replaced."""
_word = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def ordinary(text: str) -> list[str]:
    """The words of a text, without names (with a capital letter) and numbers (with a digit, or in words)."""
    return [word for word in _word.findall(text) if word.islower() and word not in NUMBERS]


def distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Levenshtein distance in words."""
    before = list(range(len(second) + 1))
    for row, word in enumerate(first, 1):
        this = [row]
        for column, other in enumerate(second, 1):
            this.append(min(before[column] + 1, this[-1] + 1, before[column - 1] + (word != other)))
        before = this
    return before[-1]


def twins(items: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """For each text, whether its ordinary words are those of an item, up to one in `ONE_IN`."""
    said = [ordinary(item) for item in items]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, words in enumerate(said):
        for word in set(words):
            holders[word].append(number)
    places = {word: np.array(numbers, np.int64) for word, numbers in holders.items()}
    return [_is_twin(ordinary(text), said, places) for text in texts]


def _is_twin(words: list[str], said: list[list[str]], places: dict[str, NDArray[np.int64]]) -> bool:
    allowed, different = len(words) // ONE_IN, set(words)
    shared = [places[word] for word in different if word in places]
    if len(different) - len(shared) > allowed or not shared:
        return False
    counts = np.bincount(np.concatenate(shared), minlength=len(said))
    near = np.flatnonzero(counts >= len(different) - allowed)  # a change takes one word away at most
    return any(distance(words, said[number]) <= allowed for number in near)
