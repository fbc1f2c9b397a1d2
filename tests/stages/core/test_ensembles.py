import pytest
from pydantic import TypeAdapter

from pedigree.configs.methods.reward_terms import Ensemble
from pedigree.stages.core.ensembles import agreement, combine, disagreement


@pytest.mark.parametrize(
    ("ensemble", "expected"),
    [
        # of 1, 2 and 6 the mean is 3, the variance (4 + 1 + 9) / 3 = 14/3
        ({"type": "mean"}, 3.0),
        ({"type": "worst_case"}, 1.0),
        ({"type": "uncertainty_weighted"}, 3 - 0.5 * 14 / 3),
        ({"type": "uncertainty_weighted", "weight": 0.3}, 3 - 0.3 * 14 / 3),
    ],
)
def test_ensembles_by_hand(ensemble, expected):
    assert combine([1.0, 2.0, 6.0], TypeAdapter(Ensemble).validate_python(ensemble)) == pytest.approx(expected)


def test_disagreement_is_that_of_all_members():
    assert disagreement([1.0, 2.0, 6.0]) == pytest.approx((14 / 3) ** 0.5) and disagreement([2.0, 2.0]) == 0


def test_agreement_is_within_prompts_and_a_tie_is_an_order():
    # First prompt: answers (1, 10), (2, 20), (3, 15): 12 alike, 13 alike, 23 not. Second: one ties them, the other does not.
    # Across prompts nothing is compared.
    assert agreement([[(1, 10), (2, 20), (3, 15)], [(5, 0), (5, 1)]]) == pytest.approx(2 / 4)
    assert agreement([[(5, 1), (5, 1)]]) == 1.0 and agreement([[(1, 2)], []]) is None
