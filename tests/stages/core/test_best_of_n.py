import itertools
import math
import random
import statistics

import pytest

from pedigree.stages.overoptimization.best_of_n import best_of_n, kl_best_of_n


def by_all_subsets(proxies, golds, n):
    """Every set of n answers; of several best by the proxy one is drawn evenly."""
    seen = []
    for subset in itertools.combinations(range(len(proxies)), n):
        best = max(proxies[i] for i in subset)
        chosen = [golds[i] for i in subset if proxies[i] == best]
        seen.append((best, statistics.fmean(chosen)))
    return statistics.fmean(p for p, _ in seen), statistics.fmean(g for _, g in seen)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("levels", [3, 1000], ids=["ties", "no ties"])
def test_the_estimate_is_the_mean_over_all_subsets(seed, levels):
    draw = random.Random(seed)
    count = draw.randrange(1, 9)
    proxies = [float(draw.randrange(levels)) for _ in range(count)]
    golds = [draw.random() for _ in range(count)]
    curve = best_of_n(proxies, golds, count)
    for n, point in enumerate(curve, start=1):
        assert point == pytest.approx(by_all_subsets(proxies, golds, n), abs=1e-12)


def test_by_hand():
    # proxies 1, 2, 3 with golds 0, 6, 3. n = 2: of the sets {1,2}, {1,3}, {2,3} the bests are 2, 3, 3 with golds 6, 3, 3.
    curve = best_of_n([3.0, 1.0, 2.0], [3.0, 0.0, 6.0], 3)
    assert curve == [(2.0, 3.0), (pytest.approx(8 / 3), pytest.approx(4.0)), (3.0, 3.0)]


def test_shares_are_those_of_exact_counts():
    """Bit by bit, because records hold the curve."""
    proxies = [float(index % 40) for index in range(100)]
    for n, (proxy, _) in enumerate(best_of_n(proxies, proxies, 100), start=1):
        ends = [sum(one <= level for one in proxies) for level in range(40)]
        belows = [0, *(math.comb(end, n) for end in ends)]
        assert proxy == math.fsum(
            (after - before) / math.comb(100, n) * level for level, (before, after) in enumerate(itertools.pairwise(belows))
        )


def test_many_answers_do_not_overflow():
    # a half is right: 1 - C(1000, n) / C(2000, n), in which C(2000, 1000) is about 2e600
    answers = [0.0] * 1000 + [1.0] * 1000
    curve = best_of_n(answers, answers, 1000)
    assert curve[0][1] == 0.5 and curve[1][1] == pytest.approx(1 - (1000 * 999) / (2000 * 1999)) and curve[-1] == (1.0, 1.0)


@pytest.mark.parametrize("largest", [0, 3])
def test_more_than_there_are_cannot_be_drawn(largest):
    with pytest.raises(ValueError, match=f"best of {largest} requires"):
        best_of_n([1.0, 2.0], [0.0, 1.0], largest)


def test_kl_by_hand():
    assert kl_best_of_n(1) == 0 and kl_best_of_n(4) == pytest.approx(math.log(4) - 0.75)
