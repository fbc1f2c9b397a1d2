"""Comparison by math-verify, for use in a separate process (`worker`)."""

import math_verify


def equal(found: str, answer: str) -> bool:
    """Whether math-verify considers the two equal; False if it cannot parse one."""
    expected, given = (math_verify.parse(f"${text}$", parsing_timeout=0) for text in (answer, found))
    return bool(expected and given) and math_verify.verify(expected, given, timeout_seconds=None)
