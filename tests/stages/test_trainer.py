"""The trainer in this process: what its weights are kept in."""

import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from effects_lab import trainer_of
from safetensors.torch import load_file
from sweeps import nightly_unless

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Optimizer
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.training import attention
from pedigree.stages.training.models import frozen, load_policy
from pedigree.stages.training.probe import in_fp32, probe
from pedigree.stages.training.trainer import Trainer, set_master_weight

pytestmark = pytest.mark.slow
STEP = 1e-4
"""Of Adam on a constant gradient; below 1, bf16 numbers are 2^-8 = 0.0039 apart, so that 1 - STEP rounds to 1."""
ZERO_STAGES = pytest.mark.parametrize("zero_stage", nightly_unless([1, 3], [1, 2, 3]))


@ZERO_STAGES
def test_steps_below_the_resolution_of_bf16_add_up_in_fp32(tmp_path, policy, zero_stage):
    """40 steps of 1e-4 reach 0.004: more than half of the distance to the next bf16 number below 1."""
    trainer = trainer_of(policy, {"zero_stage": zero_stage}, dtype="bf16", learning_rate=STEP, max_grad_norm=1e9)
    batch = collate([(document([5, 6, 7], [8, 9, 2]),)], trainer.numerics, 0)
    norms = []
    for step in range(40):
        trainer.backward(-trainer.module(batch)[0].sum())
        trainer.step()
        if step in (0, 39):
            trainer.export(tmp_path / str(step), Chat(policy.payload))
            norms.append(load_file(tmp_path / str(step) / "model.safetensors")["model.norm.weight"])
    trainer.close()
    assert norms[0].dtype == torch.bfloat16
    assert torch.equal(norms[0], torch.ones_like(norms[0]))
    assert (norms[1] < 1).float().mean() > 0.2


@ZERO_STAGES
def test_buffers_go_to_the_device_of_the_weights(policy, zero_stage, monkeypatch):
    """Such as rotary frequencies and the biases of a router, which are no parameters."""
    moved: dict[int, set[torch.device]] = {}
    plain = torch.Tensor.to

    def to(tensor, *arguments, **named):
        moved.setdefault(tensor.data_ptr(), set()).update(one for one in arguments if isinstance(one, torch.device))
        return plain(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
    trainer = trainer_of(policy, {"zero_stage": zero_stage}, dtype="bf16")
    fixed = trainer.fixed(load_policy(policy, trainer.numerics))
    try:
        buffers = [*trainer.engine.module.buffers(), *fixed.buffers()]
        assert buffers and all(trainer.device in moved[buffer.data_ptr()] for buffer in buffers)
    finally:
        trainer.close()


@ZERO_STAGES
def test_training_begins_with_the_weights_that_it_was_given_and_not_with_what_bf16_leaves_of_them(policy, zero_stage):
    from deepspeed.utils import safe_get_full_fp32_param

    given = {name: parameter.detach().clone() for name, parameter in load_policy(policy, Numerics()).named_parameters()}
    assert any(not torch.equal(weights, weights.bfloat16().float()) for weights in given.values())
    trainer = trainer_of(policy, {"zero_stage": zero_stage}, dtype="bf16")
    try:
        for name, parameter in trainer.engine.module.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(parameter), given[name]), name
    finally:
        trainer.close()


@ZERO_STAGES
def test_the_sum_over_micro_batches_reaches_the_optimizer_unrounded(policy, zero_stage):
    """A sum of three bf16 numbers of different size is rarely one itself."""
    trainer = trainer_of(policy, {"zero_stage": zero_stage}, dtype="bf16", max_grad_norm=1e9)
    found: list[torch.Tensor] = []

    def look(adamw: torch.optim.Optimizer, *_: object) -> None:
        found.extend(partition.grad.clone() for group in adamw.param_groups for partition in group["params"])

    trainer.engine.optimizer.optimizer.register_step_pre_hook(look)
    for answer in ([8, 9, 2], [11, 12, 13, 2], [14, 2]):
        trainer.backward(-trainer.module(collate([(document([5, 6, 7], answer),)], trainer.numerics, 0))[0].sum())
    trainer.step()
    trainer.close()
    gradients = torch.cat(found)
    touched = gradients[gradients != 0]
    assert gradients.dtype == torch.float32 and (touched != touched.bfloat16().float()).float().mean() > 0.5


def test_a_process_alone_needs_no_port(policy):
    """One that was free when it was looked for may be another job's when it is used."""
    trainer_of(policy, {}).close()
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, torch.distributed.HashStore)


def test_dropout_is_off_while_training(tmp_path):
    """Policy, reference and sampler are one function of their weights, also where the model's own config says otherwise."""
    policy = models.tiny_policy(tmp_path)
    config = policy.payload / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.5}))
    numerics = Numerics(threads=1, attention="sdpa")
    module = load_policy(policy, numerics)
    module.model.model.embed_tokens.register_forward_hook(lambda part, args, out: part.dropout(out))
    module.model.model.embed_tokens.dropout = torch.nn.Dropout(0.5)
    batch = collate([(document([5, 6, 7], [8, 9, 2]),)], numerics, 0)
    assert not torch.equal(module.train()(batch)[0], module(batch)[0])  # it would matter
    trainer = Trainer(module, optimizer=Optimizer(learning_rate=STEP), total_steps=1, dtype="fp32", numerics=numerics, seed=0)
    found = [trainer.module(batch)[0] for _ in range(2)]
    trainer.close()
    assert not module.training and torch.equal(*found)
    assert torch.allclose(found[0], load_policy(policy, numerics).eval()(batch)[0], atol=1e-6)


def test_weights_that_are_partitioned_are_probed_in_fp32_while_gathered(policy, monkeypatch):
    trainer = trainer_of(policy, {"zero_stage": 3}, dtype="bf16")
    probe(trainer.module, trainer.numerics, trainer.device)
    plain = frozen(frozen(load_policy(policy, trainer.numerics), trainer.device, torch.bfloat16), trainer.device, torch.float32)
    batch = collate([(document([5, 6, 7], [8, 9, 2]),)], trainer.numerics, 0)
    with in_fp32(trainer.module):
        found, _ = trainer.module(batch)
    assert torch.equal(found, plain(batch)[0])
    true = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *given: true(*given).flip(1))
    with pytest.raises(PedigreeError, match=r"self_attn differs by"):
        probe(trainer.module, trainer.numerics, trainer.device)
    trainer.close()


@pytest.mark.parametrize(("ranks", "size"), [(3, 7), (24, 5), (4, 8)])
def test_master_weights_are_set_on_any_number_of_ranks(monkeypatch, ranks, size):
    """By DeepSpeed's own functions on each of the ranks of ZeRO-3, which pads what they cannot divide."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    share, value = -(-size // ranks), torch.arange(1.0, size + 1).view(1, size)
    partitions = [torch.full((share,), math.nan) for _ in range(ranks)]
    stub: Any = SimpleNamespace(_swappable_optimizer_subgroup=lambda _: False)
    optimizer = SimpleNamespace(set_local_hp_param=partial(Stage3.set_local_hp_param, stub))
    shared = {"ds_id": 0, "ds_process_group": None, "ds_tensor": torch.empty(share), "requires_grad": True}
    for rank, partition in enumerate(partitions):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        stub._get_fp32_opt_state_partition = lambda *_, own=partition, **__: (own, 0)
        set_master_weight(SimpleNamespace(**shared, _z3_optimizer=optimizer), value)
    assert torch.cat(partitions).tolist() == [*range(1, size + 1), *[0] * (share * ranks - size)]
