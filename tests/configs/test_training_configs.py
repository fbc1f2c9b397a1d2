"""Configs of training stages: fields that were added later, and the steps that a plan counts."""

import pytest
from pydantic import ValidationError

from pedigree.configs.methods.training import PreferenceTrain, Sft, training_plan

SFT = {"global_batch": 8, "max_length": 64, "optimizer": {"learning_rate": 1e-5}}


def test_a_field_that_was_added_later_is_in_no_key_until_it_is_set():
    """The identity of a stage is the dump of its config: what was trained before the field existed stays current."""
    added = {"max_steps": 3, "holdout": 0.1, "measure_every": 2}
    assert not Sft.model_validate(SFT).model_dump(mode="json").keys() & added.keys()
    assert Sft.model_validate(SFT | {"max_steps": None}) == Sft.model_validate(SFT)
    assert added.items() <= Sft.model_validate(SFT | added).model_dump(mode="json").items()


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (Sft, {"measure_every": 5}, "measure_every is 5, but no rows are held out: set holdout"),
        (Sft, {"holdout": 0.95}, "less than 0.9"),
        (Sft, {"max_steps": 0}, "greater than or equal to 1"),
        (PreferenceTrain, {"loss": {"type": "kto"}, "holdout": 0.1}, "kto trains on single answers: remove it"),
    ],
)
def test_what_cannot_be_measured_is_refused(config, fields, message):
    with pytest.raises(ValidationError, match=message):
        config.model_validate(SFT | fields)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, 13),  # 100 rows by 8
        ({"epochs": 2}, 26),
        ({"epochs": 2, "max_steps": 20}, 20),
        ({"epochs": 2, "max_steps": 30}, 26),
        ({"holdout": 0.5}, 7),  # of about 50 rows
    ],
)
def test_a_plan_counts_the_steps_that_are_made(fields, steps):
    assert training_plan(Sft.model_validate(SFT | fields), "sequences").steps_for(100) == steps
