"""Best of n: the value by one reward of the answer chosen by another, as a function of n (Gao et al. 2022, arXiv 2210.10760).

Every set of n of a prompt's N answers is equally likely to be drawn. The mean over all sets is exact and costs a sort: the
answer of rank i (by the proxy, worst first) is the best of C(i - 1, n - 1) of the C(N, n) sets. This is the unbiased
estimator of Nakano et al. 2021 (arXiv 2112.09332, appendix I). Equal proxies share their sets evenly.
"""

import math
from collections.abc import Sequence
from itertools import groupby


def best_of_n(proxies: Sequence[float], golds: Sequence[float], largest: int) -> list[tuple[float, float]]:
    """(expected proxy, expected gold) of the answer with the highest proxy, for n = 1 ... `largest`, of one prompt.

    Args:
        proxies: for each answer, the reward that chooses.
        golds: for each answer, the reward that evaluates.
        largest: at most the number of answers, because sets are drawn without replacement.
    """
    count = len(proxies)
    if not 1 <= largest <= count:
        raise ValueError(f"best of {largest} requires {largest} answers, but there are {count}")
    ranked = sorted(zip(proxies, golds, strict=True))
    levels: list[tuple[float, float, int]] = []  # (proxy, mean gold, answers up to here), the worst first
    end = 0
    for proxy, group in groupby(ranked, key=lambda pair: pair[0]):
        shared = [gold for _, gold in group]
        end += len(shared)
        levels.append((proxy, math.fsum(shared) / len(shared), end))
    curve = []
    totals = [1] * len(levels)  # sets of n drawn from each level and those below it
    for n in range(1, largest + 1):
        # C(N, n) = C(N, n - 1) (N - n + 1) / n
        totals = [below * (end - n + 1) // n for below, (_, _, end) in zip(totals, levels, strict=True)]
        proxy_sum, gold_sum, before = [], [], 0
        for below, (proxy, gold, _) in zip(totals, levels, strict=True):
            share = (below - before) / totals[-1]
            proxy_sum.append(share * proxy)
            gold_sum.append(share * gold)
            before = below
        curve.append((math.fsum(proxy_sum), math.fsum(gold_sum)))
    return curve


def kl_best_of_n(n: int) -> float:
    """log n - (n - 1) / n: KL(best of n ‖ policy) in nats, an upper bound if answers repeat (Stiennon et al. 2020, appendix G.3)."""
    return math.log(n) - (n - 1) / n
