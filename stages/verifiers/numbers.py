"""Answers that are numbers.

`arithmetic` {answer}   the last number of the reply is the answer ("17 + 25 = 42." counts, "42, since 17 + 25" does not).
`gsm` {answer}          the number after the last `####`, as in GSM8K; without one, the last number.
`gsm8k` {answer}        the last number as text, without thousands separators: the rule of open-instruct at e6c3044, for which Tülu 3's
                        rows were created.

Only the last number counts, so that a reply cannot score by listing many.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

NUMBER = re.compile(r"(?<![\w.])(?:(?<![)\]])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")
"""A standalone number. A minus sign belongs to it if it touches the digits and no operand precedes it."""
MINUS = str.maketrans({"−": "-", "–": "-", "\u2010": "-", "\u2011": "-"})
PLAIN = re.compile(r"[-+]?(?:\d*\.\d+|\d+)")
"""A number as parsed by `gsm8k`: with any sign before it, and possibly part of a word."""


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if the answer is missing or not a number."""
    exactly(verifier, {"name", "answer"})
    if not isinstance(verifier["answer"], str) or number(verifier["answer"]) is None:
        raise VerifierError(f"verifier {dict(verifier)!r}: the answer must be a number written as a text, e.g. '42'")


def number(text: str) -> Decimal | None:
    """The value of a text that is a single number (thousands separators allowed)."""
    text = text.strip().translate(MINUS)
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else None


def last_number(text: str) -> str | None:
    """The last number in a text, as written."""
    found = NUMBER.findall(text.translate(MINUS))
    return found[-1] if found else None


def _numeric(found: str | None, expected: str) -> Verdict:
    if found is None:
        return Verdict(0.0, None, "no number")
    right = number(found) == number(expected)
    return Verdict(1.0 if right else 0.0, found, "right" if right else f"{found} instead of {expected}")


def arithmetic(verifier: Mapping[str, Any], text: str) -> Verdict:
    return _numeric(last_number(text), verifier["answer"])


def gsm(verifier: Mapping[str, Any], text: str) -> Verdict:
    _, marker, tail = text.rpartition("####")
    if marker:
        found = NUMBER.search(tail.translate(MINUS))
        return _numeric(found.group() if found else None, verifier["answer"])
    return _numeric(last_number(text), verifier["answer"])


def gsm8k(verifier: Mapping[str, Any], text: str) -> Verdict:
    numbers = PLAIN.findall(re.sub(r"(\d),(\d)", r"\1\2", text))
    found = numbers[-1] if numbers else text
    right = found.lower() == verifier["answer"].replace(",", "").lower()  # some rows have commas, which no reply could match
    return Verdict(float(right), found if numbers else None, "right" if right else f"{found} instead of {verifier['answer']}")
