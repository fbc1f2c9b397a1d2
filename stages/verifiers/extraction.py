"""Answers in a place that the prompt specifies: "Therefore, the answer is (C)".

`extracted` {answer, patterns [, compare]}   the last match of the first pattern that matches anywhere decides: its group is compared with
                                             the answer. A single pattern is the exact form; several are a cascade of looser ones.

Comparison as `text` ignores case, outer white space, brackets, quotes and a final period, so that `(A)` equals `a`; as `expression` it is
mathematical with `**` for powers, see `maths`: lists are equal in order, and may contain texts; as `number` it is by value.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import regex

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.verifiers.maths import equal
from pedigree.stages.verifiers.numbers import number
from pedigree.stages.verifiers.timed_patterns import matches
from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

COMPARISONS = ("text", "expression", "number")
COMMA = re.compile(r"(?<!\d),|,(?!\d{3}(?!\d))")
"""A comma that separates no thousands."""
WRAPPINGS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"), ("*", "*"), ("$", "$"))


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError for a missing answer, no patterns, a pattern without exactly one group, or an unknown comparison."""
    exactly(verifier, {"name", "answer", "patterns"}, {"compare"})
    if not isinstance(verifier["answer"], str) or not plain(verifier["answer"]):
        raise VerifierError(f"verifier {dict(verifier)!r}: the answer must be a text, e.g. 'B'")
    patterns = verifier["patterns"]
    if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(one, str) for one in patterns):
        raise VerifierError(f"verifier {dict(verifier)!r}: patterns must be a list of at least one regular expression")
    for pattern in patterns:
        try:
            groups = regex.compile(pattern).groups
        except regex.error as error:
            raise VerifierError(f"pattern {pattern!r} is no regular expression: {error}") from error
        if groups != 1:
            raise VerifierError(f"pattern {pattern!r} has {groups} groups: one group must hold the answer")
    if verifier.get("compare", "text") not in COMPARISONS:
        raise VerifierError(f"compare {verifier['compare']!r} is none of {', '.join(COMPARISONS)}")


def verify(verifier: Mapping[str, Any], text: str) -> Verdict:
    """Compare the extracted answer with the right one.

    Raises:
        VerifierError: a pattern or a comparison took too long.
    """
    found = extract(verifier["patterns"], text)
    if found is None:
        return Verdict(0.0, None, "no answer in its place")
    right = _same(found, verifier["answer"], verifier.get("compare", "text"))
    return Verdict(float(right), found, "right" if right else f"{found[:80]} instead of {verifier['answer']}")


def extract(patterns: list[str], text: str) -> str | None:
    """The group of the last match of the first pattern that matches."""
    for pattern in patterns:
        found = [one for match in matches(pattern, text) if (one := match.group(1)) is not None]
        if found:
            return found[-1].strip()
    return None


def plain(text: str) -> str:
    """A text without case, outer white space, brackets, quotes and final period."""
    text = text.strip().rstrip(".").strip()
    for opening, closing in WRAPPINGS:
        if text[0:1] == opening and text[-1:] == closing and text[1:-1].strip():
            return plain(text[1:-1])
    return text.casefold()


def _same(found: str, answer: str, compare: str) -> bool:
    if plain(found) == plain(answer):
        return True
    if compare == "text":
        return False
    if compare == "number":
        value = number(found)
        return value is not None and value == number(answer)
    ours, theirs = (re.sub(r"(?<=\*)\.\Z", "", one.strip()).strip("* ").replace("**", "^") for one in (found, answer))
    try:
        return _same_expression(ours, theirs)
    except PedigreeError as error:
        raise VerifierError(f"{found[:80]!r} could not be compared with {answer!r}: {error}") from error


def _same_expression(found: str, answer: str) -> bool:
    """Whether the whole texts are equal, or all parts of two lists without brackets are, in order."""
    lists = [COMMA.split(one) for one in (found, answer)]
    if any(re.search(r"[()\[\]{}]", one) for one in (found, answer)) or {*map(len, lists)} == {1}:
        return equal(found, answer)
    with suppress(PedigreeError):  # whether order matters, which it does here
        if equal(found, answer):
            return True
    return len(lists[0]) == len(lists[1]) and all(equal(one.strip(), other.strip()) for one, other in zip(*lists, strict=True))
