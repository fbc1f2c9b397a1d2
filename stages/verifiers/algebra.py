"""What is computed by a computer algebra system, in a process apart: see `apart`."""

import math_verify


def equal(found: str, answer: str) -> bool:
    """Whether math-verify takes the one for the other; False where it can read one of them not at all."""
    expected, given = (math_verify.parse(f"${text}$", parsing_timeout=0) for text in (answer, found))
    return bool(expected and given) and math_verify.verify(expected, given, timeout_seconds=None)
