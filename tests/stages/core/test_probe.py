"""What a model must prove before a stage works with it."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_logprobs import PACKED, PADDED, SDPA, llama, policy_of
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.architectures import ALL
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Lora
from pedigree.stages.core.spans import Span, spans_of
from pedigree.stages.training.adapters import add_adapters
from pedigree.stages.training.logprobs import PolicyModule, RewardModule, ValueModule
from pedigree.stages.training.probe import _made_up, _probed_length, probe

__all__ = ["llama"]  # a fixture
CPU = torch.device("cpu")
BY_NAME = {architecture.name: architecture for architecture in ALL}


@pytest.mark.parametrize("numerics", [PACKED, SDPA, PADDED], ids=["varlen", "sdpa", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_accepts_isolated_documents(llama, dtype, numerics):
    probe(policy_of(LlamaForCausalLM(llama.config).to(dtype).eval(), numerics), numerics, CPU)


def leaking(kind):
    """Positions that do not restart, as a collator that forgot them would give."""

    class Leaking(kind):
        def forward(self, batch, *asked):
            batch.position_ids_BT.copy_(torch.arange(batch.input_ids_BT.shape[1])[None])
            return super().forward(batch, *asked)

    return Leaking


def test_the_probe_catches_a_leak_between_documents(llama):
    with pytest.raises(PedigreeError, match="packing: false"):
        probe(leaking(PolicyModule)(llama, 1024), SDPA, CPU)


@pytest.mark.parametrize("kind", [RewardModule, ValueModule])
def test_scores_and_values_are_probed_too(llama, kind):
    torch.manual_seed(0)
    config = copy.deepcopy(llama.config)
    config.num_labels, config.pad_token_id = 1, 0
    model = LlamaForSequenceClassification(config).eval()
    for numerics in (SDPA, PADDED):
        probe(kind(copy.deepcopy(model)), numerics, CPU)
    with pytest.raises(PedigreeError, match="packing: false"):
        probe(leaking(kind)(model), SDPA, CPU)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda span: Span(span.start, span.length), "a shared prompt changes"),
        (lambda span: Span(span.start, span.length, 0, span.start), "packed documents attend to each other"),
    ],
    ids=["prompt unseen", "sibling seen"],
)
def test_the_probe_catches_prompts_that_are_shared_wrongly(llama, wrong, message):
    class Confused(PolicyModule):
        def forward(self, batch, temperature=1.0, entropy=False):
            confused = spans_of([wrong(span) if span.prefix_length else span for span in batch.spans.all])
            return super().forward(replace(batch, spans=confused), temperature, entropy)

    with pytest.raises(PedigreeError, match=message):
        probe(Confused(policy_of(llama, PACKED).model, 1024), PACKED, CPU)


@pytest.mark.parametrize("name", ["granite", "cohere", "gemma2"])
@pytest.mark.parametrize("numerics", [PACKED, PADDED], ids=["packed", "padded"])
def test_log_probs_that_are_not_the_models_own_are_refused(monkeypatch, name, numerics):
    """Hidden states times the output embeddings, without what the model makes of logits."""
    kernel = numerics.attention if numerics.packing else "eager"
    model = BY_NAME[name].model(kernel)
    form = numerics.model_copy(update={"attention": kernel})
    probe(PolicyModule(model, 1024), form, CPU)
    monkeypatch.setattr("pedigree.stages.training.logprobs._own_logits", lambda model, seen, head: head(seen.last_hidden_state)[0])
    with pytest.raises(PedigreeError, match=r"differs by .* from the model's own forward with eager attention: set `packing: false`"):
        probe(PolicyModule(model, 1024), form, CPU)


def test_a_window_that_is_not_kept_is_refused(monkeypatch):
    monkeypatch.setattr("pedigree.stages.training.attention._window", lambda *_: None)
    with pytest.raises(PedigreeError, match="MistralForCausalLM, packed with attention varlen, differs by"):
        probe(PolicyModule(BY_NAME["mistral"].model("varlen"), 1024), PACKED, CPU)


def test_attention_of_transformers_that_leaves_out_a_soft_cap_is_refused():
    with pytest.raises(PedigreeError, match="Gemma2ForCausalLM, padded with attention sdpa, differs by"):
        probe(PolicyModule(BY_NAME["gemma2"].model("sdpa"), 1024), Numerics(packing=False, attention="sdpa"), CPU)


def test_experts_may_round_by_what_they_multiply_at_once_and_no_more():
    probe(PolicyModule(BY_NAME["qwen3_moe"].model("varlen"), 1024), PACKED, CPU)
    with pytest.raises(PedigreeError, match="attend to each other"):
        probe(leaking(PolicyModule)(BY_NAME["qwen3_moe"].model("sdpa"), 1024), SDPA, CPU)


def test_adapters_that_the_model_reads_past_are_refused():
    class Past(torch.nn.Module):
        """A layer that takes the weight of its projection and does not call it, as fused kernels do."""

        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, hidden):
            gate, up = (getattr(self.mlp, name) for name in ("gate_proj", "up_proj"))
            product = self.mlp.act_fn(gate(hidden)) * torch.nn.functional.linear(hidden, up.weight)
            return self.mlp.down_proj(product)

    model = BY_NAME["llama"].model("varlen")
    add_adapters(model, Lora(rank=2), 0)
    probe(PolicyModule(model, 1024), PACKED, CPU)
    model.model.layers[1].mlp = Past(model.model.layers[1].mlp)
    with pytest.raises(PedigreeError, match=r"uses the weights of model.layers.1.mlp.mlp.up_proj without their adapters"):
        probe(PolicyModule(model, 1024), PACKED, CPU)


def test_a_model_that_cannot_be_computed_in_a_form_is_refused_by_name():
    with pytest.raises(PedigreeError, match=r"MptForCausalLM, packed with attention varlen, cannot be computed \(AttributeError"):
        probe(PolicyModule(BY_NAME["mpt"].model("varlen"), 1024), PACKED, CPU)


@pytest.mark.parametrize("vocabulary", [6, 300, 49152])
def test_documents_are_made_of_tokens_that_training_has_seen(vocabulary):
    """SmolLM2 after two rounds of DPO: on its first ids, reserved for special tokens, two correct kernels were 3.3 nats apart in bf16."""
    ids = _made_up(vocabulary, (5, 3), (11, 61)).ids
    assert vocabulary // 3 <= min(ids) and max(ids) < 2 * (vocabulary // 3)
    assert len(set(ids)) > min(50, vocabulary // 4)


@pytest.mark.parametrize(
    ("window", "context", "expected"),
    [(None, 4096, 64), (None, 40, 40), (16, 4096, 64), (1024, 4096, 1033), (4096, 4096, 64), (9000, 10**5, 64)],
)
def test_the_probed_document_is_longer_than_a_window_and_long_enough_for_a_mean(window, context, expected):
    assert _probed_length(SimpleNamespace(sliding_window=window, max_position_embeddings=context)) == expected
