"""What texts are about, as vectors: the mean of fixed vectors of their tokens, WordLlama's, and which texts of some are nearest to another.

A text that says the same in other words has another vector by little. Word order is lost, and a long text is about many things: what is
found are whole turns that say what an item says.

Vectors are of whole numbers and about 4,080 long, so that every sum on the way to the product of two is below 2²⁴ and exact in float32:
a similarity is the same for any library, block, number of threads and machine.
"""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from configs.base.packaged import EMBEDDER
from data.artifacts import assets

Vectors = NDArray[np.float32]
Places = NDArray[np.int64]

LENGTH = 4080.0
"""Of a vector; 256 numbers that are rounded make it longer by 8 at most: (4080 + 8)² < 2²⁴."""
PIECE = 4096
"""Tokens whose vectors are added at once."""
BLOCK = 256
"""Texts that are compared with all others at once."""


class Embedder:
    """Vectors of texts. May be shared with forked processes."""

    def __init__(self) -> None:
        """Loads tokenizer and vectors.

        Raises:
            AssetError: they are not on this machine.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are forked after this one has used it, and its threads are not
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(assets.path(EMBEDDER["tokenizer"])))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        (table,) = load_file(assets.path(EMBEDDER["vectors"])).values()
        self._table = table.astype(np.float32)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """One of each text, [N, 256]; zeros of one without a token."""
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
    """Of each vector: the numbers of its K nearest others, the nearest first and the first of equally near ones, and their cosines, [N, K]
    both; K is `most`, or all that there are."""
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
