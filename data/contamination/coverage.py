"""Exact n-gram coverage of benchmark items by training rows.

As in Tülu 3 (Lambert et al. 2024, arXiv 2411.15124, §3.2), an item's score with a row is the share of the item's tokens in n-grams that
the row also has. Of an item, only the question counts (without a form, the user's turns), not instructions and worked examples, which
many items share; of a row, all configured turns count. Both sides are normalized alike (`data/contamination/reading.py`). An item's turn
shorter than n tokens is one n-gram; every occurrence of a repeated n-gram counts; nothing is capped.

Comparisons may be abstracted, treating all names as equal and all numbers, and may correct words with one wrong letter to the item's
(`data/contamination/spelling.py`) if the row otherwise covers at least half of the threshold, but not all of it.

Overlaps may be doubtful as evidence of copying: words that the item repeats and the row does not, short items in longer texts, and words
common to many items.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.chat.tools import texts_called, texts_offered
from pedigree.data.contamination.reading import ASCII_OPERATORS, NAME, NUMBER, readings
from pedigree.data.contamination.spelling import Vocabulary, corrected
from pedigree.data.records.messages import CALL, RESULT, user_turns
from pedigree.data.records.records import hints_of, texts_within

Gram = tuple[bytes, ...]
Benchmarks = Mapping[str, Sequence[dict[str, Any]]]
"""Label → items."""
OF_TURNS = {CALL: "assistant", RESULT: "user"}
"""Role of calls and results → role with which they are searched."""
Common = Mapping[str, Set[Gram]]
"""Label → n-grams common to many of its items."""
BELOW, FEWER, SHORT, COMMON, ALIKE = "below the threshold", "said less often", "short item", "common words", "only alike"
"""The doubts."""
Way = Literal["words", "cut short", "abstracted", "embedded", "rephrased"]
"""How an overlap was found: word by word, word by word for a part of the item, ignoring names and numbers, by embeddings, or by a language
model."""


@dataclass(frozen=True)
class Overlap:
    """A benchmark item that shares text or meaning with a training row."""

    benchmark: str
    item: dict[str, Any]
    score: float
    """Share of the item's tokens in shared n-grams, (0, 1]; for embeddings, the cosine."""
    matched: str
    """The item's shared parts as normalized, with `…` for differences; for embeddings, the row's text."""
    way: Way = "words"
    own: float = 0.0
    """The same share among tokens in no common n-gram."""
    tokens: int = 0
    """Tokens of the item."""
    word_share: float = 1.0
    """For abstracted comparisons: share of the item's ordinary words, with multiplicity, that the row has."""
    doubt: str = ""
    """Why it is no evidence of a copy; empty if it is."""


@dataclass(frozen=True)
class _Item:
    """One reading of a benchmark item."""

    benchmark: str
    row: dict[str, Any]
    tokens: Gram
    """Tokens of all turns, concatenated."""
    own: int
    """Bit mask of the tokens in no common n-gram; bit i is token i."""


