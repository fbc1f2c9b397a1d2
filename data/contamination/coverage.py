"""How much of which benchmark items a training row holds: exact n-gram coverage, word by word.

As in Tülu 3 (Lambert et al. 2024, arXiv 2411.15124, §3.2), an item's score with a row is the share of the item's tokens that lie in n-grams
which the row holds too; of an item its question counts (its user's turns where it has no form), as there, and neither instructions nor
worked examples, which many items share; of a row all turns that are asked for. One reader serves both sides
(`data/contamination/reading.py`); an item's turn that is shorter than n tokens counts as one n-gram of its own length; every place of a
repeated n-gram counts; nothing is capped.

Texts may be compared abstracted as well, all names taken for one and all numbers for another, and with words that have a letter wrong
(`data/contamination/spelling.py`) read as the item's: they are mended where the row covers half of what is asked for without, and not all
of it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from configs.base.problems import PedigreeError
from data.chat.tools import texts_called, texts_offered
from data.contamination.reading import NAME, NUMBER, readings
from data.contamination.spelling import Vocabulary, mended
from data.records.messages import CALL, RESULT, user_turns
from data.records.records import texts_within

Gram = tuple[bytes, ...]
Benchmarks = Mapping[str, Sequence[dict[str, Any]]]
"""Label → items."""
OF_TURNS = {CALL: "assistant", RESULT: "user"}
"""Whose turn calls and results are searched with."""
Common = Mapping[str, Set[Gram]]
"""Label → n-grams that many of its items have."""


Way = Literal["words", "cut short", "abstracted", "embedded", "rephrased"]
"""How an overlap was found: word by word, so and of a part of the item alone, with names and numbers left out of account, by vectors, or as
a language model says."""


class NoText(PedigreeError):
    """A benchmark item that no row can be compared with."""


@dataclass(frozen=True)
class Overlap:
    """A training row and a benchmark item that share text, or say the same."""

    benchmark: str
    item: dict[str, Any]
    score: float
    """Share of the item's tokens in shared n-grams, (0, 1]; of vectors their cosine."""
    matched: str
    """The shared stretches of the item, as they are read; `…` where it differs. Of vectors what the row says."""
    way: Way = "words"
    own: float = 0.0
    """The same share of the tokens that are in no common n-gram."""
    tokens: int = 0
    """Of the item."""
    said: float = 1.0
    """Of one that is abstracted: share of the item's other words that the row says as often as the item does."""
    doubt: str = ""
    """Why it is no evidence of a copy; nothing where it is."""


@dataclass(frozen=True)
class _Item:
    """One reading of a benchmark item."""

    benchmark: str
    row: dict[str, Any]
    tokens: Gram
    """Of all its turns, one after another."""
    own: int
    """Which of them are in no common n-gram: bit i is token i."""


class Coverage:
    """All n-grams of benchmark items, with every place where they stand."""

    def __init__(self, benchmarks: Benchmarks, ngram: int, abstracted: bool = False, common: Common | None = None) -> None:
        """Indexes the questions of `benchmarks` with n-grams of up to `ngram` tokens.

        Args:
            benchmarks: label → items.
            ngram: longest n-gram, in tokens.
            abstracted: takes all names for one, and all numbers for another.
            common: label → n-grams that many of its items have.

        Raises:
            NoText: an item has no word, number or operator, so that nothing could ever match it.
        """
        self._ngram, self._abstracted, self._common = ngram, abstracted, common or {}
        self._way: Way = "abstracted" if abstracted else "words"
        self._items: list[_Item] = []
        self._named: dict[tuple[str, str], list[_Item]] = defaultdict(list)
        """(label, id) → its readings."""
        self._places: dict[Gram, dict[int, int]] = defaultdict(dict)
        self._singles: set[bytes] = set()
        """The n-grams of one token."""
        self._lengths: dict[Gram, set[int]] = defaultdict(set)
        """First two tokens → lengths of the n-grams that begin with them."""
        self._known: dict[tuple[frozenset[Gram], float], list[Overlap]] = {}
        """Comparisons made: rows that share a common preamble with every item share it with each other."""
        for benchmark, rows in benchmarks.items():
            for row in rows:
                self._add(benchmark, row)

    def overlaps(self, texts: Sequence[str], threshold: float, typos: bool = False, least: float | None = None) -> list[Overlap]:
        """The items of which the texts of a row cover more than `least`; the most covered first, then by benchmark and id.

        Args:
            texts: of its turns.
            threshold: share of an item's tokens above which a row is removed.
            typos: whether words with a letter wrong are read as the item's, where the row is not removed without.
            least: share above which an item is told; `threshold` when absent.
        """
        least = threshold if least is None else least
        lines = lines_of(texts, self._abstracted)
        found = self._compared(frozenset(self._shared(lines)), unmended(least) if typos else least)
        ways = readings(texts, self._abstracted) if self._abstracted and found else []
        if self._abstracted:
            found = [_counted(one, ways) for one in found]
        if not typos:
            return found
        said, better = Vocabulary(lines), []
        for one in found:
            if min(one.score, one.own, one.said) > threshold:
                better.append(one)
            elif self._most(one, said) > least:
                better.append(self._mended(one, lines, ways))
        return ordered(one for one in better if one.score > least)

    def share_of(self, text: str) -> float:
        """The other direction: share of the tokens of a turn that are in n-grams of an item, in the reading in which it is largest."""
        return max((len(set(self._places_in(line))) / len(line) for line in self._turns_in(text)), default=0.0)

    def _turns_in(self, text: str) -> list[Gram]:
        return [turn for line in lines_of([text], self._abstracted) if (turn := tuple(line.split()))]

    def _places_in(self, turn: Gram) -> Iterator[int]:
        """Of the tokens that are in an indexed n-gram."""
        for start, gram in self._grams_in(turn):
            yield from range(start, start + len(gram))

    def _most(self, overlap: Overlap, said: Vocabulary) -> float:
        """Share of the item's tokens that the row says at all, or may mean: no more of it can be covered."""
        readings = (item.tokens for item in self._named[overlap.benchmark, overlap.item["id"]])
        return max(sum(map(said.perhaps, tokens)) / len(tokens) for tokens in readings)

    def _mended(self, overlap: Overlap, lines: Sequence[bytes], ways: Sequence[Sequence[bytes]]) -> Overlap:
        """The overlap when words with a letter wrong are read as the item's.

        Args:
            overlap: without that.
            lines: each text of the row in all its readings.
            ways: the different ways to read all of them together.
        """
        item = Coverage({overlap.benchmark: [overlap.item]}, self._ngram, self._abstracted, self._common)
        words = {token for one in item._items for token in one.tokens}
        (found,) = item._compare(item._shared(mended(lines, words)), 0)
        return _counted(found, [mended(way, words) for way in ways])

    def _compared(self, shared: frozenset[Gram], threshold: float) -> list[Overlap]:
        if (shared, threshold) not in self._known:
            self._known[shared, threshold] = self._compare(shared, threshold)
        return self._known[shared, threshold]

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
                stretches = _stretches(item.tokens, places)
                best[name] = Overlap(item.benchmark, item.row, score, stretches, self._way, own, len(item.tokens))
        return ordered(best.values())

    def _add(self, benchmark: str, row: dict[str, Any]) -> None:
        common = self._common.get(benchmark, frozenset())
        for turns in turns_of(row, self._abstracted):
            every = tuple(token for turn in turns for token in turn)
            if not every:
                raise NoText(f"item {row['id']} of {benchmark} has no word or number: no training row can be compared with it")
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
        """The indexed n-grams that stand in one of the lines."""
        return {gram for line in lines for _, gram in self._grams_in(tuple(line.split()))}

    def _grams_in(self, turn: Gram) -> Iterator[tuple[int, Gram]]:
        """The indexed n-grams of a turn, and where they begin."""
        if not self._singles.isdisjoint(turn):
            yield from ((start, (token,)) for start, token in enumerate(turn) if token in self._singles)
        for start in [start for start, head in enumerate(pairwise(turn)) if head in self._lengths]:
            for length in self._lengths[turn[start : start + 2]]:
                gram = turn[start : start + length]
                if gram in self._places:
                    yield start, gram


