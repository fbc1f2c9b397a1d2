import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.architectures import ALL
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.stages.core import spans as row_spans
from pedigree.stages.core.batches import collate, document
from pedigree.stages.core.spans import Span, spans_of
from pedigree.stages.training.attention import Rule, _call_by_call, attend, flash_width, register, varlen_attention
from pedigree.stages.training.cpu_attention import planned
from pedigree.stages.training.kernels import fusable_rows_backward
from pedigree.stages.training.logprobs import PolicyModule, RowKernels, ScoreHead, _TokenLogps, rows_backward, rows_forward

DOCS = [document([5, 6, 7], [8, 9, 2]), document([11], [12, 2]), document([20, 21, 22, 23], [24, 2])]
UNITS = [(doc,) for doc in DOCS]
PAIRS = [
    (document([5, 6, 7], [8, 9, 2]), document([5, 6, 7], [8, 2])),
    (document([11], [12, 2]), document([11], [13, 14, 2]), document([11], [2])),
    (document([20, 21, 22], [24, 2]),),
]
TURN = [*range(3, 60), *range(3, 60)]
LONG = [(document(TURN, range(9, 60)), document(TURN, range(20, 63)), document(TURN, [*range(5, 60), 2]))]
"""More tokens than attention computes in one call under a mask."""
BY_NAME = {architecture.name: architecture for architecture in ALL}
PADDED, PACKED, SDPA = Numerics(packing=False), Numerics(), Numerics(attention="sdpa")


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)).eval()


def policy_of(model, numerics, chunk=1024):
    """The model as `load_policy` would have loaded it."""
    register()
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("varlen" if numerics.shares_prompts else "sdpa")
    return PolicyModule(twin, chunk)


def by_hand(model, doc, temperature=1.0):
    """One document alone, through the model's own forward and a plain log-softmax."""
    logits = model(torch.from_numpy(doc.ids)[None]).logits[0].double() / temperature
    logps = logits.log_softmax(-1)
    return [logps[t - 1, doc.ids[t]].item() for t in range(1, len(doc)) if doc.trained[t]]


