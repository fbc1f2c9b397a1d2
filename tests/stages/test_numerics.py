"""Fields of `numerics` by what they do: passes, tokens, calls, bytes, exchanges between ranks. Equal losses are shown elsewhere."""

from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from effects_lab import DOCUMENTS, trainer_of
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.optimizer import Optimizer
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations
from pedigree.stages.core.batches import collate
from pedigree.stages.job.failures import StageError
from pedigree.stages.preference_train import run as preference_train
from pedigree.stages.sft import run as sft
from pedigree.stages.training import attention
from pedigree.stages.training.logprobs import _Head
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.trainer import Trainer

pytestmark = pytest.mark.slow
BATCHES = {"global_batch": 8, "max_length": 64, "dtype": "fp32", "optimizer": {"learning_rate": 1e-3}}


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int]]:
    """(rows, width) of each forward pass for a gradient."""
    found: list[tuple[int, int]] = []
    forward = LlamaDecoderLayer.forward

    def seen(layer, hidden_states, *given, **named):
        if torch.is_grad_enabled() and layer.self_attn.layer_idx == 0:
            found.append(tuple(hidden_states.shape[:2]))
        return forward(layer, hidden_states, *given, **named)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", seen)
    return found


def one_step(folder: Path, policy: Artifact, **numerics: Any) -> list[int]:
    """Trains on a single batch of 8 documents; their lengths."""
    rows = models.arithmetic(8)
    data = models.dataset(folder / "data", "conversation", rows)
    job = models.a_job(folder / "job", Numerics.model_validate({"threads": 1, **numerics}))
    sft.run(models.config_of("sft", **BATCHES), {"policy": {"p": policy}, "data": {"d": data}}, job)
    return [len(document) for (document,) in models.units(rows, Conversations("assistant"), Chat(policy.payload))]


@pytest.mark.proves("numerics.packing")
def test_packed_rows_compute_no_padding(tmp_path, policy, passes):
    lengths = one_step(tmp_path / "packed", policy)
    assert passes == [(1, sum(lengths))]
    passes.clear()
    one_step(tmp_path / "padded", policy, packing=False)
    assert passes == [(8, max(lengths))] and 8 * max(lengths) > sum(lengths)


@pytest.mark.proves("numerics.micro_batch_tokens")
def test_a_packed_pass_has_as_many_tokens_as_allowed(tmp_path, policy, passes):
    lengths = one_step(tmp_path, policy, micro_batch_tokens=64)
    assert max(lengths) < 64 < sum(lengths)
    widths = [width for _, width in passes]
    assert sum(widths) == sum(lengths) and max(widths) <= 64 and len(widths) >= sum(lengths) / 64


@pytest.mark.proves("numerics.micro_batch_sequences")
def test_a_padded_pass_has_as_many_rows_as_asked_for(tmp_path, policy, passes):
    one_step(tmp_path, policy, packing=False, micro_batch_sequences=2)
    assert [rows for rows, _ in passes] == [2, 2, 2, 2]


@pytest.fixture
def attending(monkeypatch) -> Counter[str]:
    """How often attention is computed by each function."""
    found: Counter[str] = Counter()
    own, eager, fused = attention.attend, modeling_llama.eager_attention_forward, torch.nn.functional.scaled_dot_product_attention

    def counted(name, function):
        def call(*given, **named):
            found[name] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(attention, "attend", counted("varlen", own))
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", counted("eager", eager))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted("sdpa", fused))  # ours has it by name
    return found


@pytest.mark.proves("numerics.attention")
def test_the_attention_that_is_asked_for_is_the_one_that_runs_and_varlen_shares_prompts(tmp_path, policy, preferences, passes, attending):
    tokens = {}
    for name in ("varlen", "sdpa", "eager"):
        passes.clear()
        attending.clear()
        config = models.config_of("preference_train", **BATCHES, loss={"type": "orpo"})
        job = models.a_job(tmp_path / name, Numerics(threads=1, attention=name))
        preference_train.run(config, {"policy": {"p": policy}, "preferences": {"d": preferences}}, job)
        assert set(attending) == {name, "eager"}  # with which the probe compares
        tokens[name] = sum(rows * width for rows, width in passes)
    assert tokens["varlen"] < 0.8 * tokens["sdpa"] and tokens["sdpa"] == tokens["eager"]


def test_attention_that_a_model_lacks_is_refused_by_name(policy, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaPreTrainedModel, "_supports_sdpa", False)
    with pytest.raises(StageError, match=r"with attention sdpa .*: set another `attention` in the execution profile"):
        load_policy(policy, Numerics(attention="sdpa"))


