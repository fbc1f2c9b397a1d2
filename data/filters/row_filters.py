"""Filters that examine single rows."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pedigree.configs.base.frozen import digest
from pedigree.configs.rows.filters import (
    GROUP,
    NAME,
    ControlTokens,
    CutoffDates,
    EmptyOrRepeatedTurns,
    Identity,
    Keywords,
    Language,
    MaxCharacters,
    Pattern,
    Refusals,
    Repetition,
    RowFilter,
    Tokens,
    Turns,
)
from pedigree.data.chat.tools import texts_called, texts_offered
from pedigree.data.contamination.reading import INVISIBLE
from pedigree.data.filters import languages, patience
from pedigree.data.records.messages import CALL, RESULT, roles_of
from pedigree.data.records.records import texts, texts_within, turns_and_answers

Row = dict[str, Any]
Counted = int | str
"""Number of a row's tokens in training, or why the chat template rejects it."""

SHOWN = 100
"""Maximum characters of evidence."""
HEAD = 200
"""Characters at the start of a turn that are searched for refusals."""
QUOTES = " \t\r\n\"'“”‘’«»`*_>#-"
"""Characters that may precede a refusal."""
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f"
    r"\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, kana, Han and Hangul, where words have no spaces between them or joined endings."""
START_OF_WORD, END_OF_WORD = rf"(?<![^\W{UNSPACED}])", rf"(?![^\W{UNSPACED}])"
"""No letter or digit precedes or follows, except unspaced ones."""
CONDITION = "\x1f"
"""Separator in a folded text before a hash of further conditions for equality. Folded texts contain no other control whitespace."""
CODE = np.dtype("S8")
"""Language code; empty if undetected."""

_code = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_visible = re.compile(rf"[^\s{INVISIBLE}]")
_paragraph = re.compile(r"\n\s*\n")


def evidence_of(one: RowFilter, rows: Sequence[Row]) -> NDArray[np.object_]:
    """Evidence against each row, or None.

    Raises:
        PedigreeError: a regular expression takes too long for a row.
    """
    look = LOOKS[type(one)]
    named = f"filter {one.type}, regex {one.regex!r}," if isinstance(one, Pattern) else f"filter {one.type}"
    return noted(patience.each(lambda row: look(one, row), rows, lambda row: f"{named} in row {row.get('id')}"))


def noted(found: Iterable[str | None]) -> NDArray[np.object_]:
    return np.array([*found], np.object_)


# --- the texts of a row ------------------------------------------------------------------------------------------------


def _every(row: Mapping[str, Any]) -> list[str]:
    """All texts, plus those in calls and tools, decoded from JSON."""
    return [*texts(row), *texts_called(row), *texts_offered(row)]


def turns_by(row: Row, roles: Collection[str]) -> Iterator[str]:
    """Texts of some roles; answers of a preference count as the assistant's, and texts in template arguments as the system's."""
    yield from (message["content"] for message in row["messages"] if message["role"] in roles)
    if "system" in roles:
        yield from texts_within(row.get("template_arguments"))
    if "assistant" in roles:
        yield from (answer["text"] for answer in row.get("answers", ()))


def turns_in(row: Row) -> int:
    """Number of user and assistant turns; the answers of a preference count as one."""
    return sum(roles_of(row["messages"])[role] for role in ("user", "assistant")) + bool(row.get("answers"))


def taught(row: Row) -> Iterator[str]:
    """The assistant's turns, and a preference's best answer."""
    yield from turns_by({"messages": row["messages"]}, ("assistant",))
    yield from (answer["text"] for answer in row.get("answers", ())[:1])


def spaced(text: str) -> str:
    """A text with case and whitespace normalized."""
    return " ".join(_caseless(text).split())


def folded(row: Row) -> str:
    """The row's turns and answers, normalized and joined by a separator; then `CONDITION` and a hash of its template arguments, if any."""
    text, arguments = " \x00 ".join(map(spaced, turns_and_answers(row))), row.get("template_arguments")
    return f"{text}{CONDITION}{digest(arguments)[:32]}" if arguments else text


def fingerprint(row: Row, size: int) -> bytes:
    """A hash of `size` bytes of the row's folded texts and template arguments."""
    return hashlib.blake2b(folded(row).encode(), digest_size=size).digest()


# --- evidence against a row --------------------------------------------------------------------------------------------


def _max_characters(one: MaxCharacters, row: Row) -> str | None:
    length = sum(map(len, texts(row)))
    return f"{length} > {one.limit}" if length > one.limit else None


def too_few_or_many(one: Tokens, count: Counted) -> str | None:
    """Evidence against a row with this number of tokens, or that the chat template rejects."""
    return _outside(count, one.min, one.max) if isinstance(count, int) else count


def _outside(number: int, least: int | None, most: int | None) -> str | None:
    if least is not None and number < least:
        return f"{number} < {least}"
    return f"{number} > {most}" if most is not None and number > most else None


def _empty_or_repeated(one: EmptyOrRepeatedTurns, row: Row) -> str | None:
    turns = [(message["role"], message["content"]) for message in row["messages"] if message["role"] != RESULT]
    for role, text in [*turns, *(("assistant", answer["text"]) for answer in row.get("answers", ()))]:
        if not _visible.search(text):
            return f"nothing visible in a turn of the {role}"
    turns = _without_words_beside_calls(turns)
    for before in [turns, *([*turns, ("assistant", answer["text"])] for answer in row.get("answers", ()))]:
        spoken = [(role, spaced(text)) for role, text in before if role in ("user", "assistant")]
        for place, (role, text) in enumerate(spoken):
            if role == "assistant" and ("user", text) in spoken[max(0, place - 1) : place]:
                return f"the answer repeats the question: {text[:SHOWN]}"
            if role == "assistant" and ("assistant", text) in spoken[max(0, place - 2) : place]:
                return f"the answer repeats the answer before it: {text[:SHOWN]}"
    return None


