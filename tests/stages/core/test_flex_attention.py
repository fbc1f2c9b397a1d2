"""Attention with soft caps and sinks as on GPUs. CPUs compute torch's flex attention too, not compiled: its results, its gradients, and
what is kept between them are the same function's; the memory within its kernels is a GPU's business (`make gpu-check`)."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.architectures import ALL
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import collate, document
from pedigree.stages.core.spans import Span, spans_of
from pedigree.stages.training import attention
from pedigree.stages.training.attention import Rule, _call_by_call, attend
from pedigree.stages.training.flex_attention import block_mask, by_flex
from pedigree.stages.training.logprobs import PolicyModule
from pedigree.stages.training.probe import probe

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
BY_NAME = {architecture.name: architecture for architecture in ALL}
ROW = [Span(0, 150), Span(150, 90, 0, 150), Span(240, 20, 0, 150), Span(260, 3), Span(263, 300), Span(563, 61, 263, 300)]
"""624 tokens: two prompts with answers, and a short document."""
CPU = torch.device("cpu")
attention.register()


@pytest.fixture
def tried():
    memory = attention._tried
    memory.cache_clear()
    yield
    memory.cache_clear()


@pytest.fixture
def on_cpus(monkeypatch, tried):
    """Flex attention in place of calls; torch refuses gradients on CPUs, although its formulas have them."""
    monkeypatch.setattr(attention, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


def pairs_of(spans, window, filled):
    """True where a query sees a key, by the definition of spans and windows."""
    seen = torch.zeros(filled, filled, dtype=torch.bool)
    end = spans[-1].start + spans[-1].length
    for span in [*spans, Span(end, filled - end)]:
        keys = [*range(span.prefix_start, span.prefix_start + span.prefix_length), *range(span.start, span.start + span.length)]
        for place in range(span.length):
            last = span.prefix_length + place + 1
            seen[span.start + place, keys[max(0, last - (window or last)) : last]] = True
    return seen


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("spans", [ROW, ROW[:1], [Span(0, 300)]], ids=["shared", "one block", "one document"])
def test_the_mask_has_the_pairs_and_the_blocks_of_the_spans(spans, window):
    filled = max(256, -(-(spans[-1].start + spans[-1].length) // 128) * 128)
    found, expected = block_mask(spans_of(spans), window, filled), pairs_of(spans, window, filled)
    assert torch.equal(torch_flex.create_mask(found.mask_mod, None, None, filled, filled, device="cpu")[0, 0], expected)
    blocks = expected.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2)
    listed = found.to_dense()[0, 0].bool()
    assert not (blocks.any(-1).any(-1) & ~listed).any()  # none is left out, and few are listed that have no pair
    assert (listed & ~blocks.any(-1).any(-1)).sum() <= 1
    whole = torch.zeros_like(listed)
    for row, (count, columns) in enumerate(zip(found.full_kv_num_blocks[0, 0], found.full_kv_indices[0, 0], strict=True)):
        whole[row, columns[:count].long()] = True
    assert torch.equal(whole, blocks.all(-1).all(-1)) and (window is not None or whole.any() or filled == 256)


def results_of(attention_of, given, spans, rule):
    found = attention_of(*given[:3], spans, rule)
    return [found, *torch.autograd.grad((found * torch.linspace(-1, 2, found.numel()).view_as(found)).sum(), given)]


@pytest.mark.parametrize(("softcap", "sinks", "window"), [(0.7, False, None), (None, True, 40), (0.7, True, 200)])
def test_results_and_gradients_are_those_of_whole_scores(on_cpus, softcap, sinks, window):
    made, spans = torch.Generator().manual_seed(0), spans_of(ROW)
    sizes = [(624, 4, 24), (624, 2, 24), (624, 2, 16), *([(4,)] if sinks else [])]
    given = [torch.randn(*size, generator=made).requires_grad_() for size in sizes]
    rule = Rule(0.3, window, softcap, given[3] if sinks else None)
    for one, other in zip(results_of(attention._by_flex, given, spans, rule), results_of(_call_by_call, given, spans, rule), strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            self.most = max(self.most, each.numel() if isinstance(each, torch.Tensor) else 0)
        return found


def test_neither_scores_nor_a_mask_of_the_row_are_kept(on_cpus):
    made, spans = torch.Generator().manual_seed(0), spans_of([Span(0, 512)])
    given = [torch.randn(512, heads, 8, generator=made).requires_grad_() for heads in (4, 2, 2)]
    kept = {}
    for attention_of in (attention._by_flex, _call_by_call):
        sizes = []
        with saved_tensors_hooks(lambda tensor, into=sizes: (into.append(tensor.numel()), tensor)[1], lambda tensor: tensor):
            attention_of(*given, spans, Rule(0.3, None, 2.0))
        kept[attention_of] = max(sizes)
    assert kept[attention._by_flex] == 512 * 4 * 8 and kept[_call_by_call] == 4 * 512 * 512
    with Largest() as seen:
        block_mask(spans_of([Span(0, 4096)]), None, 4096)
    assert seen.most == 4096 * 4096 / 128


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_packed_row_has_the_log_probs_and_gradients_of_each_document_alone(monkeypatch, on_cpus, name):
    """Documents are longer than the models' windows."""
    ids = [3 + 7 * place % 50 for place in range(40)]
    units = [(document(ids[:20], ids[5:30]), document(ids[:20], ids[9:15])), (document(ids[3:5], ids[10:40]),)]
    own, ours, calls = BY_NAME[name].model("eager"), PolicyModule(BY_NAME[name].model("varlen"), 1024), []
    expected = []
    for unit in units:
        for doc in unit:
            logps = own(torch.from_numpy(doc.ids)[None]).logits[0].log_softmax(-1)
            expected += [logps[place - 1, doc.ids[place]] for place in range(1, len(doc)) if doc.trained[place]]
    wanted = torch.stack(expected)
    with torch.no_grad():
        ours(collate(units, Numerics(), 0))  # tries the kernel
    monkeypatch.setattr(attention, "by_flex", lambda *given: calls.append(1) or by_flex(*given))
    found = ours(collate(units, Numerics(), 0))[0]
    assert len(calls) == 2 and torch.allclose(found, wanted, atol=1e-5)
    weights = torch.linspace(-1, 2, len(wanted))
    slopes = [torch.autograd.grad((weights * logps).sum(), tuple(model.parameters())) for logps, model in ((found, ours), (wanted, own))]
    most = max(float(slope.abs().max()) for slope in slopes[1])
    assert all((one - other).abs().max() < 1e-5 * most for one, other in zip(*slopes, strict=True))


