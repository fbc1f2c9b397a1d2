"""Detect paraphrases of benchmark items in training rows, by text embeddings of their turns: the mean of WordLlama's static token vectors,
and nearest-neighbor search.

Paraphrases have similar vectors. Word order is ignored, and long texts mix topics, so the method finds whole turns that paraphrase an item.

Vectors have integer components and length of about 4,080, so that all partial sums of a dot product are below 2²⁴ and exact in float32:
similarities do not depend on library, block size, threads or machine.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pedigree.configs.base.packaged import EMBEDDER
from pedigree.configs.rows.overlap_criteria import Embedded, Waiver
from pedigree.data.artifacts import assets
from pedigree.data.contamination.coverage import ALIKE, Benchmarks, Overlap, compared, searched

Vectors = NDArray[np.float32]
Places = NDArray[np.int64]

LENGTH = 4080.0
"""Vector length; rounding 256 components adds at most 8: (4080 + 8)² < 2²⁴."""
PIECE = 4096
"""Token vectors summed at a time."""
BLOCK = 256
"""Texts compared with all others at a time."""
SHOWN = 300
"""Characters of a turn that are reported."""


class Embedder:
    """Embeds texts. Safe to share with forked processes."""

    def __init__(self) -> None:
        """Load tokenizer and vectors.

        Raises:
            PedigreeError: they are not on this machine.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(assets.path(EMBEDDER["tokenizer"])))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        (table,) = load_file(assets.path(EMBEDDER["vectors"])).values()
        self._table = table.astype(np.float32)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Vectors of texts, [N, 256]; zeros for a text without tokens."""
        found = np.zeros((len(texts), self._table.shape[1]), np.float32)
        encoded = self._tokenizer.encode_batch_fast([text.encode("utf-8", "replace").decode() for text in texts], add_special_tokens=False)
        for row, one in zip(found, encoded, strict=True):
            row[:] = self._vector(np.array(one.ids, np.int64))
        return found

    def _vector(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        total = np.zeros(self._table.shape[1], np.float64)
        for start in range(0, len(ids), PIECE):
            total += self._table[ids[start : start + PIECE]].sum(axis=0, dtype=np.float64)
        length = np.sqrt((total * total).sum())
        return np.rint(total * (LENGTH / length)) if length else total


def nearest(vectors_ND: Vectors, others_MD: Vectors, most: int = 1) -> tuple[Places, NDArray[np.float64]]:
    """(indices, cosines) of each vector's K nearest others, nearest first and lowest index first for ties, both [N, K]; K is `most`, or
    fewer if there are fewer."""
    shape = len(vectors_ND), min(most, len(others_MD))
    numbers_NK, cosines_NK = np.zeros(shape, np.int64), np.zeros(shape)
    for start in range(0, len(vectors_ND), BLOCK):
        products = vectors_ND[start : start + BLOCK] @ others_MD.T
        each, block = np.arange(len(products)), slice(start, start + BLOCK)
        for rank in range(shape[1]):
            best = products.argmax(axis=1)
            numbers_NK[block, rank] = best
            cosines_NK[block, rank] = products[each, best].astype(np.float64) / LENGTH**2
            products[each, best] = -np.inf
    return numbers_NK, cosines_NK


class VectorMatch(NamedTuple):
    """A text and the nearest turn of a row."""

    text: int
    """Index of the text."""
    cosine: float
    turn: int
    """Index of the nearest turn in the row; the first in case of ties."""


class VectorIndex:
    """Index of text embeddings to compare rows with. Safe to share with forked processes."""

    def __init__(self, texts: Sequence[str], separate: Sequence[bool], threshold: float, most: int) -> None:
        """Embed the texts of benchmark items.

        Args:
            separate: whether a text is searched separately, so that it does not hide others.
            threshold: minimum reported cosine.
            most: maximum texts reported per row, and again for the separate ones.

        Raises:
            PedigreeError: the embedder is not on this machine.
        """
        self._embedder, self._threshold, self._most = Embedder(), threshold, most
        self._tables: list[tuple[Places, Vectors]] = []
        for side in (False, True):
            mine = [text for text, own in zip(texts, separate, strict=True) if own == side]
            if mine:
                self._tables.append((np.flatnonzero(np.array(separate) == side), self._embedder.vectors(mine)))

    def of(self, rows: Sequence[Sequence[str]]) -> list[list[VectorMatch]]:
        """For each row, given by its turns, the texts nearest to any turn: nearest first, ties by turn, then by index; the separate texts
        last."""
        vectors, ends = self._embedder.vectors([turn for row in rows for turn in row]), np.cumsum([len(row) for row in rows])
        found: list[list[VectorMatch]] = [[] for _ in rows]
        for numbers, table in self._tables:
            places_NK, cosines_NK = nearest(vectors, table, self._most)
            like: dict[int, list[VectorMatch]] = {}
            for at, rank in np.argwhere(cosines_NK >= self._threshold).tolist():
                row = int(np.searchsorted(ends, at, side="right"))
                text = int(numbers[places_NK[at, rank]])
                like.setdefault(row, []).append(VectorMatch(text, float(cosines_NK[at, rank]), at - int(ends[row]) + len(rows[row])))
            for row, some in like.items():
                best: dict[int, VectorMatch] = {}  # each text once, with its nearest turn
                for one in sorted(some, key=lambda one: (-one.cosine, one.turn, one.text)):
                    best.setdefault(one.text, one)
                found[row] += list(best.values())[: self._most]
        return found


class Paraphrases:
    """Index of benchmark item embeddings to compare rows with. Safe to share with forked processes."""

    def __init__(self, benchmarks: Benchmarks, config: Embedded, turns: Sequence[str], waivers: Sequence[Waiver] = ()) -> None:
        """Embed the questions of `benchmarks` (label → items); waived items are searched separately, so that they do not hide others.

        Raises:
            PedigreeError: the embedder is not on this machine.
        """
        self._items = [(label, item) for label, items in benchmarks.items() for item in items]
        self._turns, self._doubt = frozenset(turns), "" if config.remove else ALIKE
        waived = [any(one.covers(label, item["id"]) for one in waivers) for label, item in self._items]
        self._likeness = VectorIndex([question(item) for _, item in self._items], waived, config.threshold, most=1)

    def of(self, rows: Sequence[dict[str, Any]]) -> list[list[Overlap]]:
        """For each row, the item nearest to any of its turns, and the nearest waived item, with a cosine of at least `threshold`."""
        texts = [searched(row, self._turns) for row in rows]
        return [[self._overlap(like, row) for like in some] for some, row in zip(self._likeness.of(texts), texts, strict=True)]

    def _overlap(self, like: VectorMatch, turns: Sequence[str]) -> Overlap:
        return Overlap(*self._items[like.text], like.cosine, turns[like.turn][:SHOWN], "embedded", doubt=self._doubt)


def question(item: dict[str, Any]) -> str:
    """A benchmark item's text for comparison with turns."""
    return "\n".join(compared(item))