def _without_words_beside_calls(turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(role, text) of the turns, without assistant texts followed by a call: these are not answers, and may repeat."""
    following = [role for role, _ in turns[1:]]
    return [turn for turn, after in zip_longest(turns, following) if (turn[0], after) != ("assistant", CALL)]


def _keywords(one: Keywords, row: Row) -> str | None:
    found = _words(one.words).search(_caseless("\n".join(_every(row))))
    return found and found.group()


@cache
def _words(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"{START_OF_WORD}(?:{'|'.join(re.escape(_caseless(word)) for word in words)}){END_OF_WORD}")


def _caseless(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _pattern(one: Pattern, row: Row) -> str | None:
    found = next((match for text in turns_by(row, one.roles) if (match := re.search(one.regex, text))), None)
    if one.keep == "matching":
        return None if found else "no match"
    return found and found.group()[:SHOWN]


def _refusals(one: Refusals, row: Row) -> str | None:
    heads = (spaced(_plain(text.lstrip(QUOTES)[:HEAD])) for text in taught(row))
    return next((head[:SHOWN] for head in heads if _beginnings(one.phrases).match(head)), None)


@cache
def _beginnings(phrases: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"(?:{'|'.join(re.escape(spaced(_plain(phrase))) for phrase in phrases)}){END_OF_WORD}")


def _identity(one: Identity, row: Row) -> str | None:
    allowed = {name.casefold() for name in one.allow}
    for text in map(_plain, taught(row)):
        for claim in _claims(one.claims, one.names):
            found = next((match for match in claim.finditer(text) if match[GROUP] and match[GROUP].casefold() not in allowed), None)
            if found:
                return found.group()[:SHOWN]
    return None


@cache
def _claims(claims: tuple[str, ...], names: tuple[str, ...]) -> list[re.Pattern[str]]:
    longest_first = sorted(names, key=lambda name: (-len(name), name))  # so that allowing GPT does not allow GPT-4
    named = f"(?P<{GROUP}>{'|'.join(map(re.escape, longest_first))}){END_OF_WORD}"
    return [re.compile(claim.replace(NAME, named), re.IGNORECASE) for claim in claims]


def _cutoff_dates(one: CutoffDates, row: Row) -> str | None:
    matches = (pattern.search(text) for text in map(_plain, taught(row)) for pattern in _each(one.patterns))
    found = next(filter(None, matches), None)
    return found and found.group()[:SHOWN]


@cache
def _each(patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
    return [re.compile(pattern, re.IGNORECASE) for pattern in patterns]  # compiled separately: flags and groups must not mix


def _plain(text: str) -> str:
    """A text with ASCII apostrophes."""
    return text.replace("’", "'")


def _repeats(one: Repetition, text: str) -> str | None:
    """Evidence of excessive repetition in a text."""
    words = text.split()
    if len(words) < one.min_words:
        return None
    for what, parts, bound in (("lines", text.split("\n"), one.lines), ("paragraphs", _paragraph.split(text), one.paragraphs)):
        share = repeated_share([stripped for part in parts if (stripped := part.strip())])
        if share > bound:
            return f"{share:.2f} in repeated {what} > {bound}"
    for size, bound in enumerate(one.ngrams, start=2):
        gram, count, share = most_frequent(words, size)
        if share > bound:
            return f"{share:.2f} in {count} times {gram[:SHOWN]!r} > {bound}"
    return None


def repeated_share(parts: Sequence[str]) -> float:
    """The share of characters in parts that repeat earlier ones."""
    total = sum(map(len, parts))
    return 1 - sum(map(len, set(parts))) / total if total else 0.0


def most_frequent(words: Sequence[str], size: int) -> tuple[str, int, float]:
    """(most frequent n-gram, the longest in case of ties; its count; its share of all words' characters).

    Overlapping occurrences all count; the share is at most 1, and 0 if nothing occurs twice.
    """
    grams = Counter(zip(*(words[start:] for start in range(size)), strict=False))
    if not grams:
        return "", 0, 0.0
    most = max(grams.values())
    length, gram = max((sum(map(len, gram)), gram) for gram, count in grams.items() if count == most)
    share = min(1.0, most * length / sum(map(len, words))) if most > 1 else 0.0
    return " ".join(gram), most, share


LOOKS: dict[type[RowFilter], Callable[[Any, Row], str | None]] = {
    MaxCharacters: _max_characters,
    Turns: lambda one, row: _outside(turns_in(row), one.min, one.max),
    EmptyOrRepeatedTurns: _empty_or_repeated,
    Keywords: _keywords,
    Pattern: _pattern,
    ControlTokens: lambda one, row: next((token for text in _every(row) for token in one.tokens if token in text), None),
    Refusals: _refusals,
    Identity: _identity,
    CutoffDates: _cutoff_dates,
    Repetition: lambda one, row: next(filter(None, (_repeats(one, text) for text in taught(row))), None),
}


# --- languages ---------------------------------------------------------------------------------------------------------


def language_codes(one: Language, rows: Sequence[Row]) -> NDArray[np.bytes_]:
    """The language of each row, [N], dtype `CODE`."""
    spoken = ("\n".join(turns_by(row, ("user", "assistant"))) for row in rows)
    heads = (_code.sub(" ", text)[: one.characters] for text in spoken)
    return np.array([languages.language_above(head, one.certainty) or "" for head in heads], CODE)
