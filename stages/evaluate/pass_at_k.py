"""How likely one of k answers is right, from n answers that were drawn."""

import math


def pass_at_k(drawn: int, right: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of k answers is right (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k): all but the share of the ways to choose k of the n answers that are wrong throughout. It is the mean of
    "one of them is right" over all these ways, where 1 - (1 - c/n)^k would be biased.

    Args:
        drawn: n, answers to one item, independent of each other.
        right: c, how many of them are right.
        k: answers that one may give, at most n.

    Raises:
        ValueError: k lies outside [1, n], or c outside [0, n].
    """
    if not 1 <= k <= drawn:
        raise ValueError(f"pass@{k} of {drawn} answers: k must be 1 to {drawn}; draw more samples or lower k")
    if not 0 <= right <= drawn:
        raise ValueError(f"{right} right answers of {drawn}: it must be 0 to {drawn}")
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)
