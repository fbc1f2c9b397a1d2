"""Candidate items for a row, from arrays of all items' n-grams and an upper bound on coverage.

An item of t tokens takes about 40 t bytes here, compared with 600 t in a dictionary of n-grams.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pedigree.data.contamination.compiled import compiled
from pedigree.data.contamination.coverage import Benchmarks, item_readings
from pedigree.data.contamination.matching import Numbers, Places, gram_hashes, line_hashes, search, table_of

PIECE_BYTES = 1 << 22
"""Bytes of items hashed at a time."""


class Grams(NamedTuple):
    """All n-grams of all readings of the items, reading by reading."""

    bounds: Places
    """Reading r has the n-grams `bounds[r]` to `bounds[r + 1]`."""
    tokens: Numbers
    """Number of tokens of each reading."""
    numbers: Numbers
    """Number of each n-gram; equal n-grams have equal numbers."""
    starts: Numbers
    """Position of each n-gram's first token in its reading."""
    lengths: Numbers
    """Length of each n-gram in tokens."""
    holders: Places
    """N-gram n occurs in the readings `held[holders[n]:holders[n + 1]]`, once per occurrence."""
    held: Numbers


class Candidates:
    """Index of the items for compiled search; items are numbered in the given order."""

    def __init__(self, benchmarks: Benchmarks, ngram: int, abstracted: bool = False) -> None:
        """Hash the questions of the items; arguments and errors are those of `Coverage`."""
        self.items = [(label, row) for label, rows in benchmarks.items() for row in rows]
        self._abstracted = abstracted
        pieces = list(_pieces(self.items, ngram, abstracted))
        hashes, tails, starts, lengths, counts, tokens, owners = (np.concatenate(part) for part in zip(*pieces, strict=True))
        known, first, numbers = np.unique(hashes, return_index=True, return_inverse=True)
        self._table = table_of(known, lengths[first], tails[first], ngram)
        self._owners = owners
        """Reading → item."""
        bounds, holders = np.concatenate([[0], np.cumsum(counts)]), np.concatenate([[0], np.cumsum(np.bincount(numbers))])
        held = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[np.argsort(numbers, kind="stable")]
        self._grams = Grams(bounds, tokens, numbers.astype(np.int32), starts, lengths, holders, held)

    def of(self, rows: Sequence[Sequence[str]], threshold: float) -> dict[int, tuple[int, ...]]:
        """Row index → ascending numbers of the items of which its texts might cover more than `threshold`."""
        texts = [text for row in rows for text in row]
        found = search(texts, self._table, self._abstracted)
        if not found.size:
            return {}
        owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        kinds = len(self._grams.holders)
        keys = np.unique(owners[found[0]] * kinds + found[1])  # each n-gram once per row
        sharing, numbers = np.divmod(keys, kinds)
        sets: dict[bytes, list[int]] = {}
        for part in np.split(np.arange(len(keys)), np.flatnonzero(np.diff(sharing)) + 1):
            shared = numbers[part[0] : part[-1] + 1].astype(np.int32)
            sets.setdefault(shared.tobytes(), []).append(int(sharing[part[0]]))  # many rows may share the same n-grams, e.g. of a preamble
        return {row: items for shared, these in sets.items() if (items := self._over(shared, threshold)) for row in these}

    def _over(self, shared: bytes, threshold: float) -> tuple[int, ...]:
        readings = _covered(np.frombuffer(shared, np.int32), self._grams, self._table.usual, threshold)
        return tuple(np.unique(self._owners[readings]).tolist()) if len(readings) else ()


def _pieces(items: Sequence[tuple[str, dict[str, Any]]], ngram: int, abstracted: bool) -> Iterator[tuple[Any, ...]]:
    """Yield for batches of items: hashes, tails, starts and lengths of their n-grams; numbers of n-grams and tokens of their readings, and
    the item of each reading."""
    lines: list[bytes] = []
    turns: list[int] = []
    owners: list[int] = []
    size = 0
    for number, (label, row) in enumerate(items):
        for read in item_readings(label, row, abstracted):
            lines += read
            turns.append(len(read))
            owners.append(number)
            size += sum(map(len, read))
        if size > PIECE_BYTES:
            yield _hashed(lines, turns, owners, ngram, abstracted)
            lines, turns, owners, size = [], [], [], 0
    if lines:
        yield _hashed(lines, turns, owners, ngram, abstracted)


def _hashed(lines: Sequence[bytes], turns: Sequence[int], owners: Sequence[int], ngram: int, abstracted: bool) -> tuple[Any, ...]:
    tokens, per_line = line_hashes(lines, abstracted)
    count = len(tokens)
    hashes, tails, starts, lengths = (np.empty(count, kind) for kind in (np.uint64, np.uint64, np.int32, np.int32))
    reading = np.repeat(np.arange(len(turns)), turns)
    before = np.cumsum(per_line) - per_line
    offsets = before - before[np.searchsorted(reading, reading)]  # token offset of a turn in its reading
    per_line_grams = np.where(per_line > 0, np.maximum(per_line - ngram, 0) + 1, 0)
    found = gram_hashes(tokens, per_line, offsets, ngram, hashes, tails, starts, lengths)
    counts, of_reading = (np.bincount(reading, weights=weights).astype(np.int64) for weights in (per_line_grams, per_line))
    return (
        hashes[:found], tails[:found], starts[:found], lengths[:found], counts, of_reading.astype(np.int32), np.array(owners, np.int32)
    )  # fmt: skip


@compiled
def _covered(shared, grams, usual, threshold):
    """The readings of which these n-grams, given by ascending numbers, cover more than `threshold`."""
    often = np.zeros(len(grams.tokens), np.int32)
    for number in shared:
        for place in range(grams.holders[number], grams.holders[number + 1]):
            often[grams.held[place]] += 1
    found = np.empty(len(often), np.int32)
    count = 0
    for reading in np.flatnonzero(often):
        tokens = grams.tokens[reading]
        if often[reading] * usual <= threshold * tokens:
            continue
        covered, end = 0, 0
        for place in range(grams.bounds[reading], grams.bounds[reading + 1]):
            number = grams.numbers[place]
            at = np.searchsorted(shared, number)
            if at < len(shared) and shared[at] == number:
                start = grams.starts[place]
                covered += start + grams.lengths[place] - max(start, end)
                end = start + grams.lengths[place]
        if covered / tokens > threshold:
            found[count] = reading
            count += 1
    return found[:count]
