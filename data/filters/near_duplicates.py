"""Near duplicates: MinHash candidates, exact Jaccard index of shingles, connected components.

A shingle is a 64-bit hash of `size` consecutive words of a folded text; a shorter text is one shingle. Each permutation of 32-bit numbers
keeps the least shingle (Broder 1997), and a band is a hash of r of these: two texts of Jaccard index J share one of `BANDS` bands with
probability 1 - (1 - J^r)^BANDS (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, § 3.4). A row in a band is compared with
the first row of that band and with the `NEARBY` rows before it in the band.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pedigree.data.contamination.compiled import compiled
from pedigree.data.contamination.reading import CJK
from pedigree.data.filters.row_filters import CONDITION
from pedigree.data.host.parallel import mapped

Places = NDArray[np.int64]
Bands = NDArray[np.uint32]
Similarities = NDArray[np.float64]

BANDS = 32
RECALL = 0.99
"""Recall for pairs exactly at the threshold."""
LONGEST_BAND = 8
"""Maximum permutations per band. More would save some false candidates, but cost more than those."""
NEARBY = 8
PAIRS = 1000
"""Pairs compared at a time."""
FEW = 4
"""Number of such batches up to which one process is used."""

SPACE = ord(" ")
PRIME, BASE, SPREAD = np.uint64(0x100000001B3), np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15)
START, NONE, HALF = np.uint64(0xCBF29CE484222325), np.uint64(0), np.uint64(32)
MOST = np.uint32(0xFFFFFFFF)
_draw = np.random.Generator(np.random.PCG64(0))  # the same in every version of numpy
FACTORS = _draw.integers(0, 1 << 31, BANDS * LONGEST_BAND, np.uint32) * np.uint32(2) + np.uint32(1)
TERMS = _draw.integers(0, 1 << 32, BANDS * LONGEST_BAND, np.uint32)
"""Permutation p is x → FACTORS[p] x + TERMS[p], modulo 2³²."""

_cjk = re.compile(f"([{CJK}])")


def band_length(threshold: float) -> int:
    """Permutations per band: the most for which a pair at the threshold is found with probability `RECALL`."""
    lengths = range(2, LONGEST_BAND + 1)
    return max((one for one in lengths if 1 - (1 - threshold**one) ** BANDS >= RECALL), default=1)


def bands(texts: Sequence[str], size: int, threshold: float) -> Bands:
    """Bands of folded texts, [N, BANDS]; texts with equal values in a column are candidates."""
    data, bounds, counts = _encoded(texts)
    words, found = np.empty(max(counts, default=0), np.uint64), np.empty((len(texts), BANDS), np.uint32)
    _bands(data, bounds, words, size, band_length(threshold), FACTORS, TERMS, found)
    return found


def similarities(texts: Sequence[str], size: int, pairs: Places) -> Similarities:
    """Jaccard indices of the shingles of pairs of texts, given by index, [2, P] → [P]."""
    data, bounds, counts = _encoded(texts)
    words, shingles, ends = np.empty(max(counts, default=0), np.uint64), np.empty(sum(counts), np.uint64), np.empty(len(texts), np.int64)
    _note(data, bounds, words, size, shingles, ends)
    sets = [np.unique(some) for some in np.split(shingles, ends)[:-1]]  # the rest of the buffer is unused
    starts, found = np.cumsum([0, *map(len, sets)]), np.empty(pairs.shape[1], np.float64)
    _compare(np.concatenate(sets) if sets else shingles, starts, pairs, found)
    return found


def _encoded(texts: Sequence[str]) -> tuple[NDArray[np.uint8], Places, list[int]]:
    """(UTF-8 of all texts, words separated by single spaces; bounds; words per text); text i is `data[bounds[i]:bounds[i + 1]]`."""
    data = [_worded(text).encode("utf-8", "surrogatepass") for text in texts]
    return np.frombuffer(b"".join(data), np.uint8), np.cumsum([0, *map(len, data)]), [text.count(b" ") + 1 for text in data]


def _worded(text: str) -> str:
    """Separate words. Characters of scripts without spaces are words. A condition becomes part of every word, so that texts under different
    conditions share none."""
    body, _, condition = text.partition(CONDITION)
    words = body if body.isascii() else " ".join(_cjk.sub(r" \1 ", body).split())
    return " ".join(f"{word}{CONDITION}{condition}" for word in words.split(" ")) if condition else words


# --- compiled ----------------------------------------------------------------------------------------------------------


@compiled
def _mixed(value):  # copied from data/contamination/matching.py: machine code is cached by its own file's content
    """A bijection with full avalanche."""
    value = (value ^ (value >> HALF)) * BASE
    value = (value ^ (value >> HALF)) * SPREAD
    return value ^ (value >> HALF)


@compiled
def _shingles(data, begin, end, size, words, found):
    """Fill `found` with the hashes of a text's shingles; returns their number. `words` is a buffer for hashes of words (FNV-1a)."""
    count, value = 0, START
    for at in range(begin, end):
        if data[at] == SPACE:
            words[count] = _mixed(value)
            count, value = count + 1, START
        else:
            value = (value ^ np.uint64(data[at])) * PRIME
    words[count] = _mixed(value)
    count += 1
    length = min(size, count)
    for first in range(count - length + 1):
        value = NONE
        for place in range(first, first + length):
            value = value * BASE + words[place]
        found[first] = _mixed(value)
    return count - length + 1


