"""Adapters: only they are trained, and what is exported is the plain model that they stand for."""

import json

import models
import pytest
import torch
from safetensors.torch import load_file
from sweeps import nightly_unless

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Lora, Optimizer
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.postconditions import unmet
from pedigree.stages.rlvr.run import make_learner
from pedigree.stages.sft import run as sft
from pedigree.stages.training import models as loading
from pedigree.stages.training.adapters import merged, targets
from pedigree.stages.training.models import frozen, load_policy, load_reward_model
from pedigree.stages.training.reference import fixed_policy
from pedigree.stages.training.trainer import Trainer

pytestmark = pytest.mark.slow
LORA = Lora(rank=4, alpha=8.0)
SFT = {"global_batch": 8, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-2}, "lora": {"rank": 4, "alpha": 8.0}}
DOCS = [(document([5, 6, 7], [8, 9, 2]),), (document([11], [12, 2]),)]


def trainer_of(module, dtype="fp32", **numerics):
    optimizer = Optimizer(learning_rate=1e-2, schedule="constant")
    return Trainer(module, optimizer=optimizer, total_steps=9, dtype=dtype, numerics=Numerics(threads=1, **numerics), seed=0)


def weights(payload):
    return load_file(payload / "model.safetensors")


def take_steps(trainer, read, count=3):
    batch = collate(DOCS, Numerics(), 0)
    norms = []
    for _ in range(count):
        trainer.backward(-read(trainer.module, batch).sum())
        norms.append(float(trainer.step().grad_norm))
    with torch.no_grad():
        return read(trainer.module, batch), norms


def logps(module, batch):
    return module(batch)[0]


def test_the_merged_weight_by_hand():
    # W = [[1, 0], [0, 1]], B A = [[1], [2]] [[3, 4]] = [[3, 4], [6, 8]], times 0.5
    found = merged(torch.eye(2), torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0], [2.0]]), 0.5)
    assert found.tolist() == [[2.5, 2.0], [3.0, 5.0]]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])  # 8 / 4, 8 / √4
def test_alpha_is_divided_by_the_rank_or_its_root(policy, rslora, scale):
    module = load_policy(policy, Numerics(), Lora(rank=4, alpha=8.0, rslora=rslora))
    found = {layer.scaling["default"] for layer in module.modules() if hasattr(layer, "lora_A")}
    assert found == {scale}


def test_all_linear_is_the_body_and_names_are_ends_of_names(policy):
    model = load_policy(policy, Numerics()).model
    assert len(targets(model, LORA)) == 2 * 7 and not any("head" in name for name in targets(model, LORA))
    some = targets(model, Lora(targets=("q_proj", "layers.1.mlp.up_proj")))
    assert [name.removeprefix("model.layers.") for name in some] == ["0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"]
    with pytest.raises(StageError, match="no linear layer 'proj'; it has down_proj, gate_proj, k_proj"):
        targets(model, Lora(targets=("proj",)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_change_nothing_before_the_first_step(tmp_path, policy, dtype):
    trainer = trainer_of(load_policy(policy, Numerics(), LORA), dtype)
    trainer.export(tmp_path / "payload", Chat(policy.payload))
    trainer.close()
    before, after = weights(policy.payload), weights(tmp_path / "payload")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].to(trainer.dtype), after[name]) for name in before)


@pytest.mark.parametrize("zero_stage", nightly_unless([0, 3], [0, 1, 3]))
def test_the_export_is_the_function_that_was_trained_and_the_base_stays(tmp_path, policy, zero_stage):
    module = load_policy(policy, Numerics(), LORA)
    trainer = trainer_of(module, zero_stage=zero_stage)
    trained, _ = take_steps(trainer, logps)
    trainer.export(tmp_path / "payload", Chat(policy.payload))
    trainer.close()
    with torch.no_grad():
        loaded = load_policy(models.publish(tmp_path, "sft", "policy"), Numerics())(collate(DOCS, Numerics(), 0))[0]
        untrained = load_policy(policy, Numerics())(collate(DOCS, Numerics(), 0))[0]
    torch.testing.assert_close(loaded, trained, atol=1e-5, rtol=1e-5)
    assert (untrained - trained).abs().max() > 0.1
    before, after = weights(policy.payload), weights(tmp_path / "payload")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("proj.weight")}


