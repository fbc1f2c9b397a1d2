"""Text embeddings, the mean of WordLlama's static token vectors, and nearest-neighbor search.

Paraphrases have similar vectors. Word order is ignored, and long texts mix topics, so the method finds whole turns that paraphrase an item.

Vectors have integer components and length of about 4,080, so that all partial sums of a dot product are below 2²⁴ and exact in float32:
similarities do not depend on library, block size, threads or machine.
"""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pedigree.configs.base.packaged import EMBEDDER
from pedigree.data.artifacts import assets

Vectors = NDArray[np.float32]
Places = NDArray[np.int64]

LENGTH = 4080.0
"""Vector length; rounding 256 components adds at most 8: (4080 + 8)² < 2²⁴."""
PIECE = 4096
"""Token vectors summed at a time."""
BLOCK = 256
"""Texts compared with all others at a time."""


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