@compiled
def _bands(data, bounds, words, size, length, factors, terms, found):
    """Fill `found` as in `bands`, with `length` permutations per band."""
    shingles, least = np.empty_like(words), np.empty(BANDS * length, np.uint32)
    for text in range(len(found)):
        least[:] = MOST
        for number in range(_shingles(data, bounds[text], bounds[text + 1], size, words, shingles)):
            shingle = np.uint32(shingles[number] >> HALF)
            for one in range(len(least)):
                least[one] = min(least[one], np.uint32(shingle * factors[one] + terms[one]))
        for band in range(BANDS):
            value = np.uint64(band)
            for one in range(band * length, (band + 1) * length):
                value = _mixed(value + np.uint64(least[one]))
            found[text, band] = np.uint32(value >> HALF)


@compiled
def _note(data, bounds, words, size, shingles, ends):
    """Fill `shingles` with those of all texts, concatenated, and `ends` with the end of each text's."""
    count = 0
    for text in range(len(ends)):
        count += _shingles(data, bounds[text], bounds[text + 1], size, words, shingles[count:])
        ends[text] = count


@compiled
def _compare(sets, starts, pairs, found):
    """Fill `found` as in `similarities`; the set of text i is `sets[starts[i]:starts[i + 1]]`."""
    for pair in range(len(found)):
        one, other = pairs[0, pair], pairs[1, pair]
        found[pair] = _jaccard(sets[starts[one] : starts[one + 1]], sets[starts[other] : starts[other + 1]])


@compiled
def _jaccard(one, other):
    """|A ∩ B| / |A ∪ B| of two ascending lists of distinct numbers."""
    at, where, shared = 0, 0, 0
    while at < len(one) and where < len(other):
        low, high = one[at] <= other[where], other[where] <= one[at]
        shared += low and high
        at += low
        where += high
    return shared / (len(one) + len(other) - shared)


# --- clusters ----------------------------------------------------------------------------------------------------------


class Near(NamedTuple):
    """Why a row is a near duplicate."""

    kept: int
    """The first row of its cluster."""
    similarity: float
    """Similarity to that row; may be below the threshold if they are connected through others."""
    by: int
    """The row of the cluster with the highest similarity found; the first in case of ties."""
    similarity_by: float
    """Similarity to that row; at least the threshold."""