@pytest.mark.proves("numerics.logprob_chunk")
def test_no_more_logits_exist_at_once_than_a_chunk(monkeypatch, policy):
    """12 trained tokens by 5: three products of the head with four each; the backward pass repeats all but the last."""
    trainer = trainer_of(policy, {"logprob_chunk": 5})
    rows: list[int] = []
    own = _Head.product

    def product(head, left, right):
        rows.append(len(left))
        return own(head, left, right)

    monkeypatch.setattr(_Head, "product", product)
    trainer.engine.module.head = "fp32"
    loss = -trainer.module(collate(DOCUMENTS, trainer.numerics, 0))[0].sum()
    assert rows == [4, 4, 4]
    trainer.backward(loss)
    trainer.close()
    vocabulary = trainer.engine.module.model.config.vocab_size
    gradients = [vocabulary, 4]  # of the weights, of the hidden states
    assert rows[3:] == [*gradients, 4, *gradients, 4, *gradients]


@pytest.mark.proves("numerics.threads")
def test_a_trainer_computes_with_as_many_threads_as_it_is_told(policy):
    for threads in (3, 1):
        trainer_of(policy, {"threads": threads}).close()
        assert torch.get_num_threads() == threads


@pytest.fixture
def determinism_ends():
    yield
    torch.use_deterministic_algorithms(False)


FRESH_NUMBERS = 1 << 24
"""64 MiB of fp32: more than any allocator keeps, so that the kernel gives new pages."""


@pytest.mark.proves("numerics.deterministic", on_gpus="that their kernels repeat themselves")
def test_in_a_deterministic_trainer_nothing_depends_on_what_lay_in_memory(policy, determinism_ends):
    """torch then fills memory that nobody has written to, and refuses operations without a deterministic form."""
    for deterministic in (True, False):
        trainer_of(policy, {"deterministic": deterministic}).close()
        fresh = torch.empty(FRESH_NUMBERS)  # what is smaller may lie where the trainer before has left NaN
        assert bool(fresh.isnan().all()) == deterministic


@pytest.mark.proves("numerics.device", on_gpus="that it computes there: tests marked `gpu`")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_no_cpu(policy):
    numerics = Numerics(device="cuda")
    with pytest.raises(StageError, match="device is cuda, but torch finds no GPU: use another execution profile"):
        Trainer(load_policy(policy, numerics), optimizer=Optimizer(learning_rate=1e-3), total_steps=1, dtype="fp32", numerics=numerics,
                seed=0)  # fmt: skip


def test_ranks_that_cannot_share_the_heads_are_refused_before_the_model_is_loaded(policy):
    with pytest.raises(StageError, match="sequence_parallel 4 does not divide the model's num_key_value_heads 2: set it to a divisor of 2"):
        load_policy(policy, Numerics(world_size=4, sequence_parallel=4))


def test_bf16_weights_are_pages_of_their_file_which_ranks_share(tmp_path, policy):
    trainer = Trainer(load_policy(policy, Numerics()), optimizer=Optimizer(learning_rate=1e-3), total_steps=1, dtype="bf16",
                      numerics=Numerics(threads=1), seed=0)  # fmt: skip
    trainer.export(tmp_path / "payload", Chat(policy.payload))
    trainer.close()
    module = load_policy(models.publish(tmp_path, "sft", "policy"), Numerics())
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    pages = [range(int(start, 16), int(end, 16)) for start, end in mapped]
    weights = list(module.parameters())
    assert all(weight.dtype == torch.bfloat16 and any(weight.data_ptr() in part for part in pages) for weight in weights)
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


def test_on_gpus_gradients_and_weights_travel_while_others_are_computed_and_no_weight_exceeds_a_bucket(policy):
    """DeepSpeed's ZeRO-2 frees a gradient larger than its bucket while another stream still reads it: the embeddings of Llama 3.1 8B have
    525 million elements, its bucket 500 million."""
    trainer = trainer_of(policy, {})
    for stage, device, expected in ((1, "cuda", False), (2, "cpu", False), (2, "cuda", True), (3, "cuda", True)):
        numerics = Numerics(device=device, zero_stage=stage)
        found = trainer._config(numerics, False, 525_336_576)["zero_optimization"]
        assert found["overlap_comm"] is expected and found["reduce_bucket_size"] >= 525_336_576 * (stage == 2 and device == "cuda")
        assert trainer._config(numerics, False, 1000)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    trainer.close()
