"""Attention within packed documents, computing a prompt shared by several answers once.

A packed row is a sequence of spans. A span attends to itself, causally, and to all of one earlier span, its prefix:

    prompt | first answer | second answer | prompt of the next unit | ...
    P        L1 → P         L2 → P          P'

so that answers to the same prompt see it without seeing each other. Nothing is computed between documents, whereas a mask over the
row would cost its length squared. `register` makes it known to transformers as `varlen`.

Supported features: a sliding window (a token sees itself and the W - 1 tokens before it in its document), a soft cap on the scores,
c · tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2), and sinks, a learned score per head that takes part in the softmax without
a value (gpt-oss, arXiv 2508.10925, section 2.2). Other features are rejected.

Shapes: T tokens of the row, H heads, K key heads, D width of a head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.core.spans import Span, Spans, calls, spans_of
from pedigree.stages.job.failures import is_memory
from pedigree.stages.training.cpu_attention import by_flash
from pedigree.stages.training.flex_attention import by_flex
from pedigree.stages.training.sequence_parallel import all_heads, all_tokens, own_heads

NAME = "varlen"
FLASH_WIDEST, FLASH_MULTIPLE = 256, 8
"""Widths of heads that flash attention on GPUs computes (`mha_varlen_fwd` of FlashAttention 2)."""
FLEX_DEVICES = ("cuda",)
"""Where torch compiles flex attention with its backward pass."""
FLEX_ERROR = 0.03
"""Accepted relative error of its results and gradients, in norm: as in `make gpu-check`."""


@dataclass(frozen=True)
class Rule:
    """How scores become weights."""

    scale: float
    window: int | None = None
    """Number of tokens that a token sees, including itself; None for no limit."""
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention with a mask can compute it."""
        return self.softcap is None and self.sinks_H is None


def attend(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, spans: Spans, rule: Rule) -> Tensor:
    """Attention within spans and to their prefixes, shape (T, H, D)."""
    given = query_THD, key_TKD, value_TKD
    width = flash_width(query_THD.shape[-1], value_TKD.shape[-1], query_THD.device.type, query_THD.dtype) if rule.is_plain else None
    if width is None:
        kernel = _by_flex if not rule.is_plain and _flexes(given, rule) else _call_by_call
        return kernel(query_THD, key_TKD, value_TKD, spans, rule)
    query, key, value = (tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1])) for tensor in given)
    if query.is_cuda:
        found = _on_gpu(query, key, value, spans, rule)
    else:
        found = by_flash(query, key, value, spans.table_S4, rule.scale, rule.window)
    return found if width == value_TKD.shape[-1] else found[..., : value_TKD.shape[-1]]


