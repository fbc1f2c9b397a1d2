"""The 25 checks of IFEval (Zhou et al. 2023, arXiv 2311.07911), with the results of the authors' program.

Names of checks and arguments are those of its data. An answer follows an instruction *strictly* if it does so unchanged, and *loosely* if
it does so in one of eight forms: unchanged, without its first line, its last, or both, and each of these without asterisks.

Three oddities of the original are kept for comparable scores: keywords are regular expressions; a text of unknown language counts as being
in the right one; words in capitals are counted by NLTK's tokenizer. For a missing argument the original draws one; here the check is
rejected. Two more differ: characters that Unicode can write in several ways are equal, and invisible ones do not count, so that they hide
no forbidden word; and commas of all scripts are commas.
"""

import json
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import regex

from pedigree.data.filters.languages import language
from pedigree.stages.verifiers.timed_patterns import matches
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

RELATIONS: dict[str, Callable[[int, int], bool]] = {"less than": operator.lt, "at least": operator.ge}
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
COMMAS = re.compile("[,،、﹐﹑，､︐︑]")

Arguments = Mapping[str, Any]
Holds = Callable[[Arguments, str], bool]


class Check(NamedTuple):
    """One kind of instruction, or one function of `constraints`."""

    arguments: Mapping[str, Callable[[Any], bool]]
    """Argument → predicate for valid values."""
    holds: Holds
    """The check, for a text that is not blank."""


def verify(verifier: Mapping[str, Any], text: str) -> Verdict:
    """1.0 if all instructions are followed in the verifier's mode, otherwise 0.0 or the share followed; the reason names the others."""
    followed = following(verifier["instructions"], text, verifier.get("mode", "strict"))
    failed = [one["id"] for one, holds in zip(verifier["instructions"], followed, strict=True) if not holds]
    if not text.strip():
        return Verdict(0.0, None, "empty")
    share = sum(followed) / len(followed) if verifier.get("score") == "share" else float(all(followed))
    return Verdict(share, None, f"not {', '.join(failed)}" if failed else "right")


def following(instructions: list[Arguments], text: str, mode: str) -> list[bool]:
    """Whether each instruction is followed; `mode` is strict or loose.

    Raises:
        VerifierError: a pattern from the data took too long.
    """
    text = visible(text)
    forms = loosened(text) if mode == "loose" else [text]
    given = [{field: visible(value) if isinstance(value, str) else value for field, value in one.items()} for one in instructions]
    return [any(form.strip() and CHECKS[one["id"]].holds(one, form) for form in forms) for one in given]


def visible(text: str) -> str:
    """A text without invisible characters, with each visible one written in one way."""
    return unicodedata.normalize("NFC", INVISIBLE.sub("", text))


