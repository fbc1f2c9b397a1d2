"""Which training rows say what a benchmark item says, in whatever words: by vectors of their turns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.rows.decontamination import Embedded, Waiver
from data.contamination.coverage import Benchmarks, Overlap, compared, searched
from data.contamination.embedding import Embedder, Places, Vectors, nearest
from data.contamination.evidence import ALIKE

SHOWN = 300
"""Characters of a turn that are told."""


class Like(NamedTuple):
    """A turn of a row, and a text that it is like."""

    text: int
    """Number of the text."""
    cosine: float
    turn: int
    """Number of the turn among those of the row: the nearest, the first of equally near ones."""


class Likeness:
    """Texts by their vectors, to compare rows with. May be shared with forked processes."""

    def __init__(self, texts: Sequence[str], apart: Sequence[bool], threshold: float, most: int) -> None:
        """Embeds the texts.

        Args:
            texts: of benchmark items.
            apart: which of them are compared with by themselves, so that none hides another.
            threshold: least cosine that is told.
            most: texts that are told of a row, and so many of those that lie apart.

        Raises:
            AssetError: the embedder is not on this machine.
        """
        self._embedder, self._threshold, self._most = Embedder(), threshold, most
        self._tables: list[tuple[Places, Vectors]] = []
        for side in (False, True):
            mine = [text for text, own in zip(texts, apart, strict=True) if own == side]
            if mine:
                self._tables.append((np.flatnonzero(np.array(apart) == side), self._embedder.vectors(mine)))

    def of(self, rows: Sequence[Sequence[str]]) -> list[list[Like]]:
        """For each row, by its turns, the texts that any of them is nearest to, the nearest first, equally near ones as the turns stand
        there and then by number; after these the ones that lie apart."""
        vectors, ends = self._embedder.vectors([turn for row in rows for turn in row]), np.cumsum([len(row) for row in rows])
        found: list[list[Like]] = [[] for _ in rows]
        for numbers, table in self._tables:
            places_NK, cosines_NK = nearest(vectors, table, self._most)
            like: dict[int, list[Like]] = {}
            for at, rank in np.argwhere(cosines_NK >= self._threshold).tolist():
                row = int(np.searchsorted(ends, at, side="right"))
                text = int(numbers[places_NK[at, rank]])
                like.setdefault(row, []).append(Like(text, float(cosines_NK[at, rank]), at - int(ends[row]) + len(rows[row])))
            for row, some in like.items():
                found[row] += _first_of_each(some)[: self._most]
        return found


def _first_of_each(like: Sequence[Like]) -> list[Like]:
    """Each text once, with its nearest turn."""
    best: dict[int, Like] = {}
    for one in sorted(like, key=lambda one: (-one.cosine, one.turn, one.text)):
        best.setdefault(one.text, one)
    return list(best.values())


class Paraphrases:
    """Benchmark items by their vectors, to compare rows with. May be shared with forked processes."""

    def __init__(self, benchmarks: Benchmarks, config: Embedded, turns: Sequence[str], waivers: Sequence[Waiver] = ()) -> None:
        """Embeds the questions of `benchmarks` (label → items); those that are waived lie apart, so that none hides another.

        Raises:
            AssetError: the embedder is not on this machine.
        """
        self._items = [(label, item) for label, items in benchmarks.items() for item in items]
        self._turns, self._doubt = frozenset(turns), "" if config.remove else ALIKE
        waived = [any(one.covers(label, item["id"]) for one in waivers) for label, item in self._items]
        self._likeness = Likeness([question(item) for _, item in self._items], waived, config.threshold, most=1)

    def of(self, rows: Sequence[dict[str, Any]]) -> list[list[Overlap]]:
        """For each row the item that is nearest to any of its turns, and the nearest one that is waived, of those that are at least as near
        as `threshold`."""
        texts = [searched(row, self._turns) for row in rows]
        return [[self._overlap(like, row) for like in some] for some, row in zip(self._likeness.of(texts), texts, strict=True)]

    def _overlap(self, like: Like, turns: Sequence[str]) -> Overlap:
        label, item = self._items[like.text]
        return Overlap(label, item, like.cosine, turns[like.turn][:SHOWN], "embedded", doubt=self._doubt)


def question(item: dict[str, Any]) -> str:
    """The text of a benchmark item that turns are compared with."""
    return "\n".join(compared(item))