def flash_width(query: int, value: int, device: str, dtype: torch.dtype) -> int | None:
    """Width to which flash attention gets heads of these widths, padded with zeros; None if it cannot compute them.

    Zeros in queries and keys add nothing to their scores, and the columns of the result that zeros in values give are cut off. Latent
    attention has queries wider than values (DeepSeek V3: 192 and 128).
    """
    width = max(query, value)
    if device == "cpu":
        return width
    padded = -(-width // FLASH_MULTIPLE) * FLASH_MULTIPLE
    return padded if device == "cuda" and dtype in (torch.bfloat16, torch.float16) and padded <= FLASH_WIDEST else None


def _flexes(given: Sequence[Tensor], rule: Rule) -> bool:
    """Whether flex attention computes such heads on their device; tried before the first of them."""
    device, shapes = given[0].device, tuple(tensor.shape[1:] for tensor in given)
    return device.type in FLEX_DEVICES and _tried(shapes, device, given[0].dtype, rule.scale, rule.softcap, rule.sinks_H is not None)


@cache
def _tried(
    shapes: tuple[torch.Size, ...], device: torch.device, dtype: torch.dtype, scale: float, softcap: float | None, sinks: bool
) -> bool:
    """Compare flex attention and its gradients, which no probe of a model computes, with `_call_by_call`."""
    try:  # two lengths, because the kernels of the second serve all others
        errors = [_flex_error(length, shapes, device, dtype, Rule(scale, 150, softcap), sinks) for length in (300, 500)]
        why = "" if all(error < FLEX_ERROR for error in errors) else f"its relative error is {errors[-1]:.3g}"
    except Exception as failed:  # whatever the compiler lacks on this machine, or its kernels on this device
        if is_memory(failed) or isinstance(failed, torch.AcceleratorError):
            raise
        why = f"{type(failed).__name__}: {failed}".splitlines()[0]
    if why:
        print(f"attention stores its scores in fp32, which the plan does not count: flex attention cannot be used here ({why})", flush=True)
    return not why


def _flex_error(length: int, shapes: Sequence[torch.Size], device: torch.device, dtype: torch.dtype, rule: Rule, sinks: bool) -> float:
    """The largest relative error, in norm, of results and gradients in a row of this length."""
    made = torch.Generator().manual_seed(0)
    spans = spans_of([Span(0, 100), Span(100, 120, 0, 100), Span(220, length - 220)]).each(lambda tensor: tensor.to(device))
    sizes = [*((length, *shape) for shape in shapes), *([shapes[0][:1]] if sinks else [])]
    given = [torch.randn(*size, generator=made).to(device, dtype).requires_grad_() for size in sizes]
    rule = replace(rule, sinks_H=given[3] if sinks else None)
    found = []
    for attention_of in (_by_flex, _call_by_call):
        with torch.enable_grad():
            result = attention_of(given[0], given[1], given[2], spans, rule)
            found.append([result.detach(), *torch.autograd.grad(result.float().square().sum(), given)])
    return float(torch.stack([(one - other).float().norm() / other.float().norm() for one, other in zip(*found, strict=True)]).max())


def _by_flex(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, spans: Spans, rule: Rule) -> Tensor:
    return by_flex(query_THD, key_TKD, value_TKD, spans, rule.scale, rule.window, rule.softcap, rule.sinks_H)


def _on_gpu(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, spans: Spans, rule: Rule) -> Tensor:
    """torch's variable-length flash attention, whose causal mask is aligned to the last key."""
    from torch.nn.attention.varlen import varlen_attn

    if spans.key_places is not None:
        key_TKD, value_TKD = key_TKD[spans.key_places], value_TKD[spans.key_places]
    most_queries = max(span.length for span in spans.all)
    before = -1 if rule.window is None or rule.window >= spans.longest else rule.window - 1
    grouped = {"scale": rule.scale, "window_size": (before, 0), "enable_gqa": key_TKD.shape[1] != query_THD.shape[1]}
    found = varlen_attn(query_THD, key_TKD, value_TKD, spans.queries_S1, spans.keys_S1, most_queries, spans.longest, **grouped)
    assert isinstance(found, Tensor)
    return found


def _call_by_call(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, spans: Spans, rule: Rule) -> Tensor:
    """One kernel call at a time, in fp32: on CPUs the backward pass of bf16 attention is several times slower and less accurate."""
    lengths, numbers = [span.length for span in spans.all], {span.start: number for number, span in enumerate(spans.all)}
    # one split instead of slices, whose backward passes would each allocate a whole row of zeros
    query, key, value = (tensor.float().split(lengths) for tensor in (query_THD, key_TKD, value_TKD))
    grouped = key_TKD.shape[1] != query_THD.shape[1]
    found = []
    for call, mask in zip(calls(spans.all), spans.masks(rule.window), strict=True):
        asking = [numbers[span.start] for span in call]
        seen = [numbers[call[0].prefix_start], *asking] if len(call) == 1 and call[0].prefix_length else asking
        given = _joined(query, asking), _joined(key, seen), _joined(value, seen)
        if rule.is_plain:
            asked = {"attn_mask": mask, "is_causal": mask is None, "scale": rule.scale, "enable_gqa": grouped}
            result = scaled_dot_product_attention(given[0], given[1], given[2], **asked)
        else:
            result = _by_scores(given[0], given[1], given[2], mask, rule)
        found.append(result[0].transpose(0, 1))
    return torch.cat(found).to(query_THD.dtype)


def _by_scores(query_1HTD: Tensor, key_1KSD: Tensor, value_1KSD: Tensor, mask_TS: Tensor | None, rule: Rule) -> Tensor:
    """softmax(cap(scale · Q Kᵀ) ⊕ sinks) V, dropping the sink's weight; causal without a mask. Shape (1, H, T, D)."""
    groups = query_1HTD.shape[1] // key_1KSD.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_1KSD, value_1KSD))
    scores = query_1HTD @ key.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask_TS is None:
        mask_TS = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask_TS, float("-inf"))
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