def compared(item: Mapping[str, Any]) -> list[str]:
    """The texts of a benchmark item that rows are compared with."""
    return [item["question"]] if "question" in item else user_turns(item["messages"])


def searched(row: dict[str, Any], turns: frozenset[str]) -> list[str]:
    """The texts of a row's turns, of these roles; calls and the answers of a preference are the assistant's, results are searched with
    what users ask, and template arguments are part of what the system says. Calls and tools count as the JSON that they are, and text by
    text."""
    found = [message["content"] for message in row["messages"] if OF_TURNS.get(message["role"], message["role"]) in turns]
    found += texts_called(row) if "assistant" in turns else ()
    found += (*texts_within(row.get("template_arguments")), *texts_offered(row)) if "system" in turns else ()
    return found + [answer["text"] for answer in row.get("answers", ())] if "assistant" in turns else found


def turns_of(item: Mapping[str, Any], abstracted: bool) -> list[list[Gram]]:
    """The tokens of the turns of an item that count, in each of its readings."""
    return [[tuple(line.split()) for line in lines] for lines in readings(compared(item), abstracted)]


def grams_of(turns: Sequence[Gram], ngram: int) -> Iterator[tuple[int, Gram]]:
    """The n-grams of the turns of an item, each with the place of its first token; a turn that is shorter is one."""
    start = 0
    for turn in turns:
        length = min(ngram, len(turn))
        for offset in range(len(turn) - length + 1 if turn else 0):
            yield start + offset, turn[offset : offset + length]
        start += len(turn)


def unmended(threshold: float) -> float:
    """Which share of an item a row must cover, words with a letter wrong left as they are, to be mended at all."""
    return threshold / 2


def lines_of(texts: Sequence[str], abstracted: bool) -> list[bytes]:
    """Each text in all its readings."""
    return [line for text in texts for (line,) in readings([text], abstracted)]


def ordered(overlaps: Iterable[Overlap]) -> list[Overlap]:
    """The most covered first, then by benchmark and id."""
    return sorted(overlaps, key=lambda overlap: (-overlap.score, overlap.benchmark, overlap.item["id"]))


def _counted(overlap: Overlap, ways: Sequence[Sequence[bytes]]) -> Overlap:
    """The overlap with `said`, where names and numbers are left out of account. So many sentences are alike then that one of the row may
    cover several of the item."""
    if overlap.way != "abstracted":
        return overlap
    rows = [Counter(token for line in way for token in line.split()) for way in ways]
    said = max(_said(row, turns) for row in rows for turns in turns_of(overlap.item, abstracted=True))
    return replace(overlap, said=said)


def _said(row: Counter[bytes], turns: Sequence[Gram]) -> float:
    words = Counter(token for turn in turns for token in turn if token not in (NAME, NUMBER))
    return (words & row).total() / max(1, words.total())


def _stretches(item: Gram, places: int) -> str:
    """The covered tokens (bit i of `places` is token i), with one `…` for each stretch that is not."""
    shown = [token.decode() if places >> position & 1 else "…" for position, token in enumerate(item)]
    return " ".join(token for position, token in enumerate(shown) if token != "…" or position == 0 or shown[position - 1] != "…")
