"""Which texts may hold one of many token sequences: hashes of all their n-grams, a batch of texts at a time.

Nothing is missed; what passes by chance is for an exact comparison to sort out.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

BATCH_BYTES = 1 << 18
"""Of text looked at together."""
BITS_PER_GRAM = 16
LEAST_BITS = 16
"""As a power of two: the smallest table of bits."""
LENGTHS = (0, 1, 2, 3, 4, 8)
"""Of the beginnings that are looked for, in tokens."""
WORD = 8
"""Bytes of a token's beginning, and of its end, that its hash is made of."""
BETWEEN = b" \x7f "
"""A token that no text holds: sequences do not run from one text into the next."""

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]

_ODD, _MIX, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)
_FIRST = np.array([(1 << 8 * count) - 1 for count in range(WORD + 1)], np.uint64)
"""By number: a mask of so many bytes."""


class Screen:
    """A set of token sequences, known by their hashes."""

    def __init__(self, grams: Iterable[Sequence[bytes]]) -> None:
        """Takes sequences of tokens; an empty one is in every text."""
        by_length: dict[int, list[bytes]] = {}
        for gram in grams:
            length = max(one for one in LENGTHS if one <= len(gram))
            by_length.setdefault(length, []).append(b" ".join(gram[:length]))
        self._known: dict[int, tuple[Hashes, np.uint64, NDArray[np.bool_]]] = {}
        """Length in tokens → hashes, sorted; and a table of their upper bits, with how far to shift for it."""
        self._all = 0 in by_length
        by_length.pop(0, None)
        for length, lines in sorted(by_length.items()):
            tokens, _ = _token_hashes(BETWEEN.join(lines))
            hashes = np.unique(_gram_hashes(tokens, [length])[length][:: length + 1])
            bits = max(LEAST_BITS, (len(hashes) * BITS_PER_GRAM).bit_length())
            shift, table = np.uint64(64 - bits), np.zeros(1 << bits, np.bool_)
            table[hashes >> shift] = True
            self._known[length] = (hashes, shift, table)

    def passes(self, texts: Sequence[Sequence[bytes]]) -> list[bool]:
        """For each group of lines, whether one of them may hold one of the sequences."""
        found = np.full(len(texts), self._all, np.bool_)
        lines: list[bytes] = []
        owners: list[int] = []
        size = 0
        for number, group in enumerate(texts):
            for line in group:
                lines.append(line)
                owners.append(number)
                size += len(line)
            if size >= BATCH_BYTES:
                found[self._hits(lines, owners)] = True
                lines, owners, size = [], [], 0
        if lines:
            found[self._hits(lines, owners)] = True
        return found.tolist()

    def _hits(self, lines: Sequence[bytes], owners: Sequence[int]) -> Places:
        """The owners of the lines that may hold one."""
        tokens, starts = _token_hashes(BETWEEN.join(lines))
        places = [np.empty(0, np.int64)]
        for length, hashes in _gram_hashes(tokens, self._known).items():
            known, shift, table = self._known[length]
            near = np.flatnonzero(table[hashes >> shift])
            places.append(near[known[np.searchsorted(known[:-1], hashes[near])] == hashes[near]])
        begins = np.cumsum([0, *(len(line) + len(BETWEEN) for line in lines)])
        line = np.searchsorted(begins, starts[np.concatenate(places)], side="right") - 1
        return np.asarray(owners, np.int64)[line]


def _token_hashes(text: bytes) -> tuple[Hashes, Places]:
    """Of every token a hash of its first and last bytes and its length; and where each token starts."""
    padded = b"%b %b %b" % (bytes(WORD), text, bytes(WORD))
    inside = np.frombuffer(padded, np.uint8)[WORD : len(padded) - WORD] != ord(" ")
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[0::2], edges[1::2]
    words = np.ndarray((len(padded) - WORD,), np.dtype("<u8"), padded, strides=(1,))  # the 8 bytes from every place on
    lengths = ends - starts
    first = words[starts + (WORD + 1)]
    first &= _FIRST[np.minimum(lengths, WORD)]
    last = words[ends + 1]
    last[lengths <= WORD] = 0
    first *= _ODD
    first += last
    first *= _ODD
    first += lengths.view(np.uint64)
    return _spread(first), starts


def _gram_hashes(tokens: Hashes, lengths: Iterable[int]) -> dict[int, Hashes]:
    """By length, hashes of so many tokens from each token on that has enough after it; longer ones are put together of shorter ones."""
    doubled = {1: tokens}  # powers of two

    def join(left: Hashes, right: Hashes, offset: int) -> Hashes:
        count = max(0, len(right) - offset)
        joined = left[:count] * np.uint64(int(_ODD) + 2 * offset)  # another factor for each length: the order counts
        joined += right[offset : offset + count]
        return joined

    def of(length: int) -> Hashes:
        power = 1 << length.bit_length() - 1
        for size in (1 << step for step in range(power.bit_length() - 1)):
            doubled.setdefault(2 * size, join(doubled[size], doubled[size], size))
        return doubled[power] if length == power else join(doubled[power], of(length - power), power)

    return {length: of(length) for length in lengths}


def _spread(values: Hashes) -> Hashes:
    """Lets every bit of a value reach the upper ones; in place."""
    values ^= values >> _HALF
    values *= _MIX
    values ^= values >> _HALF
    return values
