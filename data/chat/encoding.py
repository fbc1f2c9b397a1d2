"""Bulk tokenization with exactly the tokenizer's ids, several times faster.

A byte-level BPE splits a text into words by a regular expression and merges each word separately. Ids of known words are therefore cached,
and only splitting remains: with Python's `re` for ASCII texts, else with `regex`. Ids of words come from the tokenizer's own model, so only
the splits could differ. They are verified:

- the form of the tokenizer must be known (`_pattern`), and agree on probe texts;
- each character must be split identically next to letters, digits, spaces and others, because regex engines differ in Unicode version;
  texts with any other character go to the tokenizer;
- one document of each chunk is also encoded by the tokenizer; a difference raises `EncodingMismatch` and ends the attempt.

Other Rust tokenizers get many texts per call, and Python tokenizers one at a time.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import regex
from numpy.typing import NDArray

from pedigree.data.chat.chat import Chat

Ids: TypeAlias = NDArray[np.unsignedinteger[Any]]

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern of `ByteLevel`; tokenizers, pre_tokenizers/byte_level.rs."""
GPT2_AFTER_DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""The same after digits were isolated: whitespace before a digit is then at the end of a piece."""
_PROPERTY = re.compile(r"\\p\{(\w+)\}")
MOST_WORDS, LONGEST_WORD = 200_000, 48
"""Limits of the cache, about 50 MB. Longer words rarely repeat."""
COMPANY = (
    "{}", "{0}{0}", "a{}", "{}a", "1{}", "{}1", "!{}", "{}!", " {}", "{} ", "  {}", "\n{}", "{}\n", " {}\n", "\t{} a", "a {}b",
    "'{}", "'{}e",
)  # fmt: skip
"""Contexts in which a character is tested: next to a letter, digit, punctuation, space, newline, apostrophe."""
PROBES = (
    "", " ", "   ", "\n\n  \n", "a  1", "a \n 1", "don't WE'LL I'm 'tis", "x=1;  y = 22_333\n\n\tprint(x)\r\n", "1234567890 3.14 1,000",
    "https://a.b/c?d=e&f#g", "  lead and trail  ", "``` \n```", "\u0966\u0967 \u00bd\u2167 e\u0301", "\U0001f600\U0001f468\u200d\U0001f469",
    "\u00fcber na\u00efve \u4f60\u597d\u3002 \u0441\u043b\u043e\u0432\u043e \u0645\u0631\u062d\u0628\u0627",
)  # fmt: skip


class EncodingMismatch(Exception):
    """The fast path gave different ids than the tokenizer."""


class Encoder:
    """Encodes texts with a chat's tokenizer."""

    def __init__(self, chat: Chat, dtype: np.dtype[Any], fast: bool = True) -> None:
        """
        Args:
            chat: provides the tokenizer.
            dtype: dtype of ids, large enough for the vocabulary.
            fast: whether to split into words here; otherwise use the tokenizer alone.
        """
        self.chat, self._dtype = chat, dtype
        self.end_of_turn: Ids = np.array([chat.eos_id], dtype)
        self._backend: Any = getattr(chat.tokenizer, "backend_tokenizer", None)
        self._words = _Words.of(self._backend, dtype) if fast and self._backend is not None else None

    @property
    def by_words(self) -> bool:
        """Whether texts are split into words here."""
        return self._words is not None

    def encode(self, texts: Iterable[tuple[str, bool]]) -> dict[tuple[str, bool], Ids]:
        """Ids, of shape (T,), for each (text, whether control tokens in it are plain characters)."""
        found: dict[tuple[str, bool], Ids] = {}
        left: dict[bool, list[str]] = {False: [], True: []}
        for text, plain in dict.fromkeys(texts):
            ids = self._words.ids(text, plain) if self._words is not None else None
            if ids is None:
                left[plain].append(text)
            else:
                found[text, plain] = np.frombuffer(ids, self._dtype)
        for plain, some in left.items():
            found |= {(text, plain): np.array(ids, self._dtype) for text, ids in zip(some, self.own(some, plain), strict=True)}
        return found

    def own(self, texts: Sequence[str], plain: bool) -> Sequence[Sequence[int]]:
        """The tokenizer's own ids."""
        if not texts:
            return []
        if self._backend is None:
            return [self.chat.text_ids(text, plain) for text in texts]
        before = self._backend.encode_special_tokens
        self._backend.encode_special_tokens = plain
        try:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        finally:
            self._backend.encode_special_tokens = before

    def prove(self, texts: Iterable[tuple[str, bool]]) -> None:
        """Compare with the tokenizer's own ids, text by text.

        Raises:
            EncodingMismatch: they differ.
        """
        for (text, plain), ids in self.encode(texts).items():
            if ids.tolist() != self.chat.text_ids(text, plain):
                raise EncodingMismatch(f"{text[:80]!r}")


