"""Distribution of prompts by pass rate."""

import math
from collections import Counter
from collections.abc import Iterable


def histogram(rates: Iterable[float]) -> dict[str, int]:
    """Number of prompts with rate 0, with rate 1, and in between by tenths: {"none": 3, "0.4": 2, "all": 1}; empty bins are omitted.

    A bin includes its lower edge.
    """
    counts = Counter(_bin(rate) for rate in rates)
    return {name: counts[name] for name in ("none", *(f"0.{tenth}" for tenth in range(10)), "all") if counts[name]}


def _bin(rate: float) -> str:
    if rate <= 0:
        return "none"
    return "all" if rate >= 1 else f"0.{math.floor(10 * rate)}"
