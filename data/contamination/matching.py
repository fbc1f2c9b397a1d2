"""Which texts hold which n-grams of the benchmark items: a compiled pass over bytes, as fast in one script as in another.

Texts are read as `data/contamination/reading.py` reads them: what a character is read as is asked of it once, and kept in tables by code
point. A token of up to eight bytes is hashed by a bijection of them, a longer one eight at a time; an n-gram by a polynomial of its
tokens', from prefix sums (Karp and Rabin 1987); an open-addressing table behind a filter of bits says which n-gram it is. Two n-grams may
have one hash: what is found is all that is there and, once in a very long time, more. The exact comparison
(`data/contamination/coverage.py`) has the last word.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.contamination.compiled import compiled
from data.contamination.reading import ASCII_OPERATORS, CAPITAL, NAME, NUMBER, NUMBER_WORDS, composes, folded, invisible, unescaped

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int32]
Places = NDArray[np.int64]

LONGEST = 13
"""Most tokens of an n-gram."""
CODES = 0x110000
"""Code points of Unicode."""
KNOWN, INVISIBLE, DIFFERS, COMPOSES = 1, 2, 4, 8
"""What is known of a code point: that it was asked for; that it is not seen; that it looks like another letter; that texts with it are
put together first (NFKC)."""
SEPARATOR, BLANK, OPEN, NOTHING, FOREIGN = range(5)
"""What a byte does that is of no token: ends a word; the same, and an operator may stand before it; an opening bracket; nothing at all
(control characters); begins a character that is not ASCII."""
OPERATOR, WORD = 8, 32
"""From here on: operators, and bytes of words, in small letters."""
ZERO, NINE = b"09"
FIRST, LAST = b"AZ"
ROOM = 4096
"""Bytes, and the tokens in them, that are looked at together."""
LONGEST_FOLD = 64
"""More bytes than a character is read as."""
FILTER_BITS, FEWEST_BITS = 16, 1 << 12
"""Of a filter: per n-gram, and at least."""
HITS, STRANGE = 1 << 14, 1 << 14
"""Room for what a search finds, at first: n-grams, and characters never met before."""

BASE, SPREAD = np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15)
NAMED, NUMBERED = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)
"""The hashes of all names, and of all numbers, where texts are abstracted."""
HALF, NONE, ONE, BYTE = np.uint64(32), np.uint64(0), np.uint64(1), np.uint64(8)
LOW, HIGH, LETTERS = (np.uint64(0x0101010101010101 * byte) for byte in (0x7F, 0x80, 0xE0))
"""In each of eight bytes: all bits but the highest; that one; those of which bytes of words have one."""
TO_A, PAST_Z = (np.uint64(0x0101010101010101 * (0x80 - letter)) for letter in b"A[")
"""What makes the highest bit of each of eight bytes, added to its others, say that it is at least `A`; that it comes after `Z`."""
TO_SMALL = np.uint64(2)
"""So far below the highest bit is the one that a small letter has and a capital one has not."""
OPERATORS = re.compile(b"[%b]" % re.escape(ASCII_OPERATORS))
POWERS = np.array([pow(int(BASE), power, 1 << 64) for power in range(LONGEST + 1)], np.uint64)
BIT = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)


def _numbers_in_words() -> Hashes:
    """The hashes of `NUMBER_WORDS`, each in the place of its last bits; 0 in all others."""
    hashes = list(map(_hash_of, NUMBER_WORDS))
    size = next(size for size in (1 << power for power in range(5, 30)) if len({one % size for one in hashes}) == len(hashes))
    found = np.zeros(size, np.uint64)
    found[[one % size for one in hashes]] = hashes
    return found


def _hash_of(word: bytes) -> int:
    """As `_word` has it of small letters."""
    value, whole = 0, 1 << 64
    for start in range(0, len(word) + 1, 8):
        value ^= int.from_bytes(word[start : start + 8], "little")
        value = (value ^ value >> 32) * int(BASE) % whole
        value = (value ^ value >> 32) * int(SPREAD) % whole
        value ^= value >> 32
    return value


class Reader(NamedTuple):
    """How texts become tokens. What bytes do: a separator, an operator, or the byte of the token that they are of."""

    texts: Bytes
    folds: Bytes
    """Of what characters that are not ASCII are read as."""
    abstracted: bool
    """Whether all names are one token, and all numbers another."""
    in_words: Hashes
    """See `_numbers_in_words`. Given to machine code and no part of it, as all that other files say (`data/contamination/compiled.py`)."""


def _classes() -> Bytes:
    """As `reading._line` has it."""
    found = np.full(256, SEPARATOR, np.uint8)
    for byte in range(128):
        char = chr(byte)
        if char.isalnum() or char == "_":
            found[byte] = ord(char.lower())
        elif byte in ASCII_OPERATORS:
            found[byte] = OPERATOR + ASCII_OPERATORS.index(byte)
        elif bytes([byte]).isspace():
            found[byte] = BLANK
        elif char == "(":
            found[byte] = OPEN
        elif byte < 28 or byte == 127:
            found[byte] = NOTHING
    found[128:] = FOREIGN
    return found


def _cased(classes: Bytes) -> Bytes:
    """With capital letters as they are, and one of them for `CAPITAL`."""
    found = classes.copy()
    found[FIRST : LAST + 1] = np.arange(FIRST, LAST + 1)
    found[ord(CAPITAL)] = FIRST  # begins a word as they do
    return found


def _read(classes: Bytes) -> Bytes:
    """Of texts that have been read: all that is not ASCII is of words."""
    return np.where(classes == FOREIGN, np.arange(256), classes).astype(np.uint8)


def _marked_kinds(classes: Bytes) -> Bytes:
    """With a capital letter for `NAME` and a digit for `NUMBER`, by which they are known."""
    found = classes.copy()
    found[ord(NAME)], found[ord(NUMBER)] = FIRST, ZERO
    return found


_PLAIN, _CASED, _IN_WORDS = _classes(), _cased(_classes()), _numbers_in_words()
READERS = {False: Reader(_PLAIN, _read(_PLAIN), False, _IN_WORDS), True: Reader(_CASED, _read(_CASED), True, _IN_WORDS)}
"""By whether texts are abstracted: of texts."""
LINE_READERS = {
    False: Reader(_read(_PLAIN), _read(_PLAIN), False, _IN_WORDS),
    True: Reader(_marked_kinds(_read(_CASED)), _read(_CASED), True, _IN_WORDS),
}
"""The same of what `readings` gives."""


class Folds(NamedTuple):
    """How characters that are not ASCII are read, by code point."""

    known: Bytes
    written: NDArray[np.uint32]
    """What each is read as: 64 times the place in `pool` where that begins, and its bytes, fewer than 64."""
    looked: NDArray[np.uint32]
    """The same of what it looks like."""
    pool: Bytes


class Characters:
    """The same, filled as characters come."""

    def __init__(self) -> None:
        self.folds = Folds(np.zeros(CODES, np.uint8), np.zeros(CODES, np.uint32), np.zeros(CODES, np.uint32), np.zeros(1 << 12, np.uint8))
        self._used = 0

    def learn(self, codes: Iterable[int]) -> None:
        for code in codes:
            char = chr(code)
            written, looked = folded(char, looks=False), folded(char, looks=True)
            kinds = (INVISIBLE * invisible(char)) | (DIFFERS * (written != looked)) | (COMPOSES * composes(char))
            places = self._keep(written), self._keep(looked)
            known, *tables, _ = self.folds
            known[code] = KNOWN | kinds
            for table, place in zip(tables, places, strict=True):
                table[code] = place

    def _keep(self, text: str) -> int:
        """Puts it into the pool; returns where it is, as `Folds` has it."""
        data, start = text.encode(), self._used
        self._used += len(data)
        if self._used > len(self.folds.pool):
            self.folds = self.folds._replace(pool=np.concatenate([self.folds.pool, np.zeros_like(self.folds.pool)]))
        self.folds.pool[start : self._used] = np.frombuffer(data, np.uint8)
        return start << 6 | len(data)


CHARACTERS = Characters()


class Table(NamedTuple):
    """Hashes of n-grams, each with a number: open addressing, linear probing, never more than half full."""

    hashes: Hashes
    numbers: Numbers
    """Negative where nothing stands."""
    usual: int
    """The longest n-grams, in tokens: all but those of turns that are shorter."""
    filter: Bytes
    """Bits by hash: where none stands, there is no n-gram of the usual length."""
    shorter: Numbers
    """The other lengths, from 2 on."""
    tails: Bytes
    """The filter of those, by their last two tokens."""
    singles: Bytes
    """The filter of those of one token."""


def table_of(hashes: Hashes, lengths: Numbers, tails: Hashes, usual: int) -> Table:
    """Makes the table.

    Args:
        hashes: of the n-grams, all different; the number of each is its place here.
        lengths: of each, in tokens; `usual` is the longest.
        tails: of the last two tokens of each that has two.
    """
    size = 1 << max(4, (2 * len(hashes)).bit_length())
    found, numbers = np.zeros(size, np.uint64), np.full(size, -1, np.int32)
    _put(hashes, found, numbers)
    shorter = (lengths < usual) & (lengths > 1)
    return Table(
        found, numbers, usual, _filter(hashes[lengths == usual]),
        np.unique(lengths[shorter]).astype(np.int32), _filter(tails[shorter]), _filter(hashes[lengths == 1]),
    )  # fmt: skip


def _filter(hashes: Hashes) -> Bytes:
    """Its bits are a power of two; none at all where nothing can be found."""
    bits = max(FEWEST_BITS, 1 << (len(hashes) * FILTER_BITS).bit_length()) if len(hashes) else 0
    found = np.zeros(bits // 8, np.uint8)
    _mark(hashes, found)
    return found


@compiled
def _slot(value, size):
    """Where a hash belongs in a table of so many places, a power of two: its upper bits, spread."""
    return np.int64(((value ^ (value >> HALF)) * SPREAD) >> HALF) & (size - 1)


@compiled
def _put(hashes, found, numbers):
    for number in range(len(hashes)):
        place = _slot(hashes[number], len(found))
        while numbers[place] >= 0:
            place = (place + 1) & (len(found) - 1)
        found[place], numbers[place] = hashes[number], number


@compiled
def _mark(hashes, found):
    for value in hashes:
        place = _slot(value, 8 * len(found))
        found[place >> 3] |= BIT[place & 7]


@compiled
def _marked(value, found):
    place = _slot(value, 8 * len(found))
    return found[place >> 3] & BIT[place & 7] != 0


@compiled
def _number(value, hashes, numbers):
    """The number of the n-gram with this hash, or -1."""
    place = _slot(value, len(hashes))
    while numbers[place] >= 0:
        if hashes[place] == value:
            return numbers[place]
        place = (place + 1) & (len(hashes) - 1)
    return np.int32(-1)


@compiled
def _spread(value):
    """A bijection in which every bit reaches every other."""
    value = (value ^ (value >> HALF)) * BASE
    value = (value ^ (value >> HALF)) * SPREAD
    return value ^ (value >> HALF)


@compiled
def _small(bytes_8):
    """Eight bytes with small letters for capital ones."""
    others = bytes_8 & LOW
    capitals = (others + TO_A) & ~(others + PAST_Z) & ~bytes_8 & HIGH
    return bytes_8 | (capitals >> TO_SMALL)


@compiled
def _word(eights, start, cased):
    """The hash of the word that begins at this byte of the stream, in small letters: eight bytes at a time, of which the last ones end it.
    `cased` says whether there may be others."""
    place, shift = start >> 3, np.uint64(start & 7) * BYTE
    value = NONE
    while True:
        bytes_8 = (eights[place] >> shift) | ((eights[place + 1] << ONE) << (np.uint64(63) - shift))
        if cased:
            bytes_8 = _small(bytes_8)
        others = bytes_8 & LETTERS
        ends = ~(((others & LOW) + LOW) | others) & HIGH  # the highest bit of each byte that is of no word
        first = ends & (~ends + ONE)
        value = _spread(value ^ (bytes_8 & ((first >> np.uint64(7)) - ONE)))
        if ends:
            return value
        place += 1


@compiled
def _operates(stream, at):
    """Whether a number or a bracket follows on the operator at this byte."""
    at += 1
    while stream[at] == BLANK:
        at += 1
    return stream[at] == OPEN or ZERO <= stream[at] <= NINE


@compiled
def _starts(stream, begin, end, starts):
    """Where tokens begin in a part of a stream; returns how many do. Without a branch: half of them would be guessed wrong."""
    begun, inside = 0, stream[begin - 1] >= WORD
    for at in range(begin, end):
        starts[begun] = at
        word = stream[at] >= WORD
        begun += (stream[at] >= OPERATOR) & ~(word & inside)
        inside = word
    return begun


@compiled
def _once(value, tokens, count):
    """Appends a hash that is not the last one already."""
    if count and tokens[count - 1] == value:
        return count
    tokens[count] = value
    return count + 1


@compiled
def _tokens(stream, begin, end, starts, reader, tokens, count):
    """Appends the hashes of the tokens that begin in a part of a stream to the first `count` of `tokens`; returns how many there are. Words
    that differ in capital letters alone have one hash, whether the reader tells them apart or not: no word of a number is missed."""
    eights, abstracted, in_words = stream.view(np.uint64), reader.abstracted, reader.in_words
    last_bits = np.uint64(len(in_words) - 1)
    for number in range(_starts(stream, begin, end, starts)):
        start = starts[number]
        if stream[start] >= WORD:
            value = _word(eights, start, abstracted)
            if abstracted and (ZERO <= stream[start] <= NINE or in_words[value & last_bits] == value):
                count = _once(NUMBERED, tokens, count)
            elif abstracted and FIRST <= stream[start] <= LAST:
                count = _once(NAMED, tokens, count)
            else:
                tokens[count] = value
                count += 1
        elif _operates(stream, start):
            tokens[count] = _spread(np.uint64(stream[start]))
            count += 1
    return count


@compiled
def _plain(data, at, reader, stream, size):
    """Appends the text up to the next character that is not ASCII to the first `size` bytes of a stream; returns where both stand."""
    while at < len(data):
        what = reader.texts[data[at]]
        if what == FOREIGN:
            break
        stream[size] = what
        size += what != NOTHING
        at += 1
    return at, size


@compiled
def _fold(data, reader, folds, places, spaced, stream, strange, unknown):
    """Writes a text as a stream: bytes of tokens and what other bytes do, the first and the last ones separators.

    Args:
        places: of what characters are read as, in the pool: `folds.written` or `folds.looked`.
        spaced: whether a space is put for what is not seen.
        strange: room for characters that are not known yet, of which `unknown` were found before.

    Returns:
        The end of the stream, 0 where there is no room for it; what kinds of characters there were; how many unknown ones.
    """
    if len(stream) < len(data) + 2 * LONGEST_FOLD:
        return 0, 0, unknown
    stream[0] = SEPARATOR
    at, size = _plain(data, np.int64(0), reader, stream, np.int64(1))
    kinds = 0
    while at < len(data):
        code, length = _code(data, at)
        kind = folds.known[code]
        if kind == 0:
            if unknown < len(strange):
                strange[unknown] = code
            unknown += 1
        kinds |= kind
        if size + len(data) - at + 2 * LONGEST_FOLD > len(stream):
            return 0, 0, unknown
        if kind & INVISIBLE and spaced:
            stream[size] = BLANK
            size += 1
        else:
            place = np.int64(places[code] >> 6)
            for inner in range(place, place + np.int64(places[code] & 63)):
                what = reader.folds[folds.pool[inner]]
                stream[size] = what
                size += what != NOTHING
        at, size = _plain(data, at + length, reader, stream, size)
    stream[size : size + 16] = SEPARATOR
    return size, kinds, unknown


@compiled
def _folded(data, reader, folds, places, spaced, stream, strange, unknown):
    """The same with as long a stream as it takes, which is returned first."""
    before = unknown
    while True:
        size, kinds, unknown = _fold(data, reader, folds, places, spaced, stream, strange, before)
        if size:
            return stream, size, kinds, unknown
        stream = np.empty(8 * (max(len(stream), len(data) + 2 * LONGEST_FOLD) // 4), np.uint8)


@compiled
def token_hashes(lines, bounds, reader, folds, counts):
    """The hashes of all tokens of lines as `readings` gives them (an opening bracket after each operator, which would be none without);
    line i is `lines[bounds[i]:bounds[i + 1]]`; `counts` is filled with how many tokens each has."""
    stream, strange = np.empty(8, np.uint8), np.empty(0, np.int32)
    starts, tokens = np.empty(len(lines) + 1, np.int64), np.empty(len(lines), np.uint64)
    count, none, first = np.int64(0), np.int64(0), np.int64(1)  # not literal numbers, for which all would be compiled again
    for line in range(len(counts)):
        this = lines[bounds[line] : bounds[line + 1]]
        stream, size, _, _ = _folded(this, reader, folds, folds.written, none > 0, stream, strange, none)
        added = _tokens(stream, first, size, starts, reader, tokens[count:], none)
        counts[line] = added
        count += added
    return tokens[:count]


@compiled
def gram_hashes(tokens, counts, offsets, usual, hashes, tails, starts, lengths):
    """Of every line its n-grams of `usual` tokens, or the one of its own length where it is shorter.

    Args:
        tokens: hashes, line by line.
        counts: tokens of each line.
        offsets: of each line: tokens before it in what it is a part of.
        hashes, tails, starts, lengths: are filled: hash, that of the last two tokens, place of the first one, number of tokens.

    Returns:
        How many n-grams there are.
    """
    found, begin = 0, 0
    for line in range(len(counts)):
        count = counts[line]
        length = min(usual, count)
        for start in range(count - length + 1 if count else 0):
            value = NONE
            for place in range(begin + start, begin + start + length):
                value = value * BASE + tokens[place]
            last = begin + start + length - 1
            hashes[found], starts[found], lengths[found] = value, offsets[line] + start, length
            tails[found] = tokens[last - 1] * BASE + tokens[last] if length > 1 else NONE
            found += 1
        begin += count
    return found


@compiled
def _note(value, table, hits, text, found):
    """Notes an n-gram of a text if it is in the table and there is room; returns how many were found so far, noted or not."""
    number = _number(value, table.hashes, table.numbers)
    if number < 0:
        return found
    if found < hits.shape[1]:
        hits[0, found], hits[1, found] = text, number
    return found + 1


@compiled
def _look_up(tokens, count, prefix, table, hits, text, found):
    """Notes the n-grams among the first `count` tokens; returns how many were found so far, noted or not."""
    usual, shorter = table.usual, table.shorter
    for end in range(1, count + 1):
        prefix[end] = prefix[end - 1] * BASE + tokens[end - 1]
        if end >= usual and len(table.filter):
            value = prefix[end] - prefix[end - usual] * POWERS[usual]
            if _marked(value, table.filter):
                found = _note(value, table, hits, text, found)
        if end >= 2 and len(table.tails) and _marked(prefix[end] - prefix[end - 2] * POWERS[2], table.tails):
            for length in shorter:
                if end >= length:
                    found = _note(prefix[end] - prefix[end - length] * POWERS[length], table, hits, text, found)
        if len(table.singles) and _marked(tokens[end - 1], table.singles):
            found = _note(tokens[end - 1], table, hits, text, found)
    return found


@compiled
def _code(data, at):
    """The code point that begins at a byte of UTF-8, and how many bytes it has."""
    first = np.int64(data[at])
    if first < 0xE0:
        return (first & 0x1F) << 6 | np.int64(data[at + 1] & 0x3F), 2
    middle = np.int64(data[at + 1] & 0x3F) << 6 | np.int64(data[at + 2] & 0x3F)
    if first < 0xF0:
        return (first & 0x0F) << 12 | middle, 3
    return (first & 0x07) << 18 | middle << 6 | np.int64(data[at + 3] & 0x3F), 4


@compiled
def _search(data, bounds, together, reader, folds, table, hits, strange, composing):
    """Searches texts in all their readings.

    Args:
        data: UTF-8 of all texts; text i is `data[bounds[i]:bounds[i + 1]]`.
        together: whether characters have been put together already.
        reader: of texts.
        hits: room for (text, number of the n-gram), [2, H].
        strange: room for characters that are not known yet.
        composing: is set for texts that are left out, since their characters must be put together first.

    Returns:
        How many n-grams and how many strange characters were found. Where there are more than there is room for, or any strange ones,
        the search has to be made again.
    """
    found, unknown = np.int64(0), np.int64(0)
    stream, starts = np.empty(ROOM, np.uint8), np.empty(ROOM + 1, np.int64)
    tokens, prefix = np.empty(ROOM + LONGEST, np.uint64), np.zeros(ROOM + LONGEST + 1, np.uint64)
    for text in range(len(bounds) - 1):
        kinds = 0
        for reading in range(4):  # with letters taken for those that they look like, with spaces for what is not seen
            looks, spaced = reading & 1 != 0, reading & 2 != 0
            if (looks and not kinds & DIFFERS) or (spaced and not kinds & INVISIBLE):
                continue
            places = folds.looked if looks else folds.written
            this = data[bounds[text] : bounds[text + 1]]
            stream, size, kinds, unknown = _folded(this, reader, folds, places, spaced, stream, strange, unknown)
            if kinds & COMPOSES and not together:
                composing[text] = True
                break
            count = np.int64(0)
            for begin in range(1, size, ROOM):
                count = _tokens(stream, begin, min(begin + ROOM, size), starts, reader, tokens, count)
                found = _look_up(tokens, count, prefix, table, hits, text, found)
                kept = min(count, LONGEST - 1)  # n-grams go on from one part to the next
                tokens[:kept] = tokens[count - kept : count]
                count = kept
    return found, unknown


def line_hashes(lines: Sequence[bytes], abstracted: bool = False) -> tuple[Hashes, Places]:
    """The hashes of the tokens of lines as `readings` gives them, and how many each line has."""
    marked = [OPERATORS.sub(rb"\g<0>(", line) for line in lines]
    counts = np.empty(len(lines), np.int64)
    return token_hashes(*_joined(marked), LINE_READERS[abstracted], CHARACTERS.folds, counts), counts


def _joined(data: Sequence[bytes]) -> tuple[Bytes, Places]:
    """All in one piece, and where each begins, and at last where they end."""
    bounds = np.zeros(len(data) + 1, np.int64)
    np.cumsum(list(map(len, data)), out=bounds[1:])
    return np.frombuffer(b"".join(data), np.uint8), bounds


def search(texts: Sequence[str], table: Table, abstracted: bool = False) -> Numbers:
    """(number of the text, number of the n-gram) of every n-gram that a text holds in one of its readings, [2, H], in no order."""
    data = [unescaped(text).encode("utf-8", "replace") for text in texts]  # no encoding has halves of surrogate pairs
    hits, composing = _searched(data, table, READERS[abstracted], together=False)
    (late,) = composing.nonzero()
    if not len(late):
        return hits
    composed = [unicodedata.normalize("NFKC", data[number].decode()).encode() for number in late]
    more, _ = _searched(composed, table, READERS[abstracted], together=True)
    return np.concatenate([hits, np.stack([late[more[0]].astype(np.int32), more[1]])], axis=1)


def _searched(data: Sequence[bytes], table: Table, reader: Reader, together: bool) -> tuple[Numbers, NDArray[np.bool_]]:
    (joined, bounds), room = _joined(data), HITS
    while True:
        hits, strange, composing = np.empty((2, room), np.int32), np.empty(STRANGE, np.int32), np.zeros(len(data), np.bool_)
        found, unknown = _search(joined, bounds, together, reader, CHARACTERS.folds, table, hits, strange, composing)
        if not unknown and found <= room:
            return hits[:, :found].copy(), composing
        CHARACTERS.learn(set(strange[:unknown].tolist()))
        room = max(room, found)