def test_a_model_whose_kernel_is_wrong_is_refused(monkeypatch, on_cpus):
    monkeypatch.setattr(attention, "_tried", lambda *_: True)
    monkeypatch.setattr(attention, "by_flex", lambda *given: by_flex(*given[:-1], None))
    with pytest.raises(PedigreeError, match=r"GptOssForCausalLM, packed with attention varlen, model.layers.0.self_attn differs by"):
        probe(PolicyModule(BY_NAME["gpt_oss"].model("varlen"), 1024), Numerics(), CPU)


def test_where_the_kernel_cannot_be_used_or_has_wrong_gradients_scores_are_whole(monkeypatch, tried, capsys):
    made, spans = torch.Generator().manual_seed(0), spans_of(ROW)
    given = [torch.randn(624, heads, 16, generator=made) for heads in (4, 2, 2)]
    rule = Rule(0.3, 40, 2.0)
    monkeypatch.setattr(attention, "FLEX_DEVICES", ("cpu",))
    for _ in range(2):
        assert torch.equal(attend(*given, spans, rule), _call_by_call(*given, spans, rule))
    assert capsys.readouterr().out == (
        "attention stores its scores in fp32, which the plan does not count: flex attention cannot be used here (NotImplementedError: "
        "FlexAttention does not support backward on CPU. Please set the input requires_grad to False or use another device.)\n"
    )
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "by_flex", lambda query, *rest: by_flex(query.detach() + 0.5 * (query - query.detach()), *rest))
    attention._tried.cache_clear()
    assert torch.equal(attend(*given, spans, rule), _call_by_call(*given, spans, rule))
    assert "cannot be used here (its relative error is 0.5)" in capsys.readouterr().out
