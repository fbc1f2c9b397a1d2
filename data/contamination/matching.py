"""Compiled search for the benchmark items' n-grams in texts, a pass over bytes that is equally fast in all scripts.

Texts are normalized as in `data/contamination/reading.py`, whose foldings are cached in tables by code point. Tokens of up to eight bytes
are hashed by a bijection, longer ones eight bytes at a time; n-grams by a polynomial of token hashes from prefix sums (Karp and Rabin
1987), which are looked up in an open-addressing table behind a bit filter. Nothing is missed; hash collisions may very rarely add results,
which the exact comparison (`data/contamination/coverage.py`) removes.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pedigree.data.contamination.compiled import compiled
from pedigree.data.contamination.reading import (
    ASCII_OPERATORS,
    CAPITAL,
    ENDS,
    FOLDED,
    NAME,
    NUMBER,
    NUMBER_WORDS,
    composes,
    invisible,
    unescaped,
)

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int32]
Places = NDArray[np.int64]

LONGEST = 13
"""Maximum tokens of an n-gram."""
CODES = 0x110000
"""Number of Unicode code points."""
KNOWN, INVISIBLE, DIFFERS, COMPOSES = 1, 2, 4, 8
"""Flags of a code point: looked up; invisible; looks like another letter; texts with it are composed first (NFKC)."""
SEPARATOR, BLANK, LINE, MARK, OPEN, CLOSE, ESCAPE, NOTHING, FOREIGN = range(9)
"""Classes of bytes outside of tokens: word separator; blank, and line feed, which may follow an operator; mark of emphasis, which may too;
opening bracket; closing bracket; backslash; ignored (control characters); start of a non-ASCII character."""
OPERATOR, WORD = 16, 32
"""First classes of operators, and of lowercase word bytes."""
MINUS, PLUS, STAR, GREATER = OPERATOR, OPERATOR + 1, OPERATOR + 2, OPERATOR + 8
"""Classes of the operators that Markdown uses, in the order of `ASCII_OPERATORS`."""
MARKED = {"_": MARK, "`": MARK, "(": OPEN, "\\": ESCAPE} | dict.fromkeys(ENDS.decode(), CLOSE)
ZERO, NINE = b"09"
FIRST, LAST = b"AZ"
ROOM = 4096
"""Bytes of a stream processed at a time."""
LONGEST_FOLD = 64
"""Upper bound on the bytes of a character's folding."""
FILTER_BITS, FEWEST_BITS = 16, 1 << 12
"""Filter bits per n-gram, and minimum."""
HITS, STRANGE = 1 << 14, 1 << 14
"""Initial capacity for results of a search: n-grams, and unknown characters."""

BASE, SPREAD = np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15)
NAMED, NUMBERED = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)
"""Hash of names, and of numbers, in abstracted texts."""
HALF, NONE, ONE, BYTE = np.uint64(32), np.uint64(0), np.uint64(1), np.uint64(8)
LOW, HIGH, LETTERS = (np.uint64(0x0101010101010101 * byte) for byte in (0x7F, 0x80, 0xE0))
"""Masks for eight bytes: all bits but the highest; the highest; the bits of which word bytes have at least one."""
TO_A, PAST_Z = (np.uint64(0x0101010101010101 * (0x80 - letter)) for letter in b"A[")
"""Addends that set the highest bit of a byte (after masking with LOW) if it is at least `A`, and if it is beyond `Z`."""
TO_SMALL = np.uint64(2)
"""Distance from the highest bit to the bit that distinguishes lowercase from capital letters."""
OPERATORS = re.compile(b"[%b]" % re.escape(ASCII_OPERATORS))
POWERS = np.array([pow(int(BASE), power, 1 << 64) for power in range(LONGEST + 1)], np.uint64)
BIT = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)


class Reader(NamedTuple):
    """Byte classes for tokenization: separator, operator, or the token's byte."""

    texts: Bytes
    folds: Bytes
    """Byte classes for foldings of non-ASCII characters."""
    abstracted: bool
    """Whether all names are one token, and all numbers another."""
    in_words: Hashes
    """See `_numbers_in_words`. Passed as an argument, because it depends on other files (`data/contamination/compiled.py`)."""


@cache
def _reader(abstracted: bool, of_lines: bool) -> Reader:
    """Reader of lines from `readings`, or of raw texts."""
    texts = _classes()
    if abstracted:
        texts[FIRST : LAST + 1] = np.arange(FIRST, LAST + 1)
        texts[ord(CAPITAL)] = FIRST  # it begins a word like a capital letter
    folds = np.where(texts == FOREIGN, np.arange(256), texts).astype(np.uint8)  # in normalized texts, non-ASCII bytes belong to words
    if of_lines:
        texts = folds.copy()
        if abstracted:  # a capital letter and a digit identify names and numbers
            texts[ord(NAME)], texts[ord(NUMBER)] = FIRST, ZERO
    return Reader(texts, folds, abstracted, _numbers_in_words() if abstracted else np.zeros(1, np.uint64))


