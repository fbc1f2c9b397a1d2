"""Gradient checkpointing by what it does: layers computed twice, less kept in between, one function, the same bits."""

from collections import Counter
from itertools import product

import models
import policy_lab
import pytest
import torch
from effects_lab import kept_for_backward
from sweeps import nightly_unless
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.failures import StageError
from pedigree.stages.preference_train import run as preference_train
from pedigree.stages.reward_model import run as reward_model
from pedigree.stages.rlvr import run as rlvr
from pedigree.stages.sft import run as sft
from pedigree.stages.training.logprobs import PolicyModule
from pedigree.stages.training.recomputation import recompute_layers
from pedigree.stages.training.trainer import Trainer

pytestmark = pytest.mark.slow
COMMON = {"dtype": "fp32", "optimizer": {"learning_rate": 1e-2}}
BATCHES = {"global_batch": 8, "max_length": 64, **COMMON}
SUPERVISED = {
    "sft": (sft, {}),
    "preference_train": (preference_train, {"loss": {"type": "dpo"}}),
    "reward_model": (reward_model, {}),
}
ALGORITHMS = {
    "grpo": {"type": "grpo", "kl": {"estimator": "k3", "coefficient": 0.1}},
    "ppo": {"type": "ppo", "critic": {"optimizer": {"learning_rate": 1e-2}}},
}

ADAPTERS = {"rank": 4}
SOME_STAGES = [("preference_train", ADAPTERS, "varlen"), ("reward_model", None, "sdpa")]


@pytest.fixture
def counts(monkeypatch):
    """`layers`: how often a decoder layer is computed for a gradient; `passes`: backward passes."""
    found, forward, backward = Counter[str](), LlamaDecoderLayer.forward, Trainer.backward

    def counted_forward(layer, *given, **named):
        found["layers"] += torch.is_grad_enabled()
        return forward(layer, *given, **named)

    def counted_backward(trainer, loss):
        found["passes"] += 1
        backward(trainer, loss)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted_forward)
    monkeypatch.setattr(Trainer, "backward", counted_backward)
    return found


def numerics_of(checkpointing: bool, **fields) -> Numerics:
    return Numerics(threads=1, micro_batch_tokens=128, gradient_checkpointing=checkpointing, **fields)


LAYERS = 2
"""Of the policy and the value model."""


@pytest.mark.proves("numerics.gradient_checkpointing")
@pytest.mark.parametrize(
    ("kind", "lora", "attention"),
    nightly_unless(SOME_STAGES, product(SUPERVISED, (None, ADAPTERS), ("varlen", "sdpa"))),
)
def test_stages_compute_each_layer_twice_and_the_same(tmp_path, policy, conversations, preferences, counts, kind, lora, attention):
    stage, fields = SUPERVISED[kind]
    given = {"data": {"d": conversations}} if kind == "sft" else {"preferences": {"d": preferences}}
    config = models.config_of(kind, **BATCHES, **fields, lora=lora)
    curves = []
    for checkpointing in (False, True):
        counts.clear()
        job = models.a_job(tmp_path / str(checkpointing), numerics_of(checkpointing, attention=attention))
        stage.run(config, {"policy": {"p": policy}, **given}, job)
        assert counts["passes"] > 4 and counts["layers"] == LAYERS * counts["passes"] * (2 if checkpointing else 1)
        curves.append([(row["loss"], row["grad_norm"]) for row in models.curve(job)])
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    ("name", "lora"),
    nightly_unless([("ppo", ADAPTERS)], product(ALGORITHMS, (None, ADAPTERS))),
)
def test_policy_gradients_and_value_models_compute_each_layer_twice_and_the_same(tmp_path, policy, counts, name, lora):
    config = policy_lab.config(ALGORITHMS[name], lora=lora, **COMMON)
    found = []
    for checkpointing in (False, True):
        job = models.a_job(tmp_path / str(checkpointing), numerics_of(checkpointing))
        learner = rlvr.make_learner(config, {"policy": {"p": policy}}, Chat(policy.payload), job)
        answers = policy_lab.made_answers(learner.trainer.module)
        counts.clear()
        found.append([done.metrics for done in policy_lab.steps(learner, answers, 2)])
        policy_lab.close(learner)
        assert counts["passes"] >= 2 and counts["layers"] == LAYERS * counts["passes"] * (2 if checkpointing else 1)
    assert found[0] == found[1]


SIZES = {"vocab_size": 300, "max_position_embeddings": 64}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SIZES}
CONFIGS = {
    "plain numbers read by attention": LlamaConfig(**WIDE, intermediate_size=64, num_key_value_heads=2, attention_dropout=0.5),
    "modules": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=300, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "numbers read by the layer itself": OPTConfig(
        **WIDE, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, layerdrop=0.5
    ),
    "two kinds": GPTNeoXConfig(**WIDE, intermediate_size=64, hidden_dropout=0.5, attention_dropout=0.5),
    "three kinds": PhiConfig(**WIDE, intermediate_size=64, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5),
    "noise of a router": MixtralConfig(
        **WIDE, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.5, attention_dropout=0.5
    ),
}
DOCUMENTS = [(document([5, 6, 7], [8 + number, 9, 2]),) for number in range(4)]


def policy_of(config: PreTrainedConfig) -> PolicyModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return PolicyModule(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa"), 1024)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_nothing_random_is_computed_whatever_the_models_config_says(config, checkpointing):
    """Neither in the forward pass nor in the one that is repeated: values and gradients are those of the plain model."""
    numerics = numerics_of(checkpointing, packing=False)
    batch = collate(DOCUMENTS, numerics, 0)
    training = policy_of(config).train()
    with torch.random.fork_rng():
        torch.manual_seed(1)  # by chance, all layers would be left out twice
        assert not torch.equal(training(batch)[0], training(batch)[0])  # it would matter
    plain = policy_of(config).eval()
    expected = plain(batch)[0]
    expected.sum().backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in plain.parameters() if parameter.grad is not None]).norm()
    trainer = Trainer(policy_of(config).train(), optimizer=Optimizer(**COMMON["optimizer"]), total_steps=1, dtype="fp32",
                      numerics=numerics, seed=0)  # fmt: skip
    with kept_for_backward(trainer.engine.module.parameters()) as kept:
        found = trainer.module(batch)[0]
    assert torch.equal(found, expected) and torch.equal(trainer.module(batch)[0], expected)
    with kept_for_backward(plain.parameters()) as all_kept:
        plain(batch)
    trainer.backward(found.sum())
    assert float(trainer.step().grad_norm) == pytest.approx(float(norm), rel=1e-5)
    trainer.close()
    assert kept["bytes"] < 0.6 * all_kept["bytes"] if checkpointing else kept["bytes"] == all_kept["bytes"]


def test_a_model_whose_layers_cannot_be_checkpointed_is_refused():
    with pytest.raises(StageError, match="gradient_checkpointing is true, but transformers cannot checkpoint a Linear: set it to false"):
        recompute_layers(nn.Linear(2, 2))