def loosened(text: str) -> list[str]:
    """The eight forms of an answer, the unchanged one first."""
    lines = text.split("\n")
    forms = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return forms + [form.replace("*", "") for form in forms]


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError for a malformed verifier: an unknown check, or an argument that is missing, unknown or out of bounds."""
    exactly(verifier, {"name", "instructions"}, {"mode", "score"})
    for field, values in (("mode", ("strict", "loose")), ("score", ("all", "share"))):
        if verifier.get(field, values[0]) not in values:
            raise VerifierError(f"verifier {dict(verifier)!r}: {field} must be {values[0]} or {values[1]}")
    if not isinstance(verifier["instructions"], (list, tuple)) or not verifier["instructions"]:
        raise VerifierError(f"verifier {dict(verifier)!r} has no instructions: give a list of at least one")
    for one in verifier["instructions"]:
        name = one.get("id") if isinstance(one, Mapping) else None
        if not isinstance(name, str) or name not in CHECKS:
            raise VerifierError(f"instruction {one!r} has none of the ids {', '.join(sorted(CHECKS))}")
        wanted = CHECKS[name].arguments
        exactly(one, {"id", *wanted})
        wrong = [argument for argument, fits in wanted.items() if not fits(one[argument])]
        if wrong:
            raise VerifierError(f"instruction {dict(one)!r}: {', '.join(wrong)} is not what {name} takes")


# --- valid arguments ---------------------------------------------------------------------------------------------------


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _place(value: Any) -> bool:
    return type(value) is int and value >= 1


def _relation(value: Any) -> bool:
    return isinstance(value, str) and value in RELATIONS


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _letter(value: Any) -> bool:
    return isinstance(value, str) and len(value.strip()) == 1 == len(value)


def _pattern(value: Any) -> bool:
    try:
        return _text(value) and regex.compile(value) is not None
    except regex.error:
        return False


def _patterns(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_pattern(one) for one in value)


# --- the checks --------------------------------------------------------------------------------------------------------


def _found(pattern: str, text: str, flags: int = regex.IGNORECASE) -> list[str]:
    return [match.group() for match in matches(visible(pattern), text, flags)]


def _compared(number: Callable[[Arguments, str], int], bound: str, relation: str = "relation") -> Holds:
    """A check that compares a number computed from the text with a bound."""
    return lambda given, text: RELATIONS[given[relation]](number(given, text), given[bound])


def _in_language(text: str, code: str) -> bool:
    return language(text) in (code, None)


@cache
def _punkt() -> Any:
    """NLTK's sentence splitter for English, with its published parameters."""
    from zipfile import ZipFile

    from nltk.data import ZipFilePathPointer
    from nltk.tokenize.punkt import PunktSentenceTokenizer, load_punkt_params

    from pedigree.data.artifacts import assets

    splitter = PunktSentenceTokenizer()
    with ZipFile(assets.path("punkt")) as archive:
        splitter._params = load_punkt_params(ZipFilePathPointer(archive, "punkt_tab/english/"))
    return splitter


def sentences(text: str) -> list[str]:
    return _punkt().tokenize(text)


def _words(_: Arguments, text: str) -> int:
    return len(re.findall(r"\w+", text))


def _words_in_capitals(_: Arguments, text: str) -> int:
    from nltk.tokenize import NLTKWordTokenizer

    split = NLTKWordTokenizer().tokenize
    return sum(word.isupper() for sentence in sentences(text) for word in split(sentence))


def _letters(given: Arguments, text: str) -> int:
    return Counter(text.lower())[given["letter"].lower()]


def ended_lines(text: str, end: str) -> Iterator[str]:
    """Each line up to the last occurrence of `end`: a pattern that begins often but never ends takes time quadratic in the line's
    length."""
    for line in text.split("\n"):
        head, found, _ = line.rpartition(end)
        yield head + found


def placeholders(text: str) -> int:
    """Number of parts in square brackets."""
    return sum(len(re.findall(r"\[.*?\]", line)) for line in ended_lines(text, "]"))


def _paragraphs(given: Arguments, text: str) -> bool:
    """Paragraphs are divided by three asterisks; a divider at the beginning or end is ignored."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == given["num_paragraphs"]


def _first_word(given: Arguments, text: str) -> bool:
    """The n-th paragraph, divided by empty lines, begins with a word, and the number of paragraphs is right."""
    parts = text.split("\n\n")
    filled = sum(bool(part.strip()) for part in parts)
    chosen = parts[given["nth_paragraph"] - 1].strip() if given["nth_paragraph"] <= filled else ""
    if not chosen:
        return False
    word = re.split(r"[.,?!'\"]", chosen.split()[0].lstrip("'").lstrip('"'))[0]
    return filled == given["num_paragraphs"] and "".join(letter.lower() for letter in word) == given["first_word"].lower()


def _postscript(given: Arguments, text: str) -> bool:
    marker = given["postscript_marker"].strip()
    pattern = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}.get(marker, rf"\s*{marker.lower()}.*$")
    return bool(_found(pattern, text.lower(), regex.MULTILINE))


def _bullets(given: Arguments, text: str) -> bool:
    """The original's `^\\s*`, which also matches the empty lines above, finds the same bullets in quadratic time."""
    stars, dashes = r"^[^\S\n]*\*[^\*].*$", r"^[^\S\n]*-.*$"
    return sum(len(re.findall(pattern, text, re.MULTILINE)) for pattern in (stars, dashes)) == given["num_bullets"]