def _classes() -> Bytes:
    """Byte classes that match `reading._line`."""
    found = np.full(256, SEPARATOR, np.uint8)
    for byte in range(128):
        char = chr(byte)
        if char.isalnum():
            found[byte] = ord(char.lower())
        elif byte in ASCII_OPERATORS:
            found[byte] = OPERATOR + ASCII_OPERATORS.index(byte)
        elif bytes([byte]).isspace():
            found[byte] = LINE if char == "\n" else BLANK
        elif char in MARKED:
            found[byte] = MARKED[char]
        elif byte < 28 or byte == 127:
            found[byte] = NOTHING
    found[128:] = FOREIGN
    return found


def _numbers_in_words() -> Hashes:
    """Perfect hash table of `NUMBER_WORDS`, indexed by a hash's last bits; 0 if empty."""
    hashes = line_hashes(sorted(NUMBER_WORDS))[0].tolist()
    size = next(size for size in (1 << power for power in range(5, 30)) if len({one % size for one in hashes}) == len(hashes))
    found = np.zeros(size, np.uint64)
    found[[one % size for one in hashes]] = hashes
    return found


class Folds(NamedTuple):
    """Foldings of non-ASCII characters, by code point."""

    known: Bytes
    written: NDArray[np.uint32]
    """Folding as written: 64 · (start in `pool`) + (length in bytes, below 64)."""
    looked: NDArray[np.uint32]
    """Folding as it looks, in the same form."""
    pool: Bytes


class Characters:
    """`Folds`, filled on demand."""

    def __init__(self) -> None:
        self.folds = Folds(np.zeros(CODES, np.uint8), np.zeros(CODES, np.uint32), np.zeros(CODES, np.uint32), np.zeros(1 << 12, np.uint8))
        self._used = 0

    def learn(self, codes: Iterable[int]) -> None:
        for code in codes:
            char = chr(code)
            written, looked = (FOLDED[looks, False][char] for looks in (False, True))
            kinds = (INVISIBLE * bool(invisible.match(char))) | (DIFFERS * (written != looked)) | (COMPOSES * bool(composes.match(char)))
            places = self._keep(written), self._keep(looked)
            known, *tables, _ = self.folds
            known[code] = KNOWN | kinds
            for table, place in zip(tables, places, strict=True):
                table[code] = place

    def _keep(self, text: str) -> int:
        """Add a folding to the pool; returns its place as in `Folds`."""
        data, start = text.encode(), self._used
        self._used += len(data)
        if self._used > len(self.folds.pool):
            self.folds = self.folds._replace(pool=np.concatenate([self.folds.pool, np.zeros_like(self.folds.pool)]))
        self.folds.pool[start : self._used] = np.frombuffer(data, np.uint8)
        return start << 6 | len(data)


CHARACTERS = Characters()


class Table(NamedTuple):
    """Hash table from n-grams to numbers: open addressing, linear probing, at most half full."""

    hashes: Hashes
    numbers: Numbers
    """Negative for empty slots."""
    usual: int
    """Length in tokens of all n-grams except those of shorter turns."""
    filter: Bytes
    """Bit filter of n-grams of the usual length."""
    shorter: Numbers
    """The other lengths, from 2."""
    tails: Bytes
    """Bit filter of those n-grams' last two tokens."""
    singles: Bytes
    """Bit filter of n-grams of one token."""


