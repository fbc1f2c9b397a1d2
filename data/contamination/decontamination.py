"""Which training rows share text with which benchmark items.

A compiled pass (`data/contamination/matching.py`) says which n-grams of which items a row may hold, arithmetic how much of each item they
could cover at most, and the exact comparison (`data/contamination/coverage.py`), of what is left, how much they do. So the compiled pass
changes no verdict: what hashes have in common by chance makes it find too much, never too little.

Texts may be compared twice: word by word, and with all names and all numbers taken for one; and rows in which both find no copy a third
time, by vectors (`data/contamination/paraphrases.py`). What is found and yet no evidence of a copy
(`data/contamination/evidence.py`) is told with the doubt.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from configs.rows.decontamination import Abstracted, CutShort, Decontaminate
from data.contamination.coverage import Benchmarks, Common, Coverage, Overlap, compared, ordered, searched, unmended
from data.contamination.evidence import BELOW, COMMON, FEWER, SHORT, common_grams, fewest_tokens, ordinary_words
from data.records.messages import ROLES

if TYPE_CHECKING:
    from data.contamination.candidates import Candidates
    from data.contamination.paraphrases import Paraphrases  # loads tokenizers

LITTLE = 6 << 20
"""Characters that are compared word by word before machine code is loaded: that takes as long."""
FEW = 1 << 20
"""Characters of benchmark items of which all n-grams may stand in a dictionary."""
REMEMBERED = 4
"""Sets of items whose n-grams are kept: one is wanted again where many rows and items begin alike."""


class Index:
    """Benchmark items, to compare rows with. May be shared with forked processes."""

    def __init__(
        self,
        benchmarks: Benchmarks,
        ngram: int,
        turns: Sequence[str] = ROLES,
        abstracted: bool = False,
        typos: bool = False,
        common: Common | None = None,
    ) -> None:
        """Indexes the questions of `benchmarks` (label → items).

        Args:
            benchmarks: label → items.
            ngram: longest n-gram, in tokens.
            turns: roles of the turns of a row that are searched; the answers of a preference are the assistant's.
            abstracted: takes all names for one, and all numbers for another.
            typos: reads words with a letter wrong as an item's.
            common: label → n-grams that many of its items have.

        Raises:
            NoText: an item has no word, number or operator, so that nothing could ever match it.
        """
        self._benchmarks, self._ngram, self._turns = benchmarks, ngram, frozenset(turns)
        self._abstracted, self._typos, self._common = abstracted, typos, common
        self._candidates: Candidates | None = None
        self._coverages: OrderedDict[tuple[int, ...], Coverage] = OrderedDict()
        self._read = 0
        """Characters compared word by word."""
        self._all: Coverage | None = None
        """Of all items, while rows are few."""
        if sum(len(text) for rows in benchmarks.values() for row in rows for text in compared(row)) > FEW:
            self.compile()
        else:
            self._all = Coverage(benchmarks, ngram, abstracted, common)

    def compile(self) -> None:
        """Makes ready for many rows; otherwise done when many have been compared. No result depends on it."""
        if self._candidates is None:
            from data.contamination.candidates import Candidates  # loads numba

            self._candidates = Candidates(self._benchmarks, self._ngram, self._abstracted)
            self._candidates.of([compared(row) for rows in self._benchmarks.values() for row in rows[:1]], 0.0)  # loads the rest of it
            self._all = None

    def overlaps(self, rows: Sequence[dict[str, Any]], threshold: float, least: float | None = None) -> list[list[Overlap]]:
        """For each row the items of which it covers more than `least`; the most covered first, then by benchmark and id.

        Args:
            rows: to be compared.
            threshold: share of an item's tokens above which a row is removed.
            least: share above which an item is told; `threshold` when absent.
        """
        least = threshold if least is None else least
        texts = [searched(row, self._turns) for row in rows]
        if self._all is not None:
            self._read += sum(len(text) for row in texts for text in row)
            if self._read <= LITTLE:
                return [self._all.overlaps(row, threshold, self._typos, least) for row in texts]
            self.compile()
        assert self._candidates is not None
        near = self._candidates.of(texts, unmended(least) if self._typos else least)
        return [
            self._coverage(near[number]).overlaps(row, threshold, self._typos, least) if number in near else []
            for number, row in enumerate(texts)
        ]

    def _coverage(self, items: tuple[int, ...]) -> Coverage:
        """Of these items alone."""
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
    """All that rows of a `decontaminate` stage are compared with, in each of the ways that it asks for. May be shared with forked
    processes."""

    def __init__(self, benchmarks: Benchmarks, config: Decontaminate) -> None:
        """Indexes the items of `benchmarks` (label → items).

        Raises:
            NoText: an item has no word, number or operator, so that nothing could ever match it.
            AssetError: vectors are asked for, and not on this machine.
        """
        self._paraphrases, self._waivers = _paraphrases(benchmarks, config), config.waivers
        self._ways = [_Way(benchmarks, config, config.ngram, config.threshold, abstracted=False)]
        telling = telling_items(benchmarks, config.abstracted) if config.abstracted else {}
        if config.abstracted and telling:
            self._ways.append(_Way(telling, config, config.abstracted.ngram, config.abstracted.threshold, abstracted=True))

    def compile(self) -> None:
        """Makes ready for many rows; otherwise done when many have been compared. No result depends on it."""
        for way in self._ways:
            way.index.compile()

    def overlaps(self, rows: Sequence[dict[str, Any]]) -> list[list[Overlap]]:
        """For each row the items that it overlaps with, each as the first way has it that has no doubt of it; the most covered first,
        then by benchmark and id. Last come other items that it is like, where none is found without doubt or waiver."""
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


def _paraphrases(benchmarks: Benchmarks, config: Decontaminate) -> "Paraphrases | None":
    if config.embedded is None:
        return None
    from data.contamination.paraphrases import Paraphrases

    return Paraphrases(benchmarks, config.embedded, config.turns, config.waivers)


class _Way:
    """One way of comparing."""

    def __init__(self, benchmarks: Benchmarks, config: Decontaminate, ngram: int, threshold: float, abstracted: bool) -> None:
        common = common_grams(benchmarks, ngram, abstracted, config.common) if config.common else None
        self.index = Index(benchmarks, ngram, config.turns, abstracted, config.typos, common)
        self._config, self._ngram, self._threshold = config, ngram, threshold
        self._cut_short = None if abstracted else config.cut_short

    def overlaps(self, rows: Sequence[dict[str, Any]]) -> list[list[Overlap]]:
        """Of each row, those of which more is covered than is to be told of, with the doubts of them."""
        told = min(self._config.report or 1, self._threshold)
        least = min(told, self._cut_short.of_item if self._cut_short else 1)
        found = self.index.overlaps(rows, self._threshold, least)
        judged = [[self._judged(one, row) for one in some] for row, some in zip(rows, found, strict=True)]
        return [[one for one in some if one.doubt != BELOW or one.score > told] for some in judged]

    def _judged(self, overlap: Overlap, row: dict[str, Any]) -> Overlap:
        cut = self._cut_short
        if overlap.score > self._threshold:
            return replace(overlap, doubt=self._doubt(overlap, row, self._threshold))
        if cut and overlap.score > cut.of_item and self._is_part(overlap, row, cut):
            return replace(overlap, way="cut short", doubt=self._doubt(overlap, row, cut.of_item))
        return replace(overlap, doubt=BELOW)

    def _doubt(self, overlap: Overlap, row: dict[str, Any], threshold: float) -> str:
        short = self._config.short_items
        if overlap.said <= threshold:
            return FEWER
        if short and overlap.tokens < short.below and not self._alone(overlap, row, overlap.tokens + short.more, threshold):
            return SHORT
        return COMMON if overlap.own <= threshold else ""

    def _alone(self, overlap: Overlap, row: dict[str, Any], most: int, threshold: float) -> bool:
        """Whether a turn of so many tokens at most overlaps by itself."""
        abstracted = overlap.way == "abstracted"
        item = Coverage({overlap.benchmark: [overlap.item]}, self._ngram, abstracted)
        brief = [text for text in searched(row, frozenset(self._config.turns)) if fewest_tokens(text, abstracted) <= most]
        return any(item.overlaps([text], threshold, self._config.typos) for text in brief)

    def _is_part(self, overlap: Overlap, row: dict[str, Any], cut: CutShort) -> bool:
        """Whether a turn by itself says so much of the item and little else."""
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


def telling_items(benchmarks: Benchmarks, rule: Abstracted) -> dict[str, list[dict[str, Any]]]:
    """The items that still say something when names and numbers are taken out; labels that have any."""
    found = {label: [row for row in rows if ordinary_words(row) >= rule.words] for label, rows in benchmarks.items()}
    return {label: rows for label, rows in found.items() if rows}
