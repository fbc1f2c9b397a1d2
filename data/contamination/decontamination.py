"""Find overlaps between training rows and benchmark items.

A compiled pass (`data/contamination/matching.py`) finds items' n-grams in rows, an upper bound on coverage selects candidates, and an exact
comparison (`data/contamination/coverage.py`) decides. The compiled pass does not change verdicts: hash collisions can only add candidates.

Texts are compared word by word, and optionally with all names and all numbers treated as equal; rows without a copy are optionally compared
by embeddings (`data/contamination/paraphrases.py`). Overlaps that are no evidence of a copy are reported with the doubt.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pedigree.configs.rows.overlap_criteria import CutShort, Decontaminate
from pedigree.data.contamination.coverage import (
    BELOW,
    COMMON,
    FEWER,
    SHORT,
    Benchmarks,
    Common,
    Coverage,
    Overlap,
    common_grams,
    compared,
    correction_floor,
    fewest_tokens,
    ordered,
    ordinary_words,
    searched,
)  # fmt: skip
from pedigree.data.records.messages import ROLES

if TYPE_CHECKING:
    from pedigree.data.contamination.candidates import Candidates

LITTLE = 6 << 20
"""Characters of rows compared word by word before loading machine code, which takes as long."""
FEW = 1 << 20
"""Maximum characters of benchmark items whose n-grams are kept in a dictionary."""
REMEMBERED = 4
"""Size of the cache of candidate sets, which repeat if rows and items share a preamble."""


class Index:
    """Index of benchmark items to compare rows with. Safe to share with forked processes."""

    def __init__(
        self,
        benchmarks: Benchmarks,
        ngram: int,
        turns: Sequence[str] = ROLES,
        abstracted: bool = False,
        typos: bool = False,
        common: Common | None = None,
    ) -> None:
        """Index the questions of `benchmarks` as `Coverage` does; `turns` are the roles of the row's turns to search, with the answers of
        a preference as the assistant's, and with `typos`, words with one wrong letter are corrected to an item's."""
        self._benchmarks, self._ngram, self._turns = benchmarks, ngram, frozenset(turns)
        self._abstracted, self._typos, self._common = abstracted, typos, common
        self._candidates: Candidates | None = None
        self._coverages: OrderedDict[tuple[int, ...], Coverage] = OrderedDict()
        self._read = 0
        """Characters compared word by word so far."""
        self._all: Coverage | None = None
        """Coverage of all items, while there are few rows."""
        if sum(len(text) for rows in benchmarks.values() for row in rows for text in compared(row)) > FEW:
            self.compile()
        else:
            self._all = Coverage(benchmarks, ngram, abstracted, common)

    def compile(self) -> None:
        """Prepare for many rows; otherwise done once many were compared. Does not affect results."""
        if self._candidates is None:
            from pedigree.data.contamination.candidates import Candidates  # imports numba

            self._candidates = Candidates(self._benchmarks, self._ngram, self._abstracted)
            self._candidates.of([compared(row) for rows in self._benchmarks.values() for row in rows[:1]], 0.0)  # loads machine code
            self._all = None

    def overlaps(self, rows: Sequence[dict[str, Any]], threshold: float, least: float | None = None) -> list[list[Overlap]]:
        """For each row, the items of which it covers more than `least`, see `Coverage.overlaps`."""
        least = threshold if least is None else least
        texts = [searched(row, self._turns) for row in rows]
        if self._all is not None:
            self._read += sum(len(text) for row in texts for text in row)
            if self._read <= LITTLE:
                return [self._all.overlaps(row, threshold, self._typos, least) for row in texts]
            self.compile()
        assert self._candidates is not None
        near = self._candidates.of(texts, correction_floor(least) if self._typos else least)
        return [
            self._coverage(near[number]).overlaps(row, threshold, self._typos, least) if number in near else []
            for number, row in enumerate(texts)
        ]

    def _coverage(self, items: tuple[int, ...]) -> Coverage:
        """Coverage of these items alone."""
        assert self._candidates is not None
        if items not in self._coverages:
            some: dict[str, list[dict[str, Any]]] = {}
            for label, row in (self._candidates.items[number] for number in items):
                some.setdefault(label, []).append(row)
            self._coverages[items] = Coverage(some, self._ngram, self._abstracted, self._common)
            if len(self._coverages) > REMEMBERED:
                self._coverages.popitem(last=False)
        self._coverages.move_to_end(items)
        return self._coverages[items]


class Comparison:
    """All configured comparisons of a `decontaminate` stage. Safe to share with forked processes."""

    def __init__(self, benchmarks: Benchmarks, config: Decontaminate) -> None:
        """Index the items of `benchmarks` (label → items).

        Raises:
            PedigreeError: an item has no word or number, so that nothing could ever match it; or embeddings are configured, but not on
                this machine.
        """
        self._paraphrases = None
        if config.embedded is not None:
            from pedigree.data.contamination.paraphrases import Paraphrases  # loads tokenizers

            self._paraphrases = Paraphrases(benchmarks, config.embedded, config.turns, config.waivers)
        self._waivers = config.waivers
        self._ways = [_Way(benchmarks, config, config.ngram, config.threshold, abstracted=False)]
        if config.abstracted:
            words = config.abstracted.words
            eligible = {label: [row for row in rows if ordinary_words(row) >= words] for label, rows in benchmarks.items()}
            if any(eligible.values()):
                self._ways.append(_Way(eligible, config, config.abstracted.ngram, config.abstracted.threshold, abstracted=True))

    def compile(self) -> None:
        """Prepare for many rows; otherwise done once many were compared. Does not affect results."""
        for way in self._ways:
            way.index.compile()

    def overlaps(self, rows: Sequence[dict[str, Any]]) -> list[list[Overlap]]:
        """For each row, its overlapping items, each from the first comparison without a doubt, sorted by coverage, benchmark and id. If all
        of them are doubted or waived, similar items by embedding follow."""
        ways = [way.overlaps(rows) for way in self._ways]
        found = [ways[0][number] if len(ways) == 1 else _first(one[number] for one in ways) for number in range(len(rows))]
        if self._paraphrases is not None:
            left = [number for number, some in enumerate(found) if all(one.doubt or self._is_waived(one) for one in some)]
            for number, like in zip(left, self._paraphrases.of([rows[number] for number in left]), strict=True):
                known = {(one.benchmark, one.item["id"]) for one in found[number] if not one.doubt}
                found[number] += [one for one in like if (one.benchmark, one.item["id"]) not in known]
        return found

    def _is_waived(self, overlap: Overlap) -> bool:
        return any(one.covers(overlap.benchmark, overlap.item["id"]) for one in self._waivers)


class _Way:
    """One comparison: word by word, or abstracted."""

    def __init__(self, benchmarks: Benchmarks, config: Decontaminate, ngram: int, threshold: float, abstracted: bool) -> None:
        common = common_grams(benchmarks, ngram, abstracted, config.common) if config.common else None
        self.index = Index(benchmarks, ngram, config.turns, abstracted, config.typos, common)
        self._config, self._ngram, self._threshold = config, ngram, threshold
        self._cut_short = None if abstracted else config.cut_short

    def overlaps(self, rows: Sequence[dict[str, Any]]) -> list[list[Overlap]]:
        """For each row, the overlaps above the reporting threshold, with their doubts."""
        reported = min(self._config.report or 1, self._threshold)
        least = min(reported, self._cut_short.of_item if self._cut_short else 1)
        found = self.index.overlaps(rows, self._threshold, least)
        judged = [[self._judged(one, row) for one in some] for row, some in zip(rows, found, strict=True)]
        return [[one for one in some if one.doubt != BELOW or one.score > reported] for some in judged]

    def _judged(self, overlap: Overlap, row: dict[str, Any]) -> Overlap:
        cut = self._cut_short
        if overlap.score > self._threshold:
            return replace(overlap, doubt=self._doubt(overlap, row, self._threshold))
        if cut and overlap.score > cut.of_item and self._is_part(overlap, row, cut):
            return replace(overlap, way="cut short", doubt=self._doubt(overlap, row, cut.of_item))
        return replace(overlap, doubt=BELOW)

    def _doubt(self, overlap: Overlap, row: dict[str, Any], threshold: float) -> str:
        short = self._config.short_items
        if overlap.word_share <= threshold:
            return FEWER
        if short and overlap.tokens < short.below and not self._matches_short_turn(overlap, row, overlap.tokens + short.more, threshold):
            return SHORT
        return COMMON if overlap.own <= threshold else ""

    def _matches_short_turn(self, overlap: Overlap, row: dict[str, Any], most: int, threshold: float) -> bool:
        """Whether a single turn of at most `most` tokens overlaps."""
        abstracted = overlap.way == "abstracted"
        item = Coverage({overlap.benchmark: [overlap.item]}, self._ngram, abstracted)
        short = [text for text in searched(row, frozenset(self._config.turns)) if fewest_tokens(text, abstracted) <= most]
        return any(item.overlaps([text], threshold, self._config.typos) for text in short)

    def _is_part(self, overlap: Overlap, row: dict[str, Any], cut: CutShort) -> bool:
        """Whether a single turn contains enough of the item and little else."""
        item = Coverage({overlap.benchmark: [overlap.item]}, self._ngram)
        texts = searched(row, frozenset(self._config.turns))
        return any(item.share_of(text) > cut.of_turn and item.overlaps([text], cut.of_item) for text in texts)


def _first(ways: Iterable[Sequence[Overlap]]) -> list[Overlap]:
    best: dict[tuple[str, str], Overlap] = {}
    for overlap in (one for way in ways for one in way):
        name = overlap.benchmark, overlap.item["id"]
        if name not in best or (best[name].doubt and not overlap.doubt):
            best[name] = overlap
    return ordered(best.values())
