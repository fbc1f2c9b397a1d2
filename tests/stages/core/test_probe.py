"""What a model must prove before a stage works with it."""

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sweeps import nightly_after
from test_logprobs import PACKED, PADDED, SDPA, llama, policy_of
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.architectures import ALL
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Lora
from pedigree.stages.core.spans import Span, spans_of
from pedigree.stages.training import attention
from pedigree.stages.training.adapters import add_adapters
from pedigree.stages.training.logprobs import PolicyModule, RewardModule, ValueModule
from pedigree.stages.training.probe import _made_up, _probed_length, cases, in_fp32, probe

__all__ = ["llama"]  # a fixture
CPU = torch.device("cpu")
attention.register()
ATTEND = attention.attend
BY_NAME = {architecture.name: architecture for architecture in ALL}


@pytest.mark.parametrize("numerics", [PACKED, SDPA, PADDED], ids=["varlen", "sdpa", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_accepts_isolated_documents(llama, dtype, numerics):
    probe(policy_of(rounded(LlamaForCausalLM(llama.config), dtype).eval(), numerics), numerics, CPU)


def rounded(model, dtype=torch.bfloat16):
    """With parameters in another dtype, as in a trainer; buffers stay in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


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
        (lambda span: Span(span.start, span.length), "differs by"),
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
    with pytest.raises(PedigreeError, match=r"as a whole differs by .* from the model's own forward .*: set `packing: false`"):
        probe(PolicyModule(model, 1024), form, CPU)


def test_a_window_that_is_not_kept_is_refused(monkeypatch):
    monkeypatch.setattr("pedigree.stages.training.attention._window", lambda *_: None)
    with pytest.raises(PedigreeError, match=r"MistralForCausalLM, packed with attention varlen, model.layers.0.self_attn differs by"):
        probe(PolicyModule(BY_NAME["mistral"].model("varlen"), 1024), PACKED, CPU)


def test_attention_of_transformers_that_leaves_out_a_soft_cap_is_refused():
    with pytest.raises(PedigreeError, match=r"Gemma2ForCausalLM, padded with attention sdpa, model.layers.0.self_attn differs by"):
        probe(PolicyModule(BY_NAME["gemma2"].model("sdpa"), 1024), Numerics(packing=False, attention="sdpa"), CPU)


def test_experts_may_round_by_what_they_multiply_at_once_and_no_more():
    probe(PolicyModule(BY_NAME["qwen3_moe"].model("varlen"), 1024), PACKED, CPU)
    with pytest.raises(PedigreeError, match=r"layers.0.self_attn differs by"):
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


def only_first(changed):
    """A fault of the first token of each answer alone."""

    def attend(*given):
        found, other = ATTEND(*given).clone(), changed(*given)
        starts = [span.start for span in given[3].all if span.prefix_length]
        found[starts] = other[starts]
        return found

    return attend


def with_spans(change):
    return lambda q, k, v, spans, rule: ATTEND(
        q, k, v, spans_of([change(span) if span.prefix_length else span for span in spans.all]), rule
    )


def with_rule(**change):
    return lambda q, k, v, spans, rule: ATTEND(q, k, v, spans, replace(rule, **{n: f(getattr(rule, n)) for n, f in change.items()}))


def swapped(*given):
    found = ATTEND(*given)
    return found[:, [1, 0, *range(2, found.shape[1])]]


FAULTS = {
    "scale 2 %": with_rule(scale=lambda scale: 1.02 * scale),
    "scale 5 % too small": with_rule(scale=lambda scale: 0.95 * scale),
    "scale 10 %": with_rule(scale=lambda scale: 1.1 * scale),
    "two heads swapped": swapped,
    "keys of another head": lambda q, k, v, spans, rule: ATTEND(q, k.roll(1, 1), v, spans, rule),
    "sees the token before and not itself": lambda q, k, v, spans, rule: ATTEND(q, k.roll(1, 0), v.roll(1, 0), spans, rule),
    "sees the next token": lambda q, k, v, spans, rule: ATTEND(q, k.roll(-1, 0), v.roll(-1, 0), spans, rule),
    "end of the prompt unseen": with_spans(lambda span: replace(span, prefix_length=span.prefix_length - 1)),
    "first answer token misses the prompt's last": only_first(with_spans(lambda span: replace(span, prefix_length=span.prefix_length - 1))),
    "first answer token misses the prompt's first": only_first(
        with_spans(lambda span: replace(span, prefix_start=span.prefix_start + 1, prefix_length=span.prefix_length - 1))
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_rounding_to_bf16_hides_in_log_probs_is_refused(monkeypatch, fault):
    module, faulty = PolicyModule(rounded(BY_NAME["llama"].model("varlen")), 1024), FAULTS[fault]
    monkeypatch.setattr(attention, "attend", faulty)
    with pytest.raises(PedigreeError, match=r"self_attn differs by|documents attend to each other"):
        probe(module, PACKED, CPU)


@pytest.mark.parametrize("late", [1, -1])
def test_an_answer_at_positions_one_off_is_refused_in_bf16(late):
    class Late(PolicyModule):
        def forward(self, batch, *asked):
            moved = batch.position_ids_BT.clone()
            for span in batch.spans.all:
                moved[0, span.start : span.start + span.length] += late * (span.prefix_length > 0)
            return super().forward(replace(batch, position_ids_BT=moved), *asked)

    with pytest.raises(PedigreeError, match=r"self_attn differs by"):
        probe(Late(rounded(BY_NAME["llama"].model("varlen")), 1024), PACKED, CPU)


@pytest.mark.parametrize("window", [None, 5, 7])
def test_another_window_is_refused_in_bf16(monkeypatch, window):
    module = PolicyModule(rounded(BY_NAME["mistral"].model("varlen")), 1024)
    probe(module, PACKED, CPU)
    monkeypatch.setattr("pedigree.stages.training.attention._window", lambda *_: window)
    with pytest.raises(PedigreeError, match=r"self_attn differs by"):
        probe(module, PACKED, CPU)


def test_padding_that_is_attended_is_refused_in_bf16():
    """Rows padded on the left under a mask that shows all."""

    class Shown(PolicyModule):
        def forward(self, batch, *asked):
            shift = int((batch.attention_mask_BT == 0).sum(1).max())
            ids, width = torch.nn.functional.pad(batch.input_ids_BT, (shift, 0)), batch.input_ids_BT.shape[1]
            row, column = batch.places_N // width, batch.places_N % width
            seen = torch.ones_like(ids)
            positions = torch.nn.functional.pad(batch.position_ids_BT, (shift, 0))
            places = row * (width + shift) + column + shift
            moved = replace(batch, input_ids_BT=ids, position_ids_BT=positions, attention_mask_BT=seen, places_N=places)
            return super().forward(moved, *asked)

    with pytest.raises(PedigreeError):
        probe(Shown(rounded(BY_NAME["llama"].model("sdpa")), 1024), PADDED, CPU)


def test_frequencies_rounded_to_bf16_are_refused():
    model = BY_NAME["llama"].model("varlen").bfloat16()
    with pytest.raises(PedigreeError, match=r"model.rotary_emb.inv_freq of LlamaForCausalLM differs from its config's"):
        probe(PolicyModule(model, 1024), PACKED, CPU)


SOUND = ["llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("name", nightly_after(3, SOUND))
def test_sound_models_are_accepted_in_bf16(name):
    probe(PolicyModule(rounded(BY_NAME[name].model("varlen")), 1024), PACKED, CPU)


@pytest.mark.parametrize("kind", [RewardModule, ValueModule])
def test_sound_scores_values_and_adapters_are_accepted_in_bf16(kind):
    probe(kind(rounded(BY_NAME["llama"].model("varlen", scores=True))), PACKED, CPU)
    model = BY_NAME["llama"].model("varlen")
    add_adapters(model, Lora(rank=2), 0)
    probe(PolicyModule(rounded(model), 1024), PACKED, CPU)


def test_a_model_with_few_positions_is_probed_within_them():
    config = BY_NAME["llama"].config(max_position_embeddings=16)
    for case in cases(config):
        assert case.ids_RT.shape[1] == 16
    assert max(len(doc) for case in cases(config) for unit in case.units for doc in unit) == 16


def test_a_first_pass_that_rounds_otherwise_is_no_leak(llama):
    """As seen with torch's cosines, in the first pass of some processes."""

    class Warming(PolicyModule):
        cold = True

        def forward(self, batch, *asked):
            logps_N, entropies_N = super().forward(batch, *asked)
            off, self.cold = 0.15 * self.cold, False
            return logps_N + off, entropies_N

    probe(Warming(policy_of(llama, PACKED).model, 1024), PACKED, CPU)


@pytest.mark.parametrize(("dtype", "name", "expected"), [("bfloat16", "llama", 6), ("float32", "llama", 5), ("bfloat16", "qwen3_moe", 3)])
def test_a_probe_costs_six_forward_passes(dtype, name, expected):
    model, passes = rounded(BY_NAME[name].model("varlen"), getattr(torch, dtype)), []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    probe(PolicyModule(model, 1024), PACKED, CPU)
    assert len(passes) == expected


def test_the_models_own_code_in_fp32_is_that_of_widened_weights():
    model, ids = rounded(BY_NAME["qwen3_moe"].model()), torch.arange(3, 40)[None]
    exact = copy.deepcopy(model).float()
    with in_fp32(model):
        found = model(input_ids=ids).logits
    assert found.dtype == torch.float32 and torch.equal(found, exact(input_ids=ids).logits)
    assert model(input_ids=ids).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("message", "raised"),
    [
        ("This flash attention only supports head dimension at most 256", PedigreeError),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", RuntimeError),
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer", RuntimeError),
    ],
)
def test_what_a_kernel_does_not_support_is_refused_and_what_may_pass_is_not(monkeypatch, message, raised):
    def fails(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(attention, "attend", fails)
    with pytest.raises(raised, match="cannot be computed" if raised is PedigreeError else message[:20].replace("[", ".")) as caught:
        probe(PolicyModule(BY_NAME["llama"].model("varlen"), 1024), PACKED, CPU)
    assert type(caught.value) is raised


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


def test_models_probed_in_several_threads_keep_their_gradients(llama):
    """The block of one must not end with the state that it found in that of another."""
    first, second = (copy.deepcopy(llama) for _ in range(2))
    within, left = threading.Event(), threading.Event()

    def other():
        with in_fp32(second):
            within.set()
            left.wait()

    thread = threading.Thread(target=other)
    with in_fp32(first):
        thread.start()
        within.wait(0.2)  # for what it must not do
    left.set()
    thread.join()
    assert all(model(torch.tensor([[5, 6, 7]])).logits.requires_grad for model in (first, second))