def table_of(hashes: Hashes, lengths: Numbers, tails: Hashes, usual: int) -> Table:
    """Build the table.

    Args:
        hashes: distinct hashes of the n-grams, numbered in this order.
        lengths: length of each in tokens, at most `usual`.
        tails: hash of each n-gram's last two tokens, if it has two.
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
    """A bit filter; its number of bits is a power of two, or 0 if there are no hashes."""
    bits = max(FEWEST_BITS, 1 << (len(hashes) * FILTER_BITS).bit_length()) if len(hashes) else 0
    found = np.zeros(bits // 8, np.uint8)
    _mark(hashes, found)
    return found


@compiled
def _slot(value, size):
    """Slot of a hash in a table whose size is a power of two, from its upper bits after mixing."""
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
    """A bijection with full avalanche."""
    value = (value ^ (value >> HALF)) * BASE
    value = (value ^ (value >> HALF)) * SPREAD
    return value ^ (value >> HALF)


@compiled
def _small(bytes_8):
    """Eight bytes in lowercase."""
    others = bytes_8 & LOW
    capitals = (others + TO_A) & ~(others + PAST_Z) & ~bytes_8 & HIGH
    return bytes_8 | (capitals >> TO_SMALL)


@compiled
def _word(eights, start, cased):
    """The hash of the word that starts at this byte, in lowercase, eight bytes at a time. `cased`: the stream may contain capitals."""
    place, shift = start >> 3, np.uint64(start & 7) * BYTE
    value = NONE
    while True:
        bytes_8 = (eights[place] >> shift) | ((eights[place + 1] << ONE) << (np.uint64(63) - shift))
        if cased:
            bytes_8 = _small(bytes_8)
        others = bytes_8 & LETTERS
        ends = ~(((others & LOW) + LOW) | others) & HIGH  # the highest bit of each byte outside of words
        first = ends & (~ends + ONE)
        value = _spread(value ^ (bytes_8 & ((first >> np.uint64(7)) - ONE)))
        if ends:
            return value
        place += 1


@compiled
def _operates(stream, at):
    """Whether the character at this byte is an operator (`reading.OPERATOR`)."""
    if stream[at] == STAR:
        before = stream[at - 1]
        if before == STAR or before == MARK or stream[at + 1] == STAR or (before == ESCAPE and stream[at - 2] == STAR):
            return False
    ahead = _past_marks(stream, at + 1)
    while stream[ahead] == BLANK:
        ahead += 1
    if stream[ahead] == LINE:
        ahead += 1
        while stream[ahead] == BLANK or stream[ahead] == GREATER:
            ahead += 1
    while stream[ahead] == BLANK or stream[ahead] == LINE:
        ahead += 1
    ahead = _past_marks(stream, ahead)
    return (stream[ahead] == OPEN or ZERO <= stream[ahead] <= NINE) and not _marks_up(stream, at)


@compiled
def _past_marks(stream, at):
    while stream[at] == MARK or stream[at] == STAR:
        at += 1
    return at


@compiled
def _marks_up(stream, at):
    """As `reading._marks_up`."""
    char, before, spaced = stream[at], stream[at - 1], BLANK <= stream[at + 1] <= LINE
    if (char != STAR and char != MINUS and char != PLUS and char != GREATER) or before == ESCAPE:
        return False
    if char == STAR and spaced != (at == 1 or BLANK <= before <= LINE):
        return True
    if char != GREATER and not spaced:
        return char == STAR and before < WORD and before != CLOSE
    at -= 1
    while stream[at] == BLANK or stream[at] == GREATER or stream[at] == STAR or stream[at] == PLUS or stream[at] == MINUS:
        at -= 1
    if at == 0 or stream[at] != LINE or char == GREATER:
        return at == 0 or stream[at] == LINE
    at -= 1
    while stream[at] == BLANK or stream[at] == STAR or stream[at] == MARK:
        at -= 1
    return not ZERO <= stream[at] <= NINE


@compiled
def _starts(stream, begin, end, starts):
    """Fill `starts` with the starts of tokens in a part of a stream; returns their number. Branchless, because half of the branches would
    be mispredicted."""
    begun, inside = 0, stream[begin - 1] >= WORD
    for at in range(begin, end):
        starts[begun] = at
        word = stream[at] >= WORD
        begun += (stream[at] >= OPERATOR) & ~(word & inside)
        inside = word
    return begun


@compiled
def _once(value, tokens, count):
    """Append a hash unless it equals the last one."""
    if count and tokens[count - 1] == value:
        return count
    tokens[count] = value
    return count + 1


@compiled
def _tokens(stream, begin, end, starts, reader, tokens, count):
    """Append the hashes of the tokens that start in a part of a stream to the first `count` of `tokens`; returns the new count.

    Hashes ignore case, even if the reader preserves it, so that all number words are recognized.
    """
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
    """Append the text up to the next non-ASCII character to the first `size` bytes of a stream; returns both positions."""
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
    """Write a text as a stream of byte classes that begins and ends with separators.

    Args:
        places: places of foldings in the pool: `folds.written` or `folds.looked`.
        spaced: whether invisible characters become spaces.
        strange: buffer for unknown characters, of which `unknown` were found before.

    Returns:
        (end of the stream, or 0 if it does not fit; flags of the characters; number of unknown characters).
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
    """Like `_fold`, enlarging the stream as needed; returns the stream first."""
    before = unknown
    while True:
        size, kinds, unknown = _fold(data, reader, folds, places, spaced, stream, strange, before)
        if size:
            return stream, size, kinds, unknown
        stream = np.empty(8 * (max(len(stream), len(data) + 2 * LONGEST_FOLD) // 4), np.uint8)


@compiled
def token_hashes(lines, bounds, reader, folds, counts):
    """The hashes of all tokens of lines from `readings` (with each operator between a backslash and a bracket, to mark it as one);
    line i is `lines[bounds[i]:bounds[i + 1]]`; fills `counts` with the number of tokens of each."""
    stream, strange = np.empty(8, np.uint8), np.empty(0, np.int32)
    starts, tokens = np.empty(len(lines) + 1, np.int64), np.empty(len(lines), np.uint64)
    count, none, first = np.int64(0), np.int64(0), np.int64(1)  # variables, because literals would be compiled separately
    for line in range(len(counts)):
        this = lines[bounds[line] : bounds[line + 1]]
        stream, size, _, _ = _folded(this, reader, folds, folds.written, none > 0, stream, strange, none)
        added = _tokens(stream, first, size, starts, reader, tokens[count:], none)
        counts[line] = added
        count += added
    return tokens[:count]


@compiled
def gram_hashes(tokens, counts, offsets, usual, hashes, tails, starts, lengths):
    """Fill in hash, hash of the last two tokens, position of the first token and number of tokens of the n-grams of `usual` tokens of every
    line; a shorter line is one n-gram. Returns their number.

    Args:
        tokens: token hashes, line by line.
        counts: number of tokens of each line.
        offsets: token offset of each line in its text.
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
    """Record an n-gram of a text if it is in the table and fits; returns the number found so far, recorded or not."""
    number = _number(value, table.hashes, table.numbers)
    if number < 0:
        return found
    if found < hits.shape[1]:
        hits[0, found], hits[1, found] = text, number
    return found + 1


@compiled
def _look_up(tokens, count, prefix, table, hits, text, found):
    """Record the n-grams among the first `count` tokens; returns the number found so far, recorded or not."""
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
    """(code point that starts at a byte of UTF-8, its length in bytes)."""
    first = np.int64(data[at])
    if first < 0xE0:
        return (first & 0x1F) << 6 | np.int64(data[at + 1] & 0x3F), 2
    middle = np.int64(data[at + 1] & 0x3F) << 6 | np.int64(data[at + 2] & 0x3F)
    if first < 0xF0:
        return (first & 0x0F) << 12 | middle, 3
    return (first & 0x07) << 18 | middle << 6 | np.int64(data[at + 3] & 0x3F), 4


@compiled
def _search(data, bounds, together, reader, folds, table, hits, strange, composing):
    """Search texts in all their readings.

    Args:
        data: UTF-8 of all texts; text i is `data[bounds[i]:bounds[i + 1]]`.
        together: whether texts are already composed (NFKC).
        reader: reader of raw texts.
        hits: buffer for (text, number of the n-gram), [2, H].
        strange: buffer for unknown characters.
        composing: set for texts that are skipped because they must be composed first.

    Returns:
        (number of n-grams, number of unknown characters) found. If the former exceeds the buffer, or the latter is not 0, the search must
        be repeated.
    """
    found, unknown = np.int64(0), np.int64(0)
    stream, starts = np.empty(ROOM, np.uint8), np.empty(ROOM + 1, np.int64)
    tokens, prefix = np.empty(ROOM + LONGEST, np.uint64), np.zeros(ROOM + LONGEST + 1, np.uint64)
    for text in range(len(bounds) - 1):
        kinds = 0
        for reading in range(4):  # with lookalikes replaced, with spaces for invisible characters
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
                kept = min(count, LONGEST - 1)  # n-grams continue across parts
                tokens[:kept] = tokens[count - kept : count]
                count = kept
    return found, unknown


def line_hashes(lines: Sequence[bytes], abstracted: bool = False) -> tuple[Hashes, Places]:
    """(token hashes of lines from `readings`, number of tokens of each line)."""
    marked = [OPERATORS.sub(rb"\\\g<0>(", line) for line in lines]
    counts = np.empty(len(lines), np.int64)
    return token_hashes(*_joined(marked), _reader(abstracted, of_lines=True), CHARACTERS.folds, counts), counts


def _joined(data: Sequence[bytes]) -> tuple[Bytes, Places]:
    """(concatenation, bounds of each piece)."""
    bounds = np.zeros(len(data) + 1, np.int64)
    np.cumsum(list(map(len, data)), out=bounds[1:])
    return np.frombuffer(b"".join(data), np.uint8), bounds


def search(texts: Sequence[str], table: Table, abstracted: bool = False) -> Numbers:
    """(text index, n-gram number) for every n-gram in any reading of a text, [2, H], unordered."""
    data = [unescaped(text).encode("utf-8", "replace") for text in texts]  # lone surrogates cannot be encoded
    hits, composing = _searched(data, table, _reader(abstracted, of_lines=False), together=False)
    (late,) = composing.nonzero()
    if not len(late):
        return hits
    composed = [unicodedata.normalize("NFKC", data[number].decode()).encode() for number in late]
    more, _ = _searched(composed, table, _reader(abstracted, of_lines=False), together=True)
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
