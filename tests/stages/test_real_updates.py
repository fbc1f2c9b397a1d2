"""A training stage that changed nothing has failed, whatever it reports; one that did says by how much."""

import shutil

import models
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from pedigree.configs.language.execution import Numerics

pytestmark = pytest.mark.slow
ONE_THREAD = Numerics(threads=1)
FIELDS = {"global_batch": 4, "max_length": 64, "optimizer": {"learning_rate": 1e-3}}
KINDS = {
    "sft": ("data", {}),
    "reward_model": ("preferences", {"holdout": 0.0}),
    "preference_train": ("preferences", {"loss": {"type": "dpo"}}),
}


@pytest.fixture(scope="module")
def given(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    data = {
        "data": models.dataset(folder / "data", "conversation", models.arithmetic(8)),
        "preferences": models.dataset(folder / "preferences", "preference", models.sums_or_not_known(8)),
    }
    return {kind: {"policy": {"p": policy}, port: {"d": data[port]}} for kind, (port, _) in KINDS.items()}


@pytest.mark.parametrize(("kind", "lora"), [("sft", {"rank": 4}), ("reward_model", None), ("preference_train", None)])
def test_the_size_of_the_update_is_told(tmp_path, policy, given, kind, lora):
    done = models.run(tmp_path / "job", kind, FIELDS | KINDS[kind][1] | {"dtype": "fp32", "lora": lora}, given[kind], ONE_THREAD)
    assert done["ok"], done
    before, after = (load_file(place / "model.safetensors") for place in (policy.payload, tmp_path / "job/out/payload"))
    squares = sum((after[name] - before[name]).double().square().sum() for name in before if name in after)
    assert done["metrics"]["update_norm"] == pytest.approx(torch.as_tensor(squares).sqrt().item(), rel=1e-5) and squares > 0
    assert 0 < done["metrics"]["update_relative"] < 1


@pytest.mark.parametrize(("kind", "lora"), [("sft", None), ("preference_train", {"rank": 4})])
def test_an_update_that_the_dtype_cannot_hold_is_a_failure(tmp_path, policy, given, kind, lora):
    """Adam moves every weight by about the learning rate: 1e-20 is nothing beside 2^-9 of any weight that bf16 holds exactly."""
    shutil.copytree(policy.payload, tmp_path / "policy" / "payload")
    file = tmp_path / "policy" / "payload" / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    start = {"policy": {"p": models.publish(tmp_path / "policy", "source_model", "policy")}}
    fields = FIELDS | KINDS[kind][1] | {"dtype": "bf16", "lora": lora, "optimizer": {"learning_rate": 1e-20, "schedule": "constant"}}
    done = models.run(tmp_path / "job", kind, fields, given[kind] | start, ONE_THREAD)
    assert (done["ok"], done["cause"]) == (False, "refused")
    assert "it ended without an error, but its 20 tensors differ" in done["message"]
    assert "less than the rounding error of one weight in bfloat16" in done["message"]
    assert "raise optimizer.learning_rate" in done["message"]


def test_a_learning_rate_of_zero_is_refused_in_the_recipe():
    with pytest.raises(ValidationError, match=r"optimizer.learning_rate\n.*greater than 0"):
        models.config_of("sft", **(FIELDS | {"optimizer": {"learning_rate": 0.0}}))
