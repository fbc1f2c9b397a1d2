"""Trained weights reach engines through memory: the same names and bits as through a folder."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import weights_lab
from effects_lab import trainer_of
from safetensors.torch import load_file
from tiny_models import make
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from weights_lab import received

from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import Sampling
from pedigree.data.chat.chat import Chat
from pedigree.stages.rlvr import weight_transfer
from pedigree.stages.sampling.engines import Fleet, open_sampler
from pedigree.stages.sampling.sampler import Request, write_version

PLACEMENT = Placement(sampler_memory_gb=0.25, heartbeat_timeout_s=900)
REQUESTS = [Request([*range(3, 60), 200 + number % 5], number) for number in range(6)]
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def untie(folder: Path) -> None:
    """Gives the model of a folder an output head of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tie_word_embeddings=False)
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()
    model.save_pretrained(folder)


def mixture(folder: Path) -> None:
    """Replaces the model of a folder by one whose files have a matrix per expert, and whose parameters have them together."""
    config = json.loads((folder / "config.json").read_text())
    sizes: dict[str, Any] = {"vocab_size": config["vocab_size"], "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2}
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(folder)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Tied, untied and mixture, each with others of its architecture."""
    made = {}
    for name, change in {"tied": None, "untied": untie, "mixture": mixture}.items():
        for seed in (0, 1):
            folder = tmp_path_factory.mktemp(f"{name}-{seed}")
            make(folder / "payload", seed=seed)
            if change:
                change(folder / "payload")
            made[name, seed] = models.publish(folder, "source_model", "policy")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("tied", "fp32"), ("untied", "bf16"), ("mixture", "fp32")])
def test_a_reader_gets_names_and_bits_of_the_exported_folder_in_parts_of_bounded_size(policies, tmp_path, monkeypatch, name, dtype):
    monkeypatch.setattr(weight_transfer, "PART_BYTES", 1 << 16)
    trainer = trainer_of(policies[name, 1], {}, dtype=dtype)
    trainer.export(tmp_path / "out", Chat(policies[name, 1].payload))
    found, parts = received(trainer, version=5)
    trainer.close()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == written.keys() and all(torch.equal(found[one], written[one]) for one in written)
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.version for part in parts] == [None] * (len(parts) - 1) + [5]
    sizes = [sum(found[one].nbytes for one, *_ in part.tensors) for part in parts]
    assert len(parts) > 2 and all(size <= 1 << 16 for size, part in zip(sizes, parts, strict=True) if len(part.tensors) > 1)
    assert not os.path.exists(parts[-1].path)


@pytest.mark.slow
def test_on_two_ranks_no_rank_has_more_than_one_whole_parameter(policies, tmp_path):
    """ZeRO-3: what a rank has whole beside its shares, while it writes."""
    found = models.measuring(weights_lab.__file__, policies["tied", 1], tmp_path, {"3": {"zero_stage": 3, "world_size": 2}})("3")
    assert found["equal"] and found["whole"] == 1 < found["matrices"] and found["parts"] > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "numerics"),
    [
        pytest.param("tied", "fp32", {}, marks=pytest.mark.nightly),  # as in `test_weights_in_flight.py`
        ("untied", "bf16", {"bf16_products": "fp32"}),
        pytest.param("tied", "bf16", {"tensor_parallel": 2}, marks=pytest.mark.nightly),
        pytest.param("untied", "bf16", {"bf16_products": "units"}, marks=pytest.mark.nightly),
        pytest.param("tied", "fp32", {"head": "fp32"}, marks=pytest.mark.nightly),
    ],
)
def test_an_engine_computes_with_the_bits_of_the_folder(policies, tmp_path, monkeypatch, name, dtype, numerics):
    """Parts cut through layers, and the vocabulary is one that vLLM pads: its embeddings stay unloaded until the last part."""
    monkeypatch.setattr(weight_transfer, "PART_BYTES", 100_000)
    head = numerics.pop("head", "model") if "head" in (numerics := {**numerics}) else "model"
    first, second = (policies[name, seed] for seed in (0, 1))
    trainer = trainer_of(second, {}, dtype=dtype)
    trainer.export(tmp_path / "out", Chat(second.payload))
    write_version(tmp_path / "out", 3)
    assert json.loads((second.payload / "config.json").read_text())["vocab_size"] % 64
    settings: dict[str, Any] = {
        "dtype": dtype,
        "context": 128,
        "numerics": Numerics(threads=1, **numerics),
        "placement": PLACEMENT,
        "head": head,
    }

    with open_sampler(first.payload, inline=False, **settings) as engine:

        def said() -> str:
            return json.dumps([dataclasses.asdict(one) for one in engine.generate(REQUESTS, GREEDY, [2])])

        before = said()
        engine.load(tmp_path / "out")
        expected = said()
        engine.load(first.payload)
        assert said() == before != expected
        for _ in range(2):  # also over weights that came this way
            memory = weight_transfer.HostMemory(trainer)
            for part in weight_transfer.parts(trainer, memory, 3):
                Fleet([engine]).update(part)
            memory.close()
            assert said() == expected
    trainer.close()