@dataclass
class Clusters:
    """Union-find over pairs of similar rows."""

    roots: Places
    """Row → first row of its cluster."""
    by: Places
    """Row → most similar row."""
    similarity: Similarities
    """Similarity to that row; 0 for single rows."""

    def join(self, pairs: Places, similarity: Similarities) -> None:
        """Add similar pairs, [2, P]."""
        for one, other, value in zip(*pairs.tolist(), similarity.tolist(), strict=True):
            low, high = sorted((self._root(one), self._root(other)))
            self.roots[high] = low
            for row, partner in ((one, other), (other, one)):
                if (-value, partner) < (-self.similarity[row], self.by[row]):
                    self.by[row], self.similarity[row] = partner, value
        while (self.roots[self.roots] != self.roots).any():
            self.roots = self.roots[self.roots]

    def _root(self, row: int) -> int:
        while self.roots[row] != row:
            row = int(self.roots[row])
        return row


Compare = Callable[[Places], Similarities]
"""Pairs of row indices, [2, P] → similarities, [P]."""


def near(keys: Bands, threshold: float, compare: Compare) -> dict[int, Near]:
    """Near duplicates of an earlier row in their cluster, from the rows' `bands` and the minimum Jaccard index; the order of the rows alone
    decides which row is kept."""
    count = len(keys)
    clusters = Clusters(np.arange(count), np.full(count, count), np.zeros(count))
    refused = np.empty(0, np.int64)
    for earlier, later in chain.from_iterable(map(_proposed, keys.T)):
        apart = clusters.roots[earlier] != clusters.roots[later]
        codes = _others(np.unique(earlier[apart] * count + later[apart]), refused)
        pairs = np.stack(np.divmod(codes, max(count, 1)))
        found = compare(pairs)
        enough = found >= threshold
        clusters.join(pairs[:, enough], found[enough])
        refused = np.insert(refused, np.searchsorted(refused, codes[~enough]), codes[~enough])
    gone = np.flatnonzero(clusters.roots != np.arange(count))
    to_kept = compare(np.stack([clusters.roots[gone], gone]))
    columns = (gone, clusters.roots[gone], to_kept, clusters.by[gone], clusters.similarity[gone])
    return {place: Near(*more) for place, *more in zip(*(column.tolist() for column in columns), strict=True)}


def _others(codes: Places, known: Places) -> Places:
    """`codes` without the `known` ones; both ascending."""
    if not len(known):
        return codes
    return codes[known[np.minimum(np.searchsorted(known, codes), len(known) - 1)] != codes]


def _proposed(band: NDArray[np.uint32]) -> Iterator[tuple[Places, Places]]:
    """Yield candidate pairs (earlier rows, later rows) with equal values: first each row with the first of its run, which finds most
    duplicates; then each row with the `NEARBY` rows before it."""
    order = np.argsort(band, kind="stable")
    ranked, places = band[order], np.arange(len(band))
    begins = np.searchsorted(ranked, ranked)  # start of the run of equal values
    later = begins < places
    yield order[begins[later]], order[later]
    befores = [(places - step)[places - step > begins] for step in range(1, NEARBY + 1)]
    afters = [before + step for step, before in enumerate(befores, start=1)]
    yield order[np.concatenate(befores)], order[np.concatenate(afters)]


def comparing(texts: Callable[[Places], Sequence[str]], size: int, workers: int) -> Compare:
    """A comparison that reads texts again (row indices → folded texts), `PAIRS` pairs at a time, in up to `workers` processes if there are
    many; `size` is the number of words per shingle."""

    def compared(pairs: Places) -> Similarities:
        rows, numbers = np.unique(pairs, return_inverse=True)
        return similarities(texts(rows), size, numbers.reshape(pairs.shape))

    def compare(pairs: Places) -> Similarities:
        parts = [pairs[:, start : start + PAIRS] for start in range(0, pairs.shape[1], PAIRS)]
        return np.concatenate([np.empty(0), *mapped(compared, parts, workers if len(parts) > FEW else 1)])

    return compare


def evidence(found: Near, threshold: float, kept: str, by: str) -> str:
    """Evidence text: the row's similarity to the row with the id `kept`, which names the cluster."""
    text = f"{found.similarity:.3f} like {kept}"
    return text if found.similarity >= threshold else f"{text}, by way of {by}: {found.similarity_by:.3f}"
