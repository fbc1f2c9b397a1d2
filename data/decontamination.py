"""Which training rows share text with which benchmark items.

A compiled pass (`data/matching.py`) says which n-grams of which items a row may hold, arithmetic how much of each item they could cover
at most, and the exact comparison (`data/coverage.py`), of what is left, how much they do. So the compiled pass changes no verdict: what
hashes have in common by chance makes it find too much, never too little.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from data.coverage import Benchmarks, Coverage, Overlap, compared, searched
from data.messages import ROLES

if TYPE_CHECKING:
    from data.candidates import Candidates

LITTLE = 6 << 20
"""Characters that are compared word by word before machine code is loaded: that takes as long."""
FEW = 1 << 20
"""Characters of benchmark items of which all n-grams may stand in a dictionary."""
REMEMBERED = 4
"""Sets of items whose n-grams are kept: one is wanted again where many rows and items begin alike."""


class Index:
    """Benchmark items, to compare rows with. May be shared with forked processes."""

    def __init__(self, benchmarks: Benchmarks, ngram: int, turns: Sequence[str] = ROLES) -> None:
        """Indexes the questions of `benchmarks` (label → items).

        Args:
            benchmarks: label → items.
            ngram: longest n-gram, in tokens.
            turns: roles of the turns of a row that are searched; the answers of a preference are the assistant's.

        Raises:
            NoText: an item has no word, number or operator, so that nothing could ever match it.
        """
        self._benchmarks, self._ngram, self._turns = benchmarks, ngram, frozenset(turns)
        self._candidates: Candidates | None = None
        self._coverages: OrderedDict[tuple[int, ...], Coverage] = OrderedDict()
        self._read = 0
        """Characters compared word by word."""
        self._all: Coverage | None = None
        """Of all items, while rows are few."""
        if sum(len(text) for rows in benchmarks.values() for row in rows for text in compared(row)) > FEW:
            self.compile()
        else:
            self._all = Coverage(benchmarks, ngram)

    def compile(self) -> None:
        """Makes ready for many rows; otherwise done when many have been compared. No result depends on it."""
        if self._candidates is None:
            from data.candidates import Candidates  # loads numba

            self._candidates = Candidates(self._benchmarks, self._ngram)
            self._candidates.of([compared(row) for rows in self._benchmarks.values() for row in rows[:1]], 0.0)  # loads the rest of it
            self._all = None

    def overlaps(self, rows: Sequence[dict[str, Any]], threshold: float) -> list[list[Overlap]]:
        """For each row the items of which it covers more than `threshold`; the most covered first, then by benchmark and id."""
        texts = [searched(row, self._turns) for row in rows]
        if self._all is not None:
            self._read += sum(len(text) for row in texts for text in row)
            if self._read <= LITTLE:
                return [self._all.overlaps(row, threshold) for row in texts]
            self.compile()
        assert self._candidates is not None
        near = self._candidates.of(texts, threshold)
        return [self._coverage(near[number]).overlaps(row, threshold) if number in near else [] for number, row in enumerate(texts)]

    def _coverage(self, items: tuple[int, ...]) -> Coverage:
        """Of these items alone."""
        assert self._candidates is not None
        if items not in self._coverages:
            some: dict[str, list[dict[str, Any]]] = {}
            for label, row in (self._candidates.items[number] for number in items):
                some.setdefault(label, []).append(row)
            self._coverages[items] = Coverage(some, self._ngram)
            if len(self._coverages) > REMEMBERED:
                self._coverages.popitem(last=False)
        self._coverages.move_to_end(items)
        return self._coverages[items]
