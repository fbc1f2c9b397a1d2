"""What `pedigree plan` says of a training step's memory, against torch's own account of it."""

import json
from collections.abc import Callable
from typing import Any

import effects_lab
import models
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pedigree.configs.language.execution import Numerics
from pedigree.pipelines.estimate import peak_memory
from pedigree.pipelines.estimate.peak_memory import Trained
from pedigree.pipelines.estimate.shapes import Shape, shape_of_config
from pedigree.stages.core.batches import collate, document
from pedigree.stages.training import attention
from pedigree.stages.training.logprobs import PolicyModule
from pedigree.stages.training.recomputation import recompute_layers
from pedigree.stages.training.trainer import TORCH_DTYPES

pytestmark = pytest.mark.slow
BUCKETS = {(1, "fp32"): 4, (2, "bf16"): 2, (3, "bf16"): 4, (3, "fp32"): 4}
"""Bytes of an element of DeepSpeed's bucket, which torch counts whole, and Linux only as far as it is written to."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{stage} {dtype}": ("footprint", {"world_size": 2, "zero_stage": stage, "dtype": dtype})
        for stage, dtype in [(0, "fp32"), (1, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp32")]
    },
    "checkpointed": ("footprint", {"world_size": 2, "zero_stage": 1, "dtype": "bf16", "gradient_checkpointing": True}),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return models.tiny_policy(tmp_path_factory.mktemp("policy"), hidden=512)


@pytest.fixture(scope="module")
def shape(policy) -> Shape:
    found = shape_of_config(json.loads((policy.payload / "config.json").read_text()))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory, policy) -> Callable[[str], Any]:
    return models.measuring(effects_lab.__file__, policy, tmp_path_factory.mktemp("footprints"), CASES)


def planned(name: str, shape: Shape, tokens: int) -> tuple[Trained, Numerics, dict[str, int]]:
    fields = dict(CASES[name][1])
    dtype = fields.pop("dtype")
    model, numerics = Trained(shape, dtype, shape.parameters), Numerics.model_validate(fields)
    return model, numerics, peak_memory.training(model, numerics, tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_the_plan_says(measured, shape, name):
    found = measured(name)
    model, numerics, terms = planned(name, shape, found["tokens"])
    bucket = BUCKETS.get((numerics.zero_stage, model.dtype), 0) * peak_memory.BUCKET
    filled = min(model.trained, peak_memory.BUCKET) * bucket // peak_memory.BUCKET
    most = found["most"] - bucket + filled if bucket else found["most"]
    assert peak_memory.total(terms) / most == pytest.approx(1, abs=0.25), (found, terms)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "per_parameter"), [("0 fp32", 4 + 8), ("1 bf16", 2 + 4 + 6), ("2 bf16", 2 + 6), ("3 bf16", 1 + 2 + 6)])
def test_between_steps_there_is_what_the_papers_count(measured, shape, name, per_parameter):
    """Weights, gradients where they stay allocated, and the optimizer's state; two ranks share what their stage shares."""
    found, bucket = measured(name), 4 * peak_memory.BUCKET if name.startswith("3") else 0
    assert (found["between"] - bucket) / shape.parameters == pytest.approx(per_parameter, rel=0.03)
    model, numerics, _ = planned(name, shape, found["tokens"])
    assert peak_memory.total(peak_memory.at_rest(model, numerics)) - bucket == pytest.approx(per_parameter * shape.parameters, rel=0.001)


SMALL = {
    "vocab_size": 512, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", "bf16"),
        ("mixtral", "fp32"),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.nightly)
            for kind in ("llama", "qwen2", "qwen3", "olmo2", "mixtral")
            for dtype in ("fp32", "bf16")
            if (kind, dtype) not in (("llama", "bf16"), ("mixtral", "fp32"))
        ),
    ],
)
def test_activations_are_what_autograd_keeps(kind, dtype):
    attention.register()
    config = AutoConfig.for_model(kind, **SMALL)
    shape = shape_of_config(config.to_dict())
    assert shape is not None
    units = [(document([5] * 30, [7] * 34),) for _ in range(8)]
    size, tokens, trained = peak_memory.SIZES[dtype], 8 * 64, 8 * 34
    logits = trained * (shape.vocabulary + shape.hidden) * size  # of what is trained, and the hidden states that they are made from
    kept = {}
    for checkpointed in (False, True):
        numerics = Numerics(gradient_checkpointing=checkpointed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[dtype], attn_implementation="varlen")
        module = PolicyModule(model.eval(), 4096)
        if checkpointed:
            recompute_layers(model)
        with effects_lab.kept_for_backward(module.parameters()) as found:
            module(collate(units, numerics, 0))[0].sum()
        kept[checkpointed] = found["bytes"] - logits
    assert peak_memory.activations(shape, Numerics(), size, tokens) / kept[False] == pytest.approx(1, abs=0.02)
    # the recomputed layer comes on top while the backward pass is in it
    recomputed = peak_memory.activations(shape, Numerics(gradient_checkpointing=True), size, tokens)
    assert (recomputed - tokens * peak_memory.layer_activations(shape, Numerics(), size)) / kept[True] == pytest.approx(1.1, abs=0.1)


@pytest.mark.parametrize(
    ("kind", "dtype", "kernel"), [("gemma2", "fp32", "varlen"), ("gemma2", "bf16", "eager"), ("llama", "bf16", "eager")]
)
def test_score_matrices_are_what_autograd_keeps(kind, dtype, kernel):
    attention.register()
    config = AutoConfig.for_model(kind, **SMALL)
    shape = shape_of_config(config.to_dict())
    assert shape is not None
    numerics = Numerics.model_validate({"attention": kernel, "packing": kernel == "varlen"})
    size, tokens = peak_memory.SIZES[dtype], 2 * 384
    model: Any = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[dtype], attn_implementation=kernel)
    module = PolicyModule(model.eval(), 4096)
    with effects_lab.kept_for_backward(module.parameters()) as found:
        module(collate([(document([5] * 380, [7] * 4),) for _ in range(2)], numerics, 0))[0].sum()
    scores = peak_memory.score_matrices(shape, numerics, size, tokens, 384)["score_matrices"]
    assert scores > 0.5 * peak_memory.activations(shape, numerics, size, tokens)
    assert (peak_memory.activations(shape, numerics, size, tokens) + scores) / found["bytes"] == pytest.approx(1, abs=0.1)
