from itertools import combinations

import pytest

from pedigree.stages.evaluate.pass_at_k import pass_at_k


@pytest.mark.parametrize(
    ("drawn", "right", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),  # 1 - C(3,1)/C(4,1)
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (20, 1, 10, 1 / 2),  # the right one is among half of the twenty as often as not
        (20, 0, 10, 0.0),
        (20, 11, 10, 1.0),  # nine wrong answers cannot fill ten places
        (3, 3, 3, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_the_estimate_by_hand(drawn, right, k, expected):
    assert pass_at_k(drawn, right, k) == pytest.approx(expected)


@pytest.mark.parametrize("drawn", range(1, 8))
def test_it_is_the_mean_over_all_ways_to_choose_k(drawn):
    for right in range(drawn + 1):
        answers = [True] * right + [False] * (drawn - right)
        for k in range(1, drawn + 1):
            ways = [any(chosen) for chosen in combinations(answers, k)]
            assert pass_at_k(drawn, right, k) == pytest.approx(sum(ways) / len(ways))


def test_it_is_not_the_biased_one():
    assert pass_at_k(20, 2, 10) == pytest.approx(1 - (10 * 9) / (20 * 19))  # 0.763, where 1 - 0.9^10 = 0.651
    assert abs(pass_at_k(20, 2, 10) - (1 - 0.9**10)) > 0.1


@pytest.mark.parametrize(("drawn", "right", "k"), [(5, 1, 6), (5, 1, 0), (5, 6, 1), (5, -1, 1), (0, 0, 1)])
def test_what_cannot_be_estimated_is_refused(drawn, right, k):
    with pytest.raises(ValueError):
        pass_at_k(drawn, right, k)
