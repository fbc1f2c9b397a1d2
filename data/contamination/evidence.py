"""Doubts about overlaps as evidence of copying: words that the item repeats and the row does not, short items in longer texts, and words
common to many items."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pedigree.data.contamination.coverage import Benchmarks, Common, Gram, compared, grams_of, lines_of, turns_of
from pedigree.data.contamination.reading import ASCII_OPERATORS, NAME, NUMBER, readings

BELOW, FEWER, SHORT, COMMON, ALIKE = "below the threshold", "said less often", "short item", "common words", "only alike"
"""The doubts."""


def common_grams(benchmarks: Benchmarks, ngram: int, abstracted: bool, many: int) -> Common:
    """Label → n-grams that occur in at least `many` of its items, such as `which of the following statements is correct`."""
    return {label: frozenset(_common(rows, ngram, abstracted, many)) for label, rows in benchmarks.items()}


def _common(items: Sequence[Mapping[str, Any]], ngram: int, abstracted: bool, many: int) -> Iterator[Gram]:
    """Count 8-byte hashes first, then only the n-grams whose hash is frequent enough."""
    hashes = np.array([hash(gram) for item in items for gram in _different(item, ngram, abstracted)], np.int64)
    known, counts = np.unique(hashes, return_counts=True)
    often = set(known[counts >= many].tolist())
    held = Counter(gram for item in items for gram in _different(item, ngram, abstracted) if hash(gram) in often)
    return (gram for gram, count in held.items() if count >= many)


def _different(item: Mapping[str, Any], ngram: int, abstracted: bool) -> set[Gram]:
    return {gram for turns in turns_of(item, abstracted) for _, gram in grams_of(turns, ngram)}


def ordinary_words(item: Mapping[str, Any]) -> int:
    """Number of distinct words of an item as written, without names and numbers."""
    (turns, *_) = readings(compared(item), abstracted=True)
    return len({token for turn in turns for token in turn.split() if token not in (NAME, NUMBER) and token not in ASCII_OPERATORS})


def fewest_tokens(text: str, abstracted: bool) -> int:
    """Number of tokens of a text in its shortest reading."""
    return min(len(line.split()) for line in lines_of([text], abstracted))