@pytest.mark.parametrize(("zero_stage", "dtype"), nightly_unless([(0, "fp32"), (3, "bf16")], [(0, "fp32"), (2, "bf16"), (3, "bf16")]))
def test_with_adapters_switched_off_it_is_the_policy_before_training_bit_for_bit(policy, zero_stage, dtype):
    batch, numerics = collate(DOCS, Numerics(), 0), Numerics(threads=1, zero_stage=zero_stage)
    plain = trainer_of(load_policy(policy, Numerics(), LORA), dtype, zero_stage=zero_stage)
    expected = [take_steps(plain, logps, 1) for _ in range(3)]
    copied = frozen(load_policy(policy, Numerics()), plain.device, plain.dtype)
    plain.close()
    trainer = trainer_of(load_policy(policy, Numerics(), LORA), dtype, zero_stage=zero_stage)
    reference = fixed_policy(policy, policy, trainer, numerics)
    for after, norms in expected:
        assert torch.equal(reference(batch)[0], copied(batch)[0])
        trained, found = take_steps(trainer, logps, 1)
        assert torch.equal(trained, after) and found == norms  # training goes on as without a look at the reference
    assert (reference(batch)[0] - expected[-1][0]).abs().max() > 0.1
    trainer.close()


@pytest.mark.parametrize(("start", "lora", "loaded"), [(None, True, 1), ("same", True, 1), ("other", True, 2), (None, False, 2)])
def test_a_second_model_is_loaded_only_where_it_is_another(tmp_path, policy, conversations, monkeypatch, start, lora, loaded):
    reads = []
    monkeypatch.setattr(loading, "_load", lambda *given, load=loading._load, **changes: reads.append(given) or load(*given, **changes))
    fields = {"algorithm": {"type": "grpo", "kl": {"coefficient": 0.1}}, "steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2}
    fields |= {"sampling": {"max_tokens": 8}, "max_prompt_length": 8, "optimizer": {"learning_rate": 1e-3}, "dtype": "fp32"}
    config = models.config_of("rlvr", **fields, **({"lora": SFT["lora"]} if lora else {}))
    given = {"same": policy, "other": models.tiny_policy(tmp_path / "other", seed=5)}
    inputs = {"policy": {"p": policy}} | ({"reference": {"r": given[start]}} if start else {})
    learner = make_learner(config, inputs, Chat(policy.payload), models.a_job(tmp_path / "job", Numerics(threads=1)))
    learner.trainer.close()
    assert len(reads) == loaded


def test_a_reward_model_trains_its_head_beside_the_adapters(tmp_path, policy):
    module = load_reward_model(policy.payload, Numerics(), LORA, pad_token_id=0)
    head = module.model.score.weight.detach().clone()
    trainer = trainer_of(module)
    trained, _ = take_steps(trainer, lambda module, batch: module(batch))
    trainer.export(tmp_path / "payload", Chat(policy.payload))
    trainer.close()
    loaded = load_reward_model(tmp_path / "payload", Numerics())
    assert not torch.equal(loaded.model.score.weight, head)
    with torch.no_grad():
        torch.testing.assert_close(loaded(collate(DOCS, Numerics(), 0)), trained, atol=1e-5, rtol=1e-5)


def test_a_stage_trains_adapters_and_gives_a_plain_model(tmp_path, policy, conversations):
    given = {"policy": {"p": policy}, "data": {"d": conversations}}
    job = models.a_job(tmp_path / "one", Numerics(threads=1))
    metrics = sft.run(models.config_of("sft", **SFT, epochs=2), given, job)
    assert unmet("policy", metrics, job) is None
    losses = [row["loss"] for row in models.curve(job)]
    assert losses[-1] < losses[0] - 0.1
    assert not [path.name for path in (job.out / "payload").iterdir() if "adapter" in path.name]
    assert json.loads((job.out / "payload" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("zero_stage", nightly_unless([3], [0, 2, 3]))
def test_a_checkpoint_holds_no_frozen_weights_and_is_exact(tmp_path, zero_stage):
    big = models.tiny_policy(tmp_path / "policy", hidden=512)
    first = trainer_of(load_policy(big, Numerics(), LORA), zero_stage=zero_stage)
    take_steps(first, logps, 2)
    (tmp_path / "state").mkdir()
    first.save_state(tmp_path / "state")
    expected, _ = take_steps(first, logps, 2)
    first.close()
    second = trainer_of(load_policy(big, Numerics(), LORA), zero_stage=zero_stage)
    second.load_state(tmp_path / "state")
    found, _ = take_steps(second, logps, 2)
    second.close()
    assert torch.equal(found, expected) and second.steps == 4
    written = sum(path.stat().st_size for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert written < (big.payload / "model.safetensors").stat().st_size / 4  # moments and master weights of all would be three times it
