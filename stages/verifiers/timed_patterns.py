"""Regular expressions from data, which may take forever."""

import regex

from pedigree.stages.verifiers.verdict import VerifierError

SEARCH_SECONDS = 2.0
"""Time limit for one pattern."""


def matches(pattern: str, text: str, flags: int = 0) -> list[regex.Match[str]]:
    """All matches of a pattern.

    Raises:
        VerifierError: it takes too long on this text.
    """
    try:
        return list(regex.finditer(pattern, text, flags, timeout=SEARCH_SECONDS))
    except TimeoutError as error:
        took = f"took more than {SEARCH_SECONDS:g} s on an answer of {len(text)} characters"
        raise VerifierError(f"the pattern {pattern!r} {took}") from error