def _highlights(given: Arguments, text: str) -> bool:
    single = [found.strip("*") for found in re.findall(r"\*[^\n\*]*\*", text)]
    double = [found.removeprefix("**").removesuffix("**") for found in re.findall(r"\*\*[^\n\*]*\*\*", text)]
    return sum(bool(found.strip()) for found in single + double) >= given["num_highlights"]


def _sections(given: Arguments, text: str) -> bool:
    return len(_found(rf"\s?{given['section_spliter'].strip()}\s?\d+\s?", text, 0)) >= given["num_sections"]


def _json(_: Arguments, text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(_: Arguments, text: str) -> bool:
    titles = (title for line in ended_lines(text, ">>") for title in re.findall(r"<<[^\n]+>>", line))
    return any(title.lstrip("<").rstrip(">").strip() for title in titles)


def _two_responses(_: Arguments, text: str) -> bool:
    """Two different responses, divided by six asterisks; a divider at the beginning or end is ignored."""
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _quotation(_: Arguments, text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' == text[-1]


CHECKS: dict[str, Check] = {
    "change_case:capital_word_frequency": Check(
        {"capital_frequency": is_count, "capital_relation": _relation},
        _compared(_words_in_capitals, "capital_frequency", "capital_relation"),
    ),
    "change_case:english_capital": Check({}, lambda given, text: text.isupper() and _in_language(text, "en")),
    "change_case:english_lowercase": Check({}, lambda given, text: text.islower() and _in_language(text, "en")),
    "combination:repeat_prompt": Check(
        {"prompt_to_repeat": _text}, lambda given, text: text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())
    ),
    "combination:two_responses": Check({}, _two_responses),
    "detectable_content:number_placeholders": Check(
        {"num_placeholders": is_count}, lambda given, text: placeholders(text) >= given["num_placeholders"]
    ),
    "detectable_content:postscript": Check({"postscript_marker": _pattern}, _postscript),
    "detectable_format:constrained_response": Check({}, lambda given, text: any(answer in text for answer in ANSWERS)),
    "detectable_format:json_format": Check({}, _json),
    "detectable_format:multiple_sections": Check({"section_spliter": _pattern, "num_sections": is_count}, _sections),
    "detectable_format:number_bullet_lists": Check({"num_bullets": is_count}, _bullets),
    "detectable_format:number_highlighted_sections": Check({"num_highlights": is_count}, _highlights),
    "detectable_format:title": Check({}, _title),
    "keywords:existence": Check({"keywords": _patterns}, lambda given, text: all(_found(word, text) for word in given["keywords"])),
    "keywords:forbidden_words": Check(
        {"forbidden_words": _patterns}, lambda given, text: not any(_found(rf"\b{word}\b", text) for word in given["forbidden_words"])
    ),
    "keywords:frequency": Check(
        {"keyword": _pattern, "frequency": is_count, "relation": _relation},
        _compared(lambda given, text: len(_found(given["keyword"].strip(), text)), "frequency"),
    ),
    "keywords:letter_frequency": Check(
        {"letter": _letter, "let_frequency": is_count, "let_relation": _relation}, _compared(_letters, "let_frequency", "let_relation")
    ),
    "language:response_language": Check({"language": _text}, lambda given, text: _in_language(text, given["language"])),
    "length_constraints:nth_paragraph_first_word": Check(
        {"num_paragraphs": is_count, "nth_paragraph": _place, "first_word": _text}, _first_word
    ),
    "length_constraints:number_paragraphs": Check({"num_paragraphs": is_count}, _paragraphs),
    "length_constraints:number_sentences": Check(
        {"num_sentences": is_count, "relation": _relation}, _compared(lambda given, text: len(sentences(text)), "num_sentences")
    ),
    "length_constraints:number_words": Check({"num_words": is_count, "relation": _relation}, _compared(_words, "num_words")),
    "punctuation:no_comma": Check({}, lambda given, text: not COMMAS.search(text)),
    "startend:end_checker": Check(
        {"end_phrase": _text}, lambda given, text: text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())
    ),
    "startend:quotation": Check({}, _quotation),
}
"""Checks by the ids in IFEval's data."""