@pytest.mark.parametrize("numerics", [PACKED, SDPA, PADDED], ids=["varlen", "sdpa", "padded"])
@pytest.mark.parametrize("units", [UNITS, PAIRS, LONG], ids=["single", "shared", "long"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_each_document_alone(llama, units, numerics, temperature):
    logps, _ = policy_of(llama, numerics)(collate(units, numerics, pad_id=2), temperature)
    expected = [value for unit in units for doc in unit for value in by_hand(llama, doc, temperature)]
    assert logps.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("units", [UNITS, PAIRS, LONG], ids=["single", "shared", "long"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts_packed_and_padded_documents_give_one_gradient(llama, units, checkpointing):
    gradients = []
    for numerics in (PADDED, SDPA, PACKED):
        policy = policy_of(llama, numerics)
        if checkpointing:
            policy.train()
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        logps, _ = policy(collate(units, numerics, pad_id=2))
        (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    scale = gradients[0].abs().max()
    assert (gradients[1] - gradients[0]).abs().max() < 1e-5 * scale and (gradients[2] - gradients[0]).abs().max() < 1e-5 * scale


def test_a_batch_made_for_another_attention_is_refused(llama):
    with pytest.raises(ValueError, match="same numerics"):
        PolicyModule(llama, 1024)(collate(PAIRS, PACKED, pad_id=0))
    with pytest.raises(ValueError, match="same numerics"):
        policy_of(llama, PACKED)(collate(PAIRS, PADDED, pad_id=0))


def by_definition(query_HTD, key_KTD, value_KTD, window=None, softcap=None, sinks_H=None):
    """Attention of one document from its definition, a query and a head at a time, in double precision."""
    heads, length, _ = query_HTD.shape
    found = torch.zeros_like(query_HTD, dtype=torch.float64)
    for head in range(heads):
        key, value = (tensor[head * len(tensor) // heads].double() for tensor in (key_KTD, value_KTD))
        for t in range(length):
            seen = range(0 if window is None else max(0, t + 1 - window), t + 1)
            scores = [0.3 * float(query_HTD[head, t].double() @ key[s]) for s in seen]
            scores = [score if softcap is None else softcap * math.tanh(score / softcap) for score in scores]
            total = sum(math.exp(score) for score in scores) + (0.0 if sinks_H is None else math.exp(float(sinks_H[head])))
            found[head, t] = sum(math.exp(score) / total * value[s] for score, s in zip(scores, seen, strict=True))
    return found


@pytest.mark.parametrize("small", [0, 256], ids=["call by call", "one masked call"])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_windows_caps_and_sinks_are_those_of_each_document_alone(monkeypatch, small, window, softcap, sinks):
    """A prompt with two answers, and a document of its own, in one row."""
    monkeypatch.setattr(row_spans, "SMALL", small)
    planned.cache_clear()
    torch.manual_seed(0)
    spans = spans_of([Span(0, 6), Span(6, 5, 0, 6), Span(11, 3, 0, 6), Span(14, 7)])
    query, key, value = torch.randn(1, 4, 21, 8), torch.randn(1, 2, 21, 8), torch.randn(1, 2, 21, 8)
    sinks_H = torch.tensor([-1.0, 0.5, 2.0, 0.0]) if sinks else None
    asked = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sinks_H}
    (found,), _ = varlen_attention(None, query, key, value, None, spans=spans, **asked)
    for places in ([*range(11)], [*range(6), *range(11, 14)], [*range(14, 21)]):
        expected = by_definition(query[0, :, places], key[0, :, places], value[0, :, places], window, softcap, sinks_H)
        assert torch.allclose(found[places].transpose(0, 1).double(), expected, atol=1e-5)


class Layer:
    """A layer of attention, as far as its config goes."""

    def __init__(self, layer_idx=0, **config):
        self.config, self.layer_idx = SimpleNamespace(**config), layer_idx


def test_a_window_that_a_model_leaves_to_its_mask_is_kept():
    torch.manual_seed(0)
    query, spans = torch.randn(1, 2, 9, 4), spans_of([Span(0, 9)])
    kept, _ = varlen_attention(None, query, query, query, None, spans=spans, sliding_window=3)
    whole, _ = varlen_attention(None, query, query, query, None, spans=spans)
    for layer, expected in (
        (Layer(sliding_window=3), kept),
        (Layer(sliding_window=3, use_sliding_window=False), whole),
        (Layer(sliding_window=3, layer_types=["sliding_attention", "full_attention"]), kept),
        (Layer(1, sliding_window=3, layer_types=["sliding_attention", "full_attention"]), whole),
    ):
        assert torch.equal(varlen_attention(layer, query, query, query, None, spans=spans)[0], expected)


def test_attention_that_is_not_understood_is_refused():
    query, spans = torch.zeros(1, 2, 5, 4), spans_of([Span(0, 5)])
    with pytest.raises(PedigreeError, match=r"Layer has position_bias: set `attention: sdpa`"):
        varlen_attention(Layer(), query, query, query, None, spans=spans, position_bias=torch.zeros(1))
    with pytest.raises(PedigreeError, match=r"Layer has its own mask"):
        varlen_attention(Layer(), query, query, query, torch.zeros(1), spans=spans)
    with pytest.raises(PedigreeError, match=r"Layer does not receive the document spans"):
        varlen_attention(Layer(), query, query, query, None)
    chunked = Layer(layer_types=["chunked_attention"], attention_chunk_size=4)
    with pytest.raises(PedigreeError, match=r"layer 0 of the model attends within chunks of 4 tokens, but a document has 5"):
        varlen_attention(chunked, query, query, query, None, spans=spans)


def test_chunks_change_neither_value_nor_gradient(llama):
    batch = collate(UNITS, Numerics(), pad_id=0)
    gradients = []
    for chunk in (1024, 2):
        policy = policy_of(llama, PACKED, chunk)
        logps, _ = policy(batch)
        logps.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-5)


def bf16_policy(llama, head="fp32", chunk=1024, **changes):
    """A policy in bf16 as a `Trainer` computes it, with logits large enough to be rounded by tenths."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**llama.config.to_dict() | {"vocab_size": 512, "hidden_size": 64} | changes)).bfloat16()
    model.lm_head.weight.data.mul_(20)
    register()
    model.set_attn_implementation("varlen")
    return PolicyModule(model, chunk, head)


def by_exact_head(policy, batch):
    """log π and the gradient of Σ log π for the head: products in double precision of the policy's own bf16 hidden states and weights."""
    hidden = policy.model.model(batch.input_ids_BT, position_ids=batch.position_ids_BT, spans=batch.spans, use_cache=False)[0]
    weight = policy.model.lm_head.weight.double().requires_grad_()
    logits = hidden.flatten(0, 1)[batch.places_N].detach().double() @ weight.T
    logps = logits.log_softmax(-1).gather(-1, batch.targets_N[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logps.sum(), weight)
    return logps.detach(), gradient


EIGHTY = [(document([3], range(100, 180)),)]


@pytest.mark.parametrize("chunk", [1024, 8])
def test_an_fp32_head_gives_the_log_probs_of_exact_products_of_bf16(llama, chunk):
    batch, errors = collate(EIGHTY, PACKED, pad_id=0), {}
    for head in ("fp32", "model"):
        policy = bf16_policy(llama, head, chunk)
        exact, _ = by_exact_head(policy, batch)
        errors[head] = float((policy(batch)[0].detach() - exact).abs().mean())
    assert errors["fp32"] < 1e-5 and errors["model"] > 5e-3


@pytest.mark.parametrize(("head", "bound"), [("fp32", 2e-3), ("model", 5e-3)])
def test_the_gradient_of_the_head_is_as_exact_in_many_chunks_as_in_one(llama, head, bound):
    """It is rounded to bf16 once, which is off by 1.7e-3, not after each chunk."""
    batch, errors = collate(EIGHTY, PACKED, pad_id=0), []
    for chunk in (1024, 1):
        policy = bf16_policy(llama, head, chunk, tie_word_embeddings=False)
        _, exact = by_exact_head(policy, batch)
        policy(batch)[0].sum().backward()
        errors.append(float((policy.model.lm_head.weight.grad.double() - exact).norm() / exact.norm()))
    whole, chunked = errors
    assert whole < bound and chunked < 1.1 * whole


@pytest.mark.parametrize("name", ["phi", "gptj", "granite", "cohere", "gemma2"])
@pytest.mark.parametrize("chunk", [1024, 3])
def test_biases_scales_and_caps_of_a_model_apply_to_an_fp32_head(name, chunk):
    """In fp32 both heads are the same function; its gradient is autograd's through the model's own forward."""
    model = BY_NAME[name].model("eager")
    batch, weights = collate(UNITS[:1], PADDED, pad_id=0), torch.tensor([1.0, -2.0, 0.5])
    expected = torch.tensor(by_hand(model, DOCS[0]))
    logits = model(torch.from_numpy(DOCS[0].ids)[None]).logits[0]
    own = logits.log_softmax(-1)[batch.places_N].gather(-1, batch.targets_N[:, None])[:, 0]
    (weights * own).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    logps, _ = PolicyModule(model, chunk, "fp32")(batch)
    (weights * logps).sum().backward()
    assert torch.allclose(logps, expected.float(), atol=1e-5)
    for found, given in zip((parameter.grad for parameter in model.parameters()), gradients, strict=True):
        assert torch.allclose(found, given, atol=1e-5 * max(1.0, float(given.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [rows_backward, fusable_rows_backward])
def test_the_gradient_is_autograds(dtype, backward):
    torch.manual_seed(0)
    logits = (3 * torch.randn(37, 50)).to(dtype).requires_grad_()
    targets, weights, temperature = torch.randint(50, (37,)), torch.randn(37), 0.7
    logps, entropy = _TokenLogps.apply(logits, targets, temperature, True, False, RowKernels(rows_forward, backward))
    (given,) = torch.autograd.grad((logps * weights).sum(), logits)
    plain = (logits.double() / temperature).log_softmax(-1)
    (expected,) = torch.autograd.grad((plain.gather(-1, targets[:, None])[:, 0] * weights).sum(), logits)
    assert torch.allclose(logps.double(), plain.gather(-1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy.double(), -(plain.exp() * plain).sum(-1), atol=1e-5)
    assert torch.allclose(given.double(), expected.double(), atol=1e-5 if dtype == torch.float32 else 2e-2) and not entropy.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [rows_backward, fusable_rows_backward])
def test_the_gradient_of_the_entropy_is_autograds(dtype, backward):
    """Beside that of log-probs, and alone."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(37, 50)).to(dtype).requires_grad_()
    targets, weights, shares, temperature = torch.randint(50, (37,)), torch.randn(37), torch.randn(37), 0.7
    for weight in (weights, torch.zeros(37)):
        logps, entropy = _TokenLogps.apply(logits, targets, temperature, True, True, RowKernels(rows_forward, backward))
        (given,) = torch.autograd.grad((logps * weight + entropy * shares).sum(), logits)
        plain = (logits.double() / temperature).log_softmax(-1)
        loss = plain.gather(-1, targets[:, None])[:, 0] * weight - (plain.exp() * plain).sum(-1) * shares
        (expected,) = torch.autograd.grad(loss.sum(), logits)
        assert torch.allclose(given.double(), expected.double(), atol=1e-5 if dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize("numerics", [PACKED, PADDED], ids=["varlen", "padded"])
@pytest.mark.parametrize("chunk", [1024, 2])
def test_the_entropys_gradient_passes_through_head_and_body(llama, numerics, chunk):
    """That of H + 2 log π; autograd through the model's own forward, a document at a time, in double precision."""
    plain = copy.deepcopy(llama).double()
    for doc in DOCS:
        rows = plain(torch.from_numpy(doc.ids)[None]).logits[0][:-1].div(0.7).log_softmax(-1)[torch.from_numpy(doc.trained[1:])]
        targets = torch.from_numpy(doc.ids[1:][doc.trained[1:]])[:, None]
        (2 * rows.gather(-1, targets).sum() - (rows.exp() * rows).sum()).backward()
    policy = policy_of(llama, numerics, chunk)
    logps, entropies = policy(collate(UNITS, numerics, pad_id=2), 0.7, entropy_gradient=True)
    (2 * logps + entropies).sum().backward()
    for own, expected in zip(policy.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad.double(), expected.grad, atol=2e-5)


class Largest(TorchDispatchMode):
    """The most elements that any operation's result had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_the_vocabulary_never_meets_the_whole_batch(llama):
    vocabulary = 5000
    model = LlamaForCausalLM(LlamaConfig(**llama.config.to_dict() | {"vocab_size": vocabulary}))
    batch = collate([(document([5], range(6, 70)),)], Numerics(), pad_id=0)
    largest = {}
    for chunk in (1024, 8):
        with Largest() as seen:
            policy_of(model, PACKED, chunk)(batch)[0].sum().backward()
        largest[chunk] = seen.elements
    weights = vocabulary * model.config.hidden_size
    assert largest[1024] == 64 * vocabulary and largest[8] == weights  # 8 * 5000 is less than the weights


def test_the_score_head_computes_in_fp32_on_bf16_weights():
    head = ScoreHead(512, 1, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(3, 512).to(torch.bfloat16)
    exact = hidden.double() @ head.weight.double().T
    assert head(hidden).dtype == torch.float32 and torch.allclose(head(hidden).double(), exact, atol=1e-5)


@pytest.mark.parametrize(
    ("widths", "device", "dtype", "expected"),
    [
        ((128, 128), "cuda", torch.bfloat16, 128),
        ((192, 128), "cuda", torch.bfloat16, 192),  # DeepSeek V3
        ((100, 96), "cuda", torch.float16, 104),
        ((256, 256), "cuda", torch.bfloat16, 256),
        ((320, 256), "cuda", torch.bfloat16, None),
        ((64, 512), "cuda", torch.bfloat16, None),
        ((128, 128), "cuda", torch.float32, None),
        ((320, 100), "cpu", torch.float32, 320),
    ],
)
def test_heads_that_flash_attention_cannot_compute_are_padded_or_go_another_way(widths, device, dtype, expected):
    assert flash_width(*widths, device, dtype) == expected


@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize("window", [None, 3])
def test_padded_heads_give_the_attention_and_gradients_of_their_own_widths(widths, window):
    spans = spans_of([Span(0, 4), Span(4, 3, 0, 4), Span(7, 5, 0, 4), Span(12, 6)])
    made = torch.Generator().manual_seed(0)
    shapes = (4, widths[0]), (2, widths[0]), (2, widths[1])
    results = []
    for attention_of in (attend, _call_by_call):
        made.manual_seed(0)
        given = [torch.randn(18, *shape, generator=made).requires_grad_() for shape in shapes]
        found = attention_of(*given, spans, Rule(0.3, window))
        assert found.shape == (18, 4, widths[1])
        results.append([found, *torch.autograd.grad(found.square().sum(), given)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