def _joined(pieces: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """Join pieces of shape (t, H, D) to (1, H, T, D)."""
    whole = pieces[numbers[0]] if len(numbers) == 1 else torch.cat([pieces[number] for number in numbers])
    return whole.transpose(0, 1)[None]


UNDERSTOOD = {"spans", "scaling", "sliding_window", "softcap", "s_aux"}
WITHOUT_EFFECT = {
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "use_cache",
}  # fmt: skip
"""Further arguments that transformers passes; dropout is off in training too."""


def varlen_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    """Attention with transformers' signature: query (1, H, T, D), key and value (1, K, T, D) → ((1, T, H, D), None).

    Raises:
        PedigreeError: the rows are not packed, or the model's attention has features that `varlen` lacks.
    """
    spans: Spans | None = asked.get("spans")
    if spans is None:
        raise PedigreeError(
            f"{type(module).__name__} does not receive the document spans (it passes no keyword arguments to its attention, or the rows "
            "are not packed): set `attention: sdpa` in the execution profile"
        )
    unknown = sorted(name for name, given in asked.items() if given is not None and name not in UNDERSTOOD | WITHOUT_EFFECT)
    if attention_mask is not None:
        unknown.append("its own mask")
    if unknown:
        features = ", ".join(unknown)
        raise PedigreeError(f"the attention of {type(module).__name__} has {features}: set `attention: sdpa` in the execution profile")
    scale = query.shape[-1] ** -0.5 if asked.get("scaling") is None else asked["scaling"]
    rule = Rule(scale, _window(module, asked, spans), asked.get("softcap"), asked.get("s_aux"))
    given = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if spans.sequence_parallel == 1:
        return attend(given[0], given[1], given[2], spans, rule)[None], None
    whole = [all_tokens(tensor, spans) for tensor in given]
    rule = rule if rule.sinks_H is None else replace(rule, sinks_H=own_heads(rule.sinks_H, spans))
    return all_heads(attend(whole[0], whole[1], whole[2], spans, rule), spans)[None], None


def _window(module: Any, asked: Mapping[str, Any], spans: Spans) -> int | None:
    """The window of a layer: from its call, or else from its config, from which transformers would build a mask.

    Raises:
        PedigreeError: the layer attends within chunks, and the longest document is longer than one.
    """
    config = getattr(module, "config", None)
    piece = getattr(config, "attention_chunk_size", None)
    if piece is not None and _kind(module) == "chunked_attention" and spans.longest > piece:
        raise PedigreeError(
            f"layer {module.layer_idx} of the model attends within chunks of {piece} tokens, but a document has {spans.longest}: set "
            "`packing: false` and `attention: eager` in the execution profile"
        )
    if "sliding_window" in asked:
        return asked["sliding_window"]
    kind = _kind(module)
    if kind is not None:
        return getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def _kind(module: Any) -> str | None:
    """Kind of a layer's attention, in a model with several kinds."""
    types, layer = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return types[layer] if types and layer is not None else None


def register() -> None:
    """Register `attn_implementation="varlen"`. Without a mask function transformers builds no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)
