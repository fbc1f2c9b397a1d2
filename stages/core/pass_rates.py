"""How hard prompts are: what share of the answers to each is right."""

import math
from collections import Counter
from collections.abc import Iterable


def histogram(rates: Iterable[float]) -> dict[str, int]:
    """How many prompts nobody got right, all did, and in between by tenths: {"none": 3, "0.4": 2, "all": 1}; empty ones are left out.

    A rate that is a tenth itself counts to the tenth that it begins.
    """
    counts = Counter(_bin(rate) for rate in rates)
    return {name: counts[name] for name in ("none", *(f"0.{tenth}" for tenth in range(10)), "all") if counts[name]}


def _bin(rate: float) -> str:
    if rate <= 0:
        return "none"
    return "all" if rate >= 1 else f"0.{math.floor(10 * rate)}"
