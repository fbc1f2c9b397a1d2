"""pass@k: the probability that at least one of k answers is right, estimated from n answers."""

import math


def pass_at_k(drawn: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k answers is right (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k): one minus the share of the ways to choose k of the n answers in which all are wrong. 1 - (1 - c/n)^k would
    be biased.

    Args:
        drawn: n, independent answers to one item.
        right: c, number of right answers.
        k: number of answers allowed, at most n.

    Raises:
        ValueError: k is outside [1, n], or c outside [0, n].
    """
    if not 1 <= k <= drawn:
        raise ValueError(f"pass@{k} of {drawn} answers: k must be 1 to {drawn}; draw more samples or lower k")
    if not 0 <= right <= drawn:
        raise ValueError(f"{right} right answers of {drawn}: it must be 0 to {drawn}")
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)
