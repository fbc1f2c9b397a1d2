"""What filters see in single rows, each by itself."""

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

from configs.base.frozen import digest
from configs.rows.filters import (
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
from data.chat.tools import texts_called, texts_offered
from data.contamination.reading import INVISIBLE
from data.filters import languages, patience
from data.records.messages import CALL, RESULT, roles_of
from data.records.records import texts_within

Row = dict[str, Any]
Seen = dict[int, str]
"""Against a row, by its place: what was seen in it."""
Counted = int | str
"""How many tokens a row has when it is trained on, or why they cannot be counted: the chat template refuses it."""

SHOWN = 100
"""Characters of what was seen."""
HEAD = 200
"""Of a turn, in which a refusal begins."""
QUOTES = " \t\r\n\"'“”‘’«»`*_>#-"
"""What may stand before it."""
END_OF_WORD = r"(?![^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])"
"""No letter or digit follows, but for kana, Han and Hangul: words there are written without spaces, or with endings joined to them."""
CONDITION = "\x1f"
"""Stands in a folded text, which has no other white space than spaces, before a hash of what else must be equal in two that are."""
CODE = np.dtype("S8")
"""A language's code; nothing where it is not told."""

_code = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_visible = re.compile(rf"[^\s{INVISIBLE}]")
_paragraph = re.compile(r"\n\s*\n")


def seen(one: RowFilter, rows: Sequence[Row]) -> Seen:
    """What speaks against some of the rows.

    Raises:
        TooSlow: a regular expression takes too long for one of them.
    """
    look = LOOKS[type(one)]
    named = f"filter {one.type}, regex {one.regex!r}," if isinstance(one, Pattern) else f"filter {one.type}"
    return noted(patience.each(lambda row: look(one, row), rows, lambda row: f"{named} in row {row.get('id')}"))


def noted(found: Iterable[str | None]) -> Seen:
    """What was seen row by row, of those rows in which something was."""
    return {place: said for place, said in enumerate(found) if said is not None}


# --- the texts of a row ------------------------------------------------------------------------------------------------


def texts(row: Mapping[str, Any]) -> list[str]:
    """Every text of a row: its messages, the answers of a preference, and what its template arguments say."""
    return _spoken(row) + list(texts_within(row.get("template_arguments")))


def _every(row: Mapping[str, Any]) -> list[str]:
    """The same, and what stands in calls and tools, as it was before it became JSON."""
    return [*texts(row), *texts_called(row), *texts_offered(row)]


def _spoken(row: Mapping[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]] + [answer["text"] for answer in row.get("answers", ())]


def said_by(row: Row, roles: Collection[str]) -> Iterator[str]:
    """The turns of some roles; the answers of a preference are the assistant's, and texts in template arguments the system's."""
    yield from (message["content"] for message in row["messages"] if message["role"] in roles)
    if "system" in roles:
        yield from texts_within(row.get("template_arguments"))
    if "assistant" in roles:
        yield from (answer["text"] for answer in row.get("answers", ()))


def turns_in(row: Row) -> int:
    """Turns of user and assistant; the answers of a preference are one."""
    return sum(roles_of(row["messages"])[role] for role in ("user", "assistant")) + bool(row.get("answers"))


def taught(row: Row) -> Iterator[str]:
    """The turns of the assistant, and the best answer of a preference."""
    yield from said_by({"messages": row["messages"]}, ("assistant",))
    yield from (answer["text"] for answer in row.get("answers", ())[:1])


def spaced(text: str) -> str:
    """A text, its case and space apart."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def folded(row: Row) -> str:
    """What the row's turns and answers say, their case and space apart, with a sign between them; after `CONDITION` a hash of its template
    arguments, where it has some."""
    said, arguments = " \x00 ".join(map(spaced, _spoken(row))), row.get("template_arguments")
    return f"{said}{CONDITION}{digest(arguments)[:32]}" if arguments else said


def fingerprint(row: Row, size: int) -> bytes:
    """A hash of so many bytes that rows with the same folded texts and template arguments share."""
    return hashlib.blake2b(folded(row).encode(), digest_size=size).digest()


# --- what speaks against a row -----------------------------------------------------------------------------------------


def _max_characters(one: MaxCharacters, row: Row) -> str | None:
    length = sum(map(len, texts(row)))
    return f"{length} > {one.limit}" if length > one.limit else None


def _turns(one: Turns, row: Row) -> str | None:
    return _outside(turns_in(row), one.min, one.max)


def too_few_or_many(one: Tokens, count: Counted) -> str | None:
    """What speaks against a row of so many tokens, or against one of which they cannot be counted."""
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
    """(role, text) of the turns, but for what is said in one that goes on with a call: that is no answer, and may be said again."""
    following = [role for role, _ in turns[1:]]
    return [turn for turn, after in zip_longest(turns, following) if (turn[0], after) != ("assistant", CALL)]


def _keywords(one: Keywords, row: Row) -> str | None:
    found = _words(one.words).search("\n".join(_every(row)).casefold())
    return found and found.group()


@cache
def _words(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(rf"(?<!\w){re.escape(word.casefold())}(?!\w)" for word in words))


def _pattern(one: Pattern, row: Row) -> str | None:
    found = next((match for text in said_by(row, one.roles) if (match := re.search(one.regex, text))), None)
    if one.keep == "matching":
        return None if found else "no match"
    return found and found.group()[:SHOWN]


def _control_tokens(one: ControlTokens, row: Row) -> str | None:
    return next((token for text in _every(row) for token in one.tokens if token in text), None)


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
    longest_first = sorted(names, key=lambda name: (-len(name), name))  # who may say GPT may not say GPT-4
    named = f"(?P<{GROUP}>{'|'.join(map(re.escape, longest_first))}){END_OF_WORD}"
    return [re.compile(claim.replace(NAME, named), re.IGNORECASE) for claim in claims]


def _cutoff_dates(one: CutoffDates, row: Row) -> str | None:
    matches = (pattern.search(text) for text in map(_plain, taught(row)) for pattern in _each(one.patterns))
    found = next(filter(None, matches), None)
    return found and found.group()[:SHOWN]


@cache
def _each(patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
    return [re.compile(pattern, re.IGNORECASE) for pattern in patterns]  # joined, flags and groups of one would be those of all


def _plain(text: str) -> str:
    """With one form of apostrophes."""
    return text.replace("’", "'")


def _repetition(one: Repetition, row: Row) -> str | None:
    return next((said for text in taught(row) if (said := _repeats(one, text)) is not None), None)


def _repeats(one: Repetition, text: str) -> str | None:
    """What of a text stands there more often than it may."""
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
    """The share of the characters of all parts that is in those which stand there before."""
    total = sum(map(len, parts))
    return 1 - sum(map(len, set(parts))) / total if total else 0.0


def most_frequent(words: Sequence[str], size: int) -> tuple[str, int, float]:
    """(the most frequent n-gram, of several the one of most characters; how often; its share of the characters of all words).

    Occurrences that overlap count each; a share is at most 1, and 0 where nothing occurs twice.
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
    Turns: _turns,
    EmptyOrRepeatedTurns: _empty_or_repeated,
    Keywords: _keywords,
    Pattern: _pattern,
    ControlTokens: _control_tokens,
    Refusals: _refusals,
    Identity: _identity,
    CutoffDates: _cutoff_dates,
    Repetition: _repetition,
}


# --- languages ---------------------------------------------------------------------------------------------------------


def language_codes(one: Language, rows: Sequence[Row]) -> NDArray[np.bytes_]:
    """The language of each row, [N] of `CODE`."""
    spoken = ("\n".join(said_by(row, ("user", "assistant"))) for row in rows)
    heads = (_code.sub(" ", text)[: one.characters] for text in spoken)
    return np.array([languages.told(head, one.certainty) or "" for head in heads], CODE)