class _Words(dict[str, bytes]):
    """Word → bytes of its ids under a byte-level BPE, cached or merged by the tokenizer's model."""

    def __init__(self, backend: Any, dtype: np.dtype[Any], pattern: str, special: set[str], added: set[str], composed: bool) -> None:
        super().__init__()
        self._dtype = dtype
        self._model, self._pre, self._composed = backend.model, backend.pre_tokenizer, composed
        self._ascii = re.compile(_for_ascii(pattern), re.ASCII)
        self._any = regex.compile(pattern)
        self._added = {plain: _any_of(added if plain else added | special) for plain in (False, True)}
        self._added_ids = {token: self._bytes([backend.token_to_id(token)]) for token in added | special}
        self._letters = _byte_letters()
        self._proven: dict[str, bool] = {}

    @classmethod
    def of(cls, backend: Any, dtype: np.dtype[Any]) -> "_Words | None":
        """None if the tokenizer's form is unknown, or its splits differ from it."""
        pattern, normalizer = _pattern(_serialized(backend.pre_tokenizer)), _serialized(backend.normalizer)
        tokens = backend.get_added_tokens_decoder().values()
        if pattern is None or normalizer not in (None, {"type": "NFC"}) or not _merges_bytes(backend.model) or any(map(_is_odd, tokens)):
            return None
        special = {token.content for token in tokens if token.special}
        made = cls(backend, dtype, pattern, special, {token.content for token in tokens} - special, normalizer is not None)
        if not all(made._are_proven(some) for some in ({chr(code) for code in range(128)}, set("".join(PROBES)))):
            return None
        return made if all(made._cut(text) == made._own_cut(text) for text in PROBES) else None

    def ids(self, text: str, plain: bool) -> bytes | None:
        """Ids of a text; None if only the tokenizer itself can encode it."""
        if not text.isascii() and not self._is_known(text):
            return None
        if len(self) > MOST_WORDS:
            self.clear()
        added = self._added[plain]
        if added is None or added.search(text) is None:
            return self._plain_ids(text)
        return b"".join(self._added_ids[part] if place % 2 else self._plain_ids(part) for place, part in enumerate(added.split(text)))

    def _plain_ids(self, text: str) -> bytes:
        return b"".join(map(self.__getitem__, self._cut(text)))

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(number.to_bytes(self._dtype.itemsize, "little") for number in ids)

    def __missing__(self, word: str) -> bytes:
        letters = "".join(map(self._letters.__getitem__, word.encode()))
        ids = self._bytes(token.id for token in self._model.tokenize(letters))
        if len(word) <= LONGEST_WORD:
            self[word] = ids
        return ids

    def _cut(self, text: str) -> list[str]:
        return (self._ascii if text.isascii() else self._any).findall(text)

    def _own_cut(self, text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in self._pre.pre_tokenize_str(text)]

    def _is_known(self, text: str) -> bool:
        """Whether all characters are verified, and the text is already normalized."""
        return self._are_proven(set(text)) and (not self._composed or unicodedata.is_normalized("NFC", text))

    def _are_proven(self, characters: set[str]) -> bool:
        for character in characters - self._proven.keys():
            assigned = unicodedata.category(character) not in ("Cn", "Cs")  # a later Unicode version, or a lone surrogate
            self._proven[character] = assigned and all(self._is_cut_alike(form.format(character)) for form in COMPANY)
        return all(map(self._proven.__getitem__, characters))

    def _is_cut_alike(self, text: str) -> bool:
        return "".join(cut := self._any.findall(text)) == text and cut == self._own_cut(text) and self._cut(text) == cut


def _serialized(part: Any) -> Any:
    """A normalizer or pre-tokenizer as in `tokenizer.json`."""
    return None if part is None else json.loads(part.__getstate__())


def _merges_bytes(model: Any) -> bool:
    """Whether the model is a deterministic BPE without word prefixes and suffixes."""
    settings = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return type(model).__name__ == "BPE" and not any(getattr(model, name) for name in settings)


def _is_odd(token: Any) -> bool:
    """Whether an added token is matched other than by its exact text."""
    strict = not (token.lstrip or token.rstrip or token.single_word) and bool(token.content)
    return not strict or (token.normalized and not token.content.isascii())


def _pattern(pre: Any) -> str | None:
    """The regular expression of a pre-tokenizer, as in `tokenizer.json`; None for an unknown form."""
    if pre is None:
        return None
    *before, last = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not before:
        return GPT2 if last["use_regex"] else None
    if len(before) > 1:
        return None
    (first,) = before
    if first["type"] == "Digits" and first["individual_digits"] and last["use_regex"]:
        return GPT2_AFTER_DIGITS
    is_split = first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"] and not last["use_regex"]
    pattern = first["pattern"].get("Regex") if is_split else None
    return pattern if pattern and _compiles(pattern) else None


def _compiles(pattern: str) -> bool:
    try:
        found = regex.compile(pattern), re.compile(_for_ascii(pattern), re.ASCII)
    except (re.error, regex.error):
        return False
    return not any(one.groups for one in found)  # `findall` would return groups


def _for_ascii(pattern: str) -> str:
    """The pattern for ASCII texts, with Unicode properties expanded, since `re` is twice as fast as `regex`."""
    made, inside, place = "", False, 0
    while place < len(pattern):
        named = _PROPERTY.match(pattern, place)
        width = 2 if pattern[place] == "\\" else 1
        if named is None:
            inside = (inside or pattern[place] == "[") and pattern[place] != "]"
            made, place = made + pattern[place : place + width], place + width
            continue
        have = "".join(re.escape(letter) for letter in map(chr, range(128)) if unicodedata.category(letter).startswith(named[1]))
        made, place = made + (have if inside else f"[{have}]" if have else "(?!)"), named.end()
    return made


def _any_of(tokens: set[str]) -> "re.Pattern[str] | None":
    """A pattern that finds the leftmost, longest one of some texts."""
    ordered = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _byte_letters() -> list[str]:
    """The character for each byte in byte-level tokenizers; GPT-2's `bytes_to_unicode`."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]