class Coverage:
    """Index of all n-grams of benchmark items with all their occurrences."""

    def __init__(self, benchmarks: Benchmarks, ngram: int, abstracted: bool = False, common: Common | None = None) -> None:
        """Index the questions of `benchmarks` with n-grams of up to `ngram` tokens.

        Args:
            benchmarks: label → items.
            ngram: longest n-gram, in tokens.
            abstracted: treats all names as equal, and all numbers.
            common: label → n-grams common to many of its items.

        Raises:
            PedigreeError: an item has no word or number, so that nothing could ever match it.
        """
        self._ngram, self._abstracted, self._common = ngram, abstracted, common or {}
        self._way: Way = "abstracted" if abstracted else "words"
        self._items: list[_Item] = []
        self._named: dict[tuple[str, str], list[_Item]] = defaultdict(list)
        """(label, id) → its readings."""
        self._places: dict[Gram, dict[int, int]] = defaultdict(dict)
        self._singles: set[bytes] = set()
        """N-grams of one token."""
        self._lengths: dict[Gram, set[int]] = defaultdict(set)
        """First two tokens → lengths of n-grams that begin with them."""
        self._known: dict[tuple[frozenset[Gram], float], list[Overlap]] = {}
        """Cached comparisons, since many rows share exactly a preamble with the items."""
        for benchmark, rows in benchmarks.items():
            for row in rows:
                self._add(benchmark, row)

    def overlaps(self, texts: Sequence[str], threshold: float, typos: bool = False, least: float | None = None) -> list[Overlap]:
        """The items of which a row's texts cover more than `least`, sorted by coverage, benchmark and id.

        Args:
            texts: texts of its turns.
            threshold: share of an item's tokens above which a row is removed.
            typos: correct words with one wrong letter to the item's, if the row is not removed without it.
            least: share above which an item is reported; by default `threshold`.
        """
        least = threshold if least is None else least
        lines = lines_of(texts, self._abstracted)
        key = frozenset(self._shared(lines)), correction_floor(least) if typos else least
        if key not in self._known:
            self._known[key] = self._compare(*key)
        found = self._known[key]
        ways = readings(texts, self._abstracted) if self._abstracted and found else []
        if self._abstracted:
            found = [_with_word_share(one, ways) for one in found]
        if not typos:
            return found
        vocabulary, better = Vocabulary(lines), []
        for one in found:
            if min(one.score, one.own, one.word_share) > threshold:
                better.append(one)
            elif self._upper_bound(one, vocabulary) > least:
                better.append(self._corrected(one, lines, ways))
        return ordered(one for one in better if one.score > least)

    def share_of(self, text: str) -> float:
        """Share of a turn's tokens that are in n-grams of the items, in the reading with the largest share."""
        shares = [0.0]
        for turn in filter(None, tokens_of(lines_of([text], self._abstracted))):
            places = {place for start, gram in self._grams_in(turn) for place in range(start, start + len(gram))}
            shares.append(len(places) / len(turn))
        return max(shares)

    def _upper_bound(self, overlap: Overlap, vocabulary: Vocabulary) -> float:
        """Upper bound on coverage after correction: share of the item's tokens that the row has, or may have after correction."""
        readings = (item.tokens for item in self._named[overlap.benchmark, overlap.item["id"]])
        return max(sum(map(vocabulary.perhaps, tokens)) / len(tokens) for tokens in readings)

    def _corrected(self, overlap: Overlap, lines: Sequence[bytes], ways: Sequence[Sequence[bytes]]) -> Overlap:
        """The overlap after correcting words with one wrong letter to the item's; `lines` are the row's texts in all their readings, `ways`
        the joint readings of all texts."""
        item = Coverage({overlap.benchmark: [overlap.item]}, self._ngram, self._abstracted, self._common)
        words = {token for one in item._items for token in one.tokens}
        (found,) = item._compare(item._shared(corrected(lines, words)), 0)
        return _with_word_share(found, [corrected(way, words) for way in ways])

    def _compare(self, shared: Set[Gram], threshold: float) -> list[Overlap]:
        covered: dict[int, int] = {}
        for gram in shared:
            for number, places in self._places[gram].items():
                covered[number] = covered.get(number, 0) | places
        best: dict[tuple[str, str], Overlap] = {}
        for number, places in sorted(covered.items()):
            item = self._items[number]
            score = places.bit_count() / len(item.tokens)
            name = (item.benchmark, item.row["id"])
            if score > threshold and (name not in best or score > best[name].score):
                own = (places & item.own).bit_count() / max(1, item.own.bit_count())
                stretches = _matched_text(item.tokens, places)
                best[name] = Overlap(item.benchmark, item.row, score, stretches, self._way, own, len(item.tokens))
        return ordered(best.values())

    def _add(self, benchmark: str, row: dict[str, Any]) -> None:
        common = self._common.get(benchmark, frozenset())
        for turns in map(tokens_of, item_readings(benchmark, row, self._abstracted)):
            every = tuple(token for turn in turns for token in turn)
            number, shared = len(self._items), 0
            for start, gram in grams_of(turns, self._ngram):
                places = ((1 << len(gram)) - 1) << start
                shared |= places if gram in common else 0
                known = self._places[gram]
                known[number] = known.get(number, 0) | places
                if len(gram) == 1:
                    self._singles.add(gram[0])
                else:
                    self._lengths[gram[:2]].add(len(gram))
            self._items.append(_Item(benchmark, row, every, ((1 << len(every)) - 1) & ~shared))
            self._named[benchmark, row["id"]].append(self._items[-1])

    def _shared(self, lines: Sequence[bytes]) -> set[Gram]:
        """The indexed n-grams in the lines."""
        return {gram for line in lines for _, gram in self._grams_in(tuple(line.split()))}

    def _grams_in(self, turn: Gram) -> Iterator[tuple[int, Gram]]:
        """(start, n-gram) of the indexed n-grams in a turn."""
        if not self._singles.isdisjoint(turn):
            yield from ((start, (token,)) for start, token in enumerate(turn) if token in self._singles)
        for start in [start for start, head in enumerate(pairwise(turn)) if head in self._lengths]:
            for length in self._lengths[turn[start : start + 2]]:
                gram = turn[start : start + length]
                if gram in self._places:
                    yield start, gram


def compared(item: Mapping[str, Any]) -> list[str]:
    """A benchmark item's texts for comparison with rows."""
    return [item["question"]] if "question" in item else user_turns(item["messages"])


def searched(row: dict[str, Any], turns: frozenset[str]) -> list[str]:
    """The texts of a row's turns with these roles.

    Calls and a preference's answers count as the assistant's, results and hints as the user's, and template arguments as the system's.
    Calls and tools are searched as JSON and as the strings in it.
    """
    found = [message["content"] for message in row["messages"] if OF_TURNS.get(message["role"], message["role"]) in turns]
    found += texts_called(row) if "assistant" in turns else ()
    found += hints_of(row) if "user" in turns else ()
    found += (*texts_within(row.get("template_arguments")), *texts_offered(row)) if "system" in turns else ()
    return found + [answer["text"] for answer in row.get("answers", ())] if "assistant" in turns else found


