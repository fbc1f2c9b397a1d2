"""Models that compute with persistent buffers, which are not trained but belong to the model: every folder has them."""

from contextlib import nullcontext

import pytest
import torch
from effects_lab import trainer_of
from models import a_job, config_of, publish
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.architectures import ALL, Architecture
from pedigree.data.chat.chat import Chat
from pedigree.stages.job.failures import StageError
from pedigree.stages.training import trainer as trainers
from pedigree.stages.training.imported_models import imported, load_folder
from pedigree.stages.training.models import load_policy, refuse_without_scores
from pedigree.stages.training.stored_dtypes import is_stored_in_bf16, to_dtype

LAYER_TYPES = ["sliding_attention", "full_attention"]
GEMMA4 = {
    "tie_word_embeddings": True, "head_dim": 32, "global_head_dim": 32, "sliding_window": 6, "layer_types": LAYER_TYPES,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 0,
}  # fmt: skip
BY_NAME = {one.name: one for one in ALL} | {"gemma4_text": Architecture("gemma4_text", GEMMA4)}
BUFFERS = {
    "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
    "gemma4_text": "model.layers.1.layer_scalar",
}
IDS = torch.randint(3, 290, (1, 24), generator=torch.Generator().manual_seed(5))


def made(folder, kind, policy, dtype=torch.bfloat16):
    """A policy of random weights and buffers, with another's tokenizer. Its buffers are no bf16 numbers."""
    architecture = BY_NAME[kind]
    model = Architecture(kind, architecture.changes | {"vocab_size": 320}).model()
    random = torch.Generator().manual_seed(9)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.copy_(1 + torch.rand(buffer.shape, generator=random))
    to_dtype(model, dtype)
    model.save_pretrained(folder / "payload")
    Chat(policy.payload).tokenizer.save_pretrained(folder / "payload")
    return publish(folder, "source_model", "policy")


def logits(payload):
    found, loaded = AutoModelForCausalLM.from_pretrained(payload, dtype=torch.float32, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    with torch.no_grad():
        return found.eval()(IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "zero_stage", "lora"), [("glm4_moe", 1, True), ("glm4_moe", 3, False), ("deepseek_v3", 1, False), ("gemma4_text", 3, False)]
)
def test_a_trained_model_keeps_them(tmp_path, policy, kind, zero_stage, lora):
    start, buffer = made(tmp_path, kind, policy), BUFFERS[kind]
    before = load_file(start.payload / "model.safetensors")
    assert before[buffer].dtype == torch.float32 and not torch.equal(before[buffer], before[buffer].bfloat16().float())
    trainer = trainer_of(start, {"zero_stage": zero_stage, "attention": "sdpa", "packing": False}, lora, dtype="bf16")
    try:
        trainer.export(tmp_path / "out", Chat(policy.payload))
        sent = {name: (tensor.dtype, tensor.clone()) for name, tensor in trainer.weights()}
    finally:
        trainer.close()
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys() == sent.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
        assert sent[name][0] == tensor.dtype and torch.equal(sent[name][1], tensor), name
    assert torch.equal(logits(tmp_path / "out"), logits(start.payload))
    assert torch.equal(load_policy(start, trainer.numerics).model.state_dict()[buffer], before[buffer])


@pytest.mark.slow
def test_a_model_is_not_saved_without_one(tmp_path, policy, monkeypatch):
    def without(model):
        return (one for one in whole(model) if not one[0].endswith("bias"))

    whole = trainers.plain_weights
    monkeypatch.setattr(trainers, "plain_weights", without)
    trainer = trainer_of(made(tmp_path, "glm4_moe", policy), {"attention": "sdpa", "packing": False})
    try:
        with pytest.raises(StageError, match=r"without model.layers.1.mlp.gate.e_score_correction_bias"):
            trainer.export(tmp_path / "out", Chat(policy.payload))
    finally:
        trainer.close()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["glm4_moe", "gemma4_text"])
def test_an_imported_model_keeps_them_unrounded(tmp_path, policy, kind):
    given, buffer = made(tmp_path / "given", kind, policy, torch.float32), BUFFERS[kind]
    config = config_of("source_model", source={"type": "folder", "path": "m"}, dtype="bf16", chat_template="own")
    job = a_job(tmp_path / "job")
    imported(*load_folder("m", given.payload, config, job), config, job)
    before, after = (load_file(folder / "model.safetensors") for folder in (given.payload, job.out / "payload"))
    assert after.keys() == before.keys() and torch.equal(after[buffer], before[buffer])
    finer = {name.rpartition(".")[2] for name, tensor in after.items() if tensor.dtype != torch.bfloat16}
    assert finer == {buffer.rpartition(".")[2]}
    assert is_stored_in_bf16(job.out / "payload", AutoModelForCausalLM)


def test_weights_in_fp32_among_bf16_are_loaded_as_such(tmp_path):
    """A layer that someone left in fp32 is not rounded."""
    model = BY_NAME["glm4_moe"].model()
    to_dtype(model, torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert is_stored_in_bf16(tmp_path, AutoModelForCausalLM)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"].float()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert not is_stored_in_bf16(tmp_path, AutoModelForCausalLM)


def test_a_model_without_scores_in_transformers_is_refused_as_such(tmp_path):
    for kind, refused in (("glm4_moe", True), ("granite", True), ("llama", False)):
        BY_NAME[kind].config().save_pretrained(tmp_path)
        with pytest.raises(StageError, match=f"no reward or value model for {kind}: use another base model") if refused else nullcontext():
            refuse_without_scores(tmp_path)
