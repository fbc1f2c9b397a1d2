"""The way of adapters to the sampler: as they are, since weights in bf16 have no room for a first update."""

import json

import models
import pytest
import torch
from safetensors.torch import load_file
from test_rlvr import FIELDS, ONE_THREAD, prompt
from tiny_models import make

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Lora, Optimizer
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.training.adapters import plain_weights
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.trainer import Trainer

pytestmark = pytest.mark.slow
DOCS = [(document([3 + i, 7, 11 + i], [(5 * i + 13 * t) % 190 + 3 for t in range(12)]),) for i in range(16)]
"""Something to train on."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    make(folder / "payload")
    return models.publish(folder, "source_model", "policy")


def trainer_of(policy, lora: Lora, dtype, rate: float, **numerics) -> Trainer:
    numbers = Numerics(threads=1, **numerics)
    optimizer = Optimizer(learning_rate=rate, schedule="constant")
    return Trainer(load_policy(policy, numbers, lora), optimizer=optimizer, total_steps=99, dtype=dtype, numerics=numbers, seed=0)


def update(trainer: Trainer) -> None:
    trainer.backward(-trainer.module(collate(DOCS, Numerics(), 0))[0].mean())
    trainer.step()


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_first_update_is_lost_in_merged_bf16_weights_and_whole_in_the_adapters(policy, tmp_path, zero_stage):
    """Measured with Adam at 2e-5: merged and rounded to bf16, the first update keeps 6 % of its own direction, with an error of 98 % of
    its norm, and after 16 updates still one of 70 %; the file of the adapters has no error at all."""
    lora = Lora(rank=16, alpha=32.0)
    trainer = trainer_of(policy, lora, "bf16", 2e-5, zero_stage=zero_stage)
    update(trainer)
    trainer.export_adapters(tmp_path / "adapters", lora)
    trainer.export(tmp_path / "merged", Chat(policy.payload))
    trainer.close()
    base = {name: weight.bfloat16().float() for name, weight in load_file(policy.payload / "model.safetensors").items()}
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    lost = kept = whole = 0.0
    for layer in config["target_modules"]:
        a, b = (found[f"base_model.model.{layer}.lora_{side}.weight"].float() for side in "AB")
        delta = config["lora_alpha"] / config["r"] * (b @ a)
        survived = merged[f"{layer}.weight"].float() - base[f"{layer}.weight"]
        lost += (survived - delta).square().sum().item()
        kept += (survived * delta).sum().item()
        whole += delta.square().sum().item()
    assert whole > 0 and (lost / whole) ** 0.5 > 0.9 and kept / whole < 0.15  # merging: why the sampler does not get this


def test_the_file_holds_the_bits_that_the_trainer_computes_with(policy, tmp_path):
    lora = Lora(rank=3, targets=("q_proj", "down_proj"))
    trainer = trainer_of(policy, lora, "bf16", 2e-5)
    update(trainer)
    trainer.export_adapters(tmp_path / "adapters", lora)
    found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    own = {name: value for name, value in trainer.module.module.model.named_parameters() if ".lora_" in name}
    assert {f"base_model.model.{name.replace('.default', '')}" for name in own} == found.keys() and len(found) == 2 * 2 * 2
    for name, value in own.items():
        assert torch.equal(found[f"base_model.model.{name.replace('.default', '')}"], value)
    assert len([parts for _, parts, _ in plain_weights(trainer.module.module.model) if len(parts) == 3]) == 4
    trainer.close()


def test_a_rank_that_vllm_has_no_room_for_is_refused_in_the_recipe():
    with pytest.raises(ValueError, match=r"lora.rank is 513, but vLLM supports at most 512: lower it"):
        models.config_of("rlvr", **FIELDS, lora={"rank": 513})
    assert models.config_of("rlvr", **FIELDS, lora={"rank": 512}).lora.rank == 512


def test_rollouts_come_from_the_adapters_that_are_trained(policy, tmp_path):
    """The whole stage, with a scale of its own and layers of which vLLM fuses some: q, but not k and v. After each load the sampler's
    log-probs are those of the trainer, which has moved. What the stage leaves is a plain model."""
    pool = models.dataset(tmp_path / "pool", "prompt", [prompt(number) for number in range(10)])
    adapters = {"rank": 3, "alpha": 8.0, "rslora": True, "targets": ["q_proj", "up_proj", "down_proj"]}
    lora = {"lora": adapters, "optimizer": {"learning_rate": 1e-2, "schedule": "constant"}}
    given = {"policy": {"p": policy}, "prompts": {"pool": pool}}
    done = models.run(tmp_path / "job", "rlvr", FIELDS | lora | {"steps": 3}, given, ONE_THREAD)
    assert done["ok"], done
    rows = models.curve(models.a_job(tmp_path / "job"))
    assert all(row["logprob_gap"] < 1e-4 for row in rows) and rows[-1]["kl_k3"] > 1e-4
    assert done["metrics"]["update_norm"] > 0 and not (tmp_path / "job" / "weights").exists()
    assert not [path.name for path in (tmp_path / "job" / "out" / "payload").iterdir() if "adapter" in path.name]