def item_readings(benchmark: str, item: Mapping[str, Any], abstracted: bool) -> list[list[bytes]]:
    """All readings of an item's compared turns. Raises PedigreeError if one has no word or number, so nothing can match it."""
    found = readings(compared(item), abstracted)
    if not all(any(map(bytes.strip, lines)) for lines in found):
        raise PedigreeError(f"item {item['id']} of {benchmark} has no word or number: no training row can be compared with it")
    return found


def tokens_of(lines: Sequence[bytes]) -> list[Gram]:
    return [tuple(line.split()) for line in lines]


def turns_of(item: Mapping[str, Any], abstracted: bool) -> list[list[Gram]]:
    """The tokens of an item's compared turns, in each of its readings."""
    return list(map(tokens_of, readings(compared(item), abstracted)))


def grams_of(turns: Sequence[Gram], ngram: int) -> Iterator[tuple[int, Gram]]:
    """(position of the first token, n-gram) of an item's turns; a shorter turn is one n-gram."""
    start = 0
    for turn in turns:
        length = min(ngram, len(turn))
        for offset in range(len(turn) - length + 1 if turn else 0):
            yield start + offset, turn[offset : offset + length]
        start += len(turn)


def correction_floor(threshold: float) -> float:
    """Share of an item that a row must cover before correction, for correction to be tried."""
    return threshold / 2


def lines_of(texts: Sequence[str], abstracted: bool) -> list[bytes]:
    """Each text in all its readings."""
    return [line for text in texts for (line,) in readings([text], abstracted)]


def ordered(overlaps: Iterable[Overlap]) -> list[Overlap]:
    """Overlaps sorted by coverage (descending), benchmark and id."""
    return sorted(overlaps, key=lambda overlap: (-overlap.score, overlap.benchmark, overlap.item["id"]))


def _with_word_share(overlap: Overlap, ways: Sequence[Sequence[bytes]]) -> Overlap:
    """The overlap with `word_share` computed for abstracted comparisons, where one sentence of the row may cover several similar ones of
    the item."""
    if overlap.way != "abstracted":
        return overlap
    rows = [Counter(token for line in way for token in line.split()) for way in ways]
    share = max(_word_share(row, turns) for row in rows for turns in turns_of(overlap.item, abstracted=True))
    return replace(overlap, word_share=share)


def _word_share(row: Counter[bytes], turns: Sequence[Gram]) -> float:
    words = Counter(token for turn in turns for token in turn if token not in (NAME, NUMBER))
    return (words & row).total() / max(1, words.total())


def _matched_text(item: Gram, places: int) -> str:
    """The covered tokens (bit i of `places` is token i), with one `…` per uncovered run."""
    shown = [token.decode() if places >> position & 1 else "…" for position, token in enumerate(item)]
    return " ".join(token for position, token in enumerate(shown) if token != "…" or position == 0 or shown[position - 1] != "…")


# --- doubts ------------------------------------------------------------------------------------------------------------


def common_grams(benchmarks: Benchmarks, ngram: int, abstracted: bool, many: int) -> Common:
    """Label → n-grams that occur in at least `many` of its items, such as `which of the following statements is correct`."""
    return {label: frozenset(_common(rows, ngram, abstracted, many)) for label, rows in benchmarks.items()}


def _common(items: Sequence[Mapping[str, Any]], ngram: int, abstracted: bool, many: int) -> Iterator[Gram]:
    """Count 8-byte hashes first, then only the n-grams whose hash is frequent enough."""
    hashes = np.array([hash(gram) for item in items for gram in _different(item, ngram, abstracted)], np.int64)
    known, counts = np.unique(hashes, return_counts=True)
    often = set(known[counts >= many].tolist())
    held = Counter(gram for item in items for gram in _different(item, ngram, abstracted) if hash(gram) in often)
    return (gram for gram, count in held.items() if count >= many)


def _different(item: Mapping[str, Any], ngram: int, abstracted: bool) -> set[Gram]:
    return {gram for turns in turns_of(item, abstracted) for _, gram in grams_of(turns, ngram)}


def ordinary_words(item: Mapping[str, Any]) -> int:
    """Number of distinct words of an item as written, without names and numbers."""
    (turns, *_) = readings(compared(item), abstracted=True)
    return len({token for turn in turns for token in turn.split() if token not in (NAME, NUMBER) and token not in ASCII_OPERATORS})


def fewest_tokens(text: str, abstracted: bool) -> int:
    """Number of tokens of a text in its shortest reading."""
    return min(len(line.split()) for line in lines_of([text], abstracted))
