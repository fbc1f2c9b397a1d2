"""Normalize texts to sequences of words, numbers and operators, undoing disguises.

A reading is a line of UTF-8 tokens separated by spaces: lowercase, without punctuation, Markdown and marks. Ambiguous texts have several
readings, and two texts are equal if any of their readings are:

- as written, and as it looks: with letters of other scripts replaced by their lookalikes (`data/contamination/lookalikes.py`);
- with invisible characters removed, and with spaces in their place.

HTML references (`&#36;`, `&quot;`) and LaTeX fractions (`\\frac{1}{3}`) are decoded. An abstracted reading replaces names and numbers by
placeholders, so that texts that differ only in these are equal.
"""

import html
import re
import unicodedata
from collections.abc import Sequence

from pedigree.data.contamination.lookalikes import LOOKALIKES

OPERATORS = (
    dict.fromkeys("˗‐‒–⁃−➖", "-") | dict.fromkeys("·∙", "*") | dict.fromkeys("×⁎∗⋅✕✖", "\\*") | dict.fromkeys("÷⁄∕➗", "/") | {"➕": "+"}
)
"""Other characters for operators; most are in TR39. Those that Markdown has no other use for are escaped."""
ASCII_OPERATORS = b"-+*/^%=<>"
CODES = bytes(range(1, 1 + len(ASCII_OPERATORS)))
"""Placeholders for operators during removal of punctuation; control characters are removed from texts before."""
OPERATOR = re.compile(rb"(?:[-+/^%=<>]|(?<![*_`])(?<!\*\\)\*(?!\*))(?=[*_`]*+ *+(?:\n[ >]*+)?+\s*+[*_`]*+[0-9(])")
"""An operator is followed by a number or a bracket, perhaps emphasized, or on the next line of a quotation; otherwise, and for `**`, the
character is punctuation. So is Markdown: see `_marks_up`."""
ENDS = b")]}"
"""Brackets that end an operand."""

INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Unicode's Default_Ignorable_Code_Point (zero-width, soft hyphen, bidi controls, variation selectors, tags) and interlinear anchors."""
MARKS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
"""Blocks of combining diacritical marks. Marks in other blocks are vowels or other sounds of their scripts."""
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Scripts without spaces: each character is a word."""

CAPITAL = "\x0e"
"""Precedes the folding of a non-ASCII capital letter; ignored unless the reading is abstracted."""
NAME, NUMBER = b"@", b"#"
"""Placeholders of an abstracted reading for capitalized words, and for numbers: words that begin with a digit, and `NUMBER_WORDS`."""
NUMBER_WORDS = frozenset(
    b"""zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
    twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion""".split()
)

_reference = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_fraction = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
invisible, _mark, _cjk = (re.compile(f"[{characters}]") for characters in (INVISIBLE, MARKS, CJK))
_not_ascii = re.compile(r"[^\x00-\x7f]")
composes = re.compile("[\u1100-\u11ff\u3099\u309a\ua960-\ua97f\ud7b0-\ud7ff\uff9e-\uff9f]")
"""Parts of Korean syllables and Japanese sound marks, which must be composed (NFKC) before folding single characters."""
_ASCII = bytes(range(128))
_CONTROLS = bytes([*range(9), *range(14, 28), 127])


def _table(words: bytes, codes: bool, cased: bool = False) -> bytes:
    """A table for `bytes.translate`: lowercases words and maps whitespace but line feeds to spaces; other bytes stay or, with `codes`,
    become a space or an operator. `cased`: leave capital letters and `CAPITAL` unchanged."""
    found = bytearray(range(256))
    for byte in range(128):
        char = bytes([byte])
        if char in words:
            found[byte] = (char if cased else char.lower())[0]
        elif codes or (char.isspace() and char != b"\n"):
            found[byte] = ASCII_OPERATORS[byte - 1] if codes and char in CODES else ord(" ")
    return bytes(found)


_WORDS = bytes(byte for byte in range(128) if chr(byte).isalnum())
_SMALL, _PLAIN = _table(_WORDS, codes=False), _table(_WORDS, codes=True)
_NAMED = _WORDS + CAPITAL.encode()
_CASED, _CASED_PLAIN = _table(_NAMED, codes=False, cased=True), _table(_NAMED, codes=True, cased=True)
_CASED_CONTROLS = _CONTROLS.replace(CAPITAL.encode(), b"")
_CAPITALS = bytes(range(ord("A"), ord("Z") + 1)) + CAPITAL.encode()
_DIGITS = b"0123456789"
_OPERANDS = frozenset(_NAMED + ENDS + bytes(range(128, 256)))
"""Bytes that may end an operand."""
_BEFORE_NO_NUMBER = bytes(set(range(256)) - set(b"0123456789("))
_TO_CODES = bytes.maketrans(ASCII_OPERATORS, CODES)


class _Folded(dict[str, str]):
    """Non-ASCII character → its folding, cached."""

    def __init__(self, looks: bool, spaced: bool) -> None:
        self._looks, self._spaced = looks, spaced

    def __missing__(self, char: str) -> str:
        self[char] = found = self._fold(char)
        return found

    def _fold(self, char: str) -> str:
        if invisible.match(char):
            return " " if self._spaced else ""
        return "".join(map(self._part, unicodedata.normalize("NFKC", char)))

    def _part(self, char: str) -> str:
        if _mark.match(char) or unicodedata.category(char) == "Cc":
            return " " if char.isspace() else ""
        if char in OPERATORS:
            return OPERATORS[char]
        if char.isascii():
            return char
        if not char.isalnum():
            return " "
        if _cjk.match(char):
            return f" {char} "
        value = unicodedata.decimal(char, None)
        if value is not None:
            return str(value)
        bare = _mark.sub("", unicodedata.normalize("NFKD", char))
        looked = "".join(LOOKALIKES.get(part, part) for part in bare) if self._looks else bare
        return CAPITAL * (char.isupper() or char.istitle()) + unicodedata.normalize("NFC", looked.casefold())


FOLDED = {(looks, spaced): _Folded(looks, spaced) for looks in (False, True) for spaced in (False, True)}
"""(as it looks, with spaces for invisible characters) → non-ASCII character → its folding."""


def unescaped(text: str) -> str:
    """Decode HTML references and LaTeX fractions."""
    text = _reference.sub(lambda one: html.unescape(one[0]), text) if "&" in text else text
    return _fraction.sub(r"\1\2/\3\4", text) if "frac" in text else text


def readings(texts: Sequence[str], abstracted: bool = False) -> list[list[bytes]]:
    """The distinct readings of related texts, e.g. the turns of a conversation, each with one line of tokens per text; the first is as
    written."""
    line = _abstracted if abstracted else _line
    texts = list(map(unescaped, texts))
    if all(map(str.isascii, texts)):
        return [[line(text) for text in texts]]
    foreign, composed = set(), []
    for text in texts:
        if not text.isascii():
            raw = text.encode("utf-8", "replace")  # lone surrogates cannot be encoded
            others = raw.translate(None, _ASCII).decode()
            text = raw.decode()
            if composes.search(others):
                text = unicodedata.normalize("NFKC", text)
                others = _not_ascii.findall(text)
            foreign.update(others)
        composed.append(text)
    hidden = (False, True) if any(map(invisible.match, foreign)) else (False,)
    found: dict[tuple[bytes, ...], None] = {}
    for spaced in hidden:
        written, looked = FOLDED[False, spaced], FOLDED[True, spaced]
        for folds in (written, looked) if any(written[char] != looked[char] for char in foreign) else (written,):
            found.setdefault(tuple(line(_replaced(text, folds)) for text in composed))
    return [list(lines) for lines in found]


def _replaced(text: str, folds: _Folded) -> str:
    return _not_ascii.sub(lambda one: folds[one[0]], text)


def _line(folded: str) -> bytes:
    """The tokens of a folded text, in which only words contain non-ASCII characters."""
    return _parted(folded.encode().translate(_SMALL, _CONTROLS), _PLAIN)


def _abstracted(folded: str) -> bytes:
    """Like `_line`, with one `NAME` per run of names, and one `NUMBER` per run of numbers."""
    found: list[bytes] = []
    for token in _parted(folded.encode().translate(_CASED, _CASED_CONTROLS), _CASED_PLAIN).split():
        is_number = token[0] in _DIGITS or token.lower() in NUMBER_WORDS
        kind = NUMBER if is_number else NAME if token[0] in _CAPITALS else token
        if kind is token or found[-1:] != [kind]:
            found.append(kind)
    return b" ".join(found)


def _parted(text: bytes, plain: bytes) -> bytes:
    """The text with spaces around operators, and only spaces between words."""
    if text.translate(None, _BEFORE_NO_NUMBER):
        text = OPERATOR.sub(lambda one: b" " if _marks_up(text, one.start()) else b" %b " % one[0].translate(_TO_CODES), text)
    return text.translate(plain)


def _marks_up(text: bytes, at: int) -> bool:
    """Whether a character is Markdown rather than the operator before a number: it is not escaped, and a star touches a word or number on
    one side only (emphasis), or a line begins with it (a quotation, or an item of a list: with a space after it, and no number before the
    line, since a line may also break before an operator)."""
    char, before, spaced = text[at], text[at - 1 : at] or b"\n", text[at + 1 : at + 2] in b" \n"
    if char not in b"*-+>" or before == b"\\":
        return False
    if char == ord("*") and spaced != (before in b" \n"):
        return True
    if char != ord(">") and not spaced:
        return char == ord("*") and before[0] not in _OPERANDS
    while at and text[at - 1] in b" >*+-":
        at -= 1
    if not at or text[at - 1] != ord("\n") or char == ord(">"):
        return not at or text[at - 1] == ord("\n")
    at -= 1
    while at and text[at - 1] in b" *_`":
        at -= 1
    return not at or text[at - 1] not in _DIGITS
