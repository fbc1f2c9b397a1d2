"""A training stage that changed nothing has failed, whatever it reports; one that did says by how much."""

import shutil

import models
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from pedigree.configs.language.execution import Numerics

pytestmark = pytest.mark.slow
FIELDS = {"global_batch": 4, "max_length": 64, "optimizer": {"learning_rate": 1e-3}}


@pytest.mark.parametrize(
    ("kind", "more"), [("sft", {"lora": {"rank": 4}}), ("reward_model", {"holdout": 0.0})], ids=["adapters", "with a new head"]
)
def test_the_size_of_the_update_is_told(tmp_path, policy, conversations, preferences, kind, more):
    given = {"policy": {"p": policy}, **({"data": {"d": conversations}} if kind == "sft" else {"preferences": {"d": preferences}})}
    done = models.run(tmp_path / "job", kind, FIELDS | {"dtype": "fp32"} | more, given, Numerics(threads=1))
    assert done["ok"], done
    before, after = (load_file(place / "model.safetensors") for place in (policy.payload, tmp_path / "job/out/payload"))
    squares = sum((after[name] - before[name]).double().square().sum() for name in before if name in after)
    assert done["metrics"]["update_norm"] == pytest.approx(torch.as_tensor(squares).sqrt().item(), rel=1e-5) and squares > 0
    assert 0 < done["metrics"]["update_relative"] < 1


def test_an_update_that_the_dtype_cannot_hold_is_a_failure(tmp_path, policy, conversations):
    """Adam moves every weight by about the learning rate: 1e-20 is nothing beside 2^-9 of any weight that bf16 holds exactly."""
    shutil.copytree(policy.payload, tmp_path / "policy" / "payload")
    file = tmp_path / "policy" / "payload" / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    given = {"policy": {"p": models.publish(tmp_path / "policy", "source_model", "policy")}, "data": {"d": conversations}}
    fields = FIELDS | {"dtype": "bf16", "optimizer": {"learning_rate": 1e-20, "schedule": "constant"}}
    done = models.run(tmp_path / "job", "sft", fields, given, Numerics(threads=1))
    assert (done["ok"], done["cause"]) == (False, "refused")
    assert "it ended without an error, but its 20 tensors differ" in done["message"]
    assert "less than the rounding error of one weight in bfloat16" in done["message"]
    assert "raise optimizer.learning_rate" in done["message"]


def test_a_learning_rate_of_zero_is_refused_in_the_recipe():
    with pytest.raises(ValidationError, match=r"optimizer.learning_rate\n.*greater than 0"):
        models.config_of("sft", **(FIELDS | {"optimizer": {"learning_rate": 0.0}}))
