"""Attention with soft caps and sinks on GPUs: one kernel for the row, which stores no scores.

torch's FlexAttention (Dong et al. 2024, arXiv 2412.05496) compiles a function of a score and a mask into a flash kernel. It skips blocks of
the mask that are empty; which those are is computed from the spans, without a mask of the row. A sink adds e^sink to the sum of a query's
weights, which scales its result O by the log-sum-exp l of its scores:

    O · e^l / (e^l + e^sink) = O · σ(l - sink)

transformers' own form rounds l to bf16, makes the mask of the row, and knows no shared prompts.

Shapes: T tokens of the row, filled up to whole blocks; H heads, K key heads, D width of a head, S spans, B blocks.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pedigree.stages.core.spans import Spans

BLOCK = 128
"""Tokens per block of the mask."""
VARIANTS = 64
"""Maximum variants of the kernel (with or without gradients, of several models, ...); a job needs a handful, and fails above it."""


def by_flex(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    spans: Spans,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention within spans and to their prefixes, shape (T, H, D); for the rest see `attention.Rule`."""
    from torch.nn.attention.flex_attention import AuxRequest

    tokens = len(query_THD)
    filled = BLOCK * max(2, -(-tokens // BLOCK))  # the compiler treats a size of 1 as a case of its own
    given = [pad(tensor, (0, 0, 0, 0, 0, filled - tokens)).transpose(0, 1)[None] for tensor in (query_THD, key_TKD, value_TKD)]
    window = None if window is None or window >= spans.longest else window
    found, sums = _kernel(query_THD.device.type)(
        *given,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=spans.once(("blocks", window), lambda: block_mask(spans, window, filled)),
        scale=scale,
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is not None:
        found = (found * torch.sigmoid(sums.lse - sinks_H.float()[None, :, None])[..., None]).to(found.dtype)
    return found[0].transpose(0, 1)[:tokens]


def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, *_: softcap * torch.tanh(score / softcap)


@cache
def _kernel(device: str) -> Any:
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.specialize_float = True  # scales and caps: two models with different ones would make them inputs, which fails
    torch._dynamo.config.recompile_limit = VARIANTS
    return torch.compile(flex_attention, fullgraph=True) if device == "cuda" else flex_attention


def block_mask(spans: Spans, window: int | None, filled: int) -> Any:
    """Torch's mask of a row: which blocks of queries see which blocks of keys, in part or whole, and which query which key.

    A query sees two runs of keys: of its own span those from `own_T` to itself, and of its prefix those from `prefix_T` to before `end_T`.
    Tokens that fill up the row are a span of their own. Nothing is read from the device or sent to it. Memory: a few T · B bytes.
    """
    from torch.nn.attention.flex_attention import BlockMask

    places_T = torch.arange(filled, dtype=torch.int32, device=spans.queries_S1.device)
    span_T = torch.bucketize(places_T, spans.queries_S1[1:], right=True)
    start_T, length_S = spans.queries_S1[span_T], spans.keys_S1.diff() - spans.queries_S1.diff()
    begin_S = spans.queries_S1[:-1] if spans.key_places is None else spans.key_places[spans.keys_S1[:-1]]
    begin_T, length_T = (pad(each_S, (0, 1))[span_T].int() for each_S in (begin_S, length_S))
    before = (filled if window is None else window) - 1
    own_T = torch.maximum(start_T, places_T - before)
    prefix_T, end_T = begin_T + (length_T + places_T - start_T - before).clamp(min=0), begin_T + length_T

    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((key >= own_T[query]) & (key <= query)) | ((key >= prefix_T[query]) & (key < end_T[query]))

    first_B = places_T[::BLOCK]
    last_B = first_B + BLOCK - 1
    query_T1, own_T1, prefix_T1, end_T1 = (each_T[:, None] for each_T in (places_T, own_T, prefix_T, end_T))
    any_TB = ((last_B >= own_T1) & (first_B <= query_T1)) | ((last_B >= prefix_T1) & (first_B < end_T1))
    all_TB = ((first_B >= own_T1) & (last_B <= query_T1)) | ((first_B >= prefix_T1) & (last_B < end_T1))
    whole_BB = all_TB.unflatten(0, (-1, BLOCK)).all(1)
    part_BB = any_TB.unflatten(0, (-1, BLOCK)).any(1) & ~whole_BB
    return BlockMask.from_kv_blocks(*_listed(part_BB), *_listed(whole_BB), BLOCK_SIZE=BLOCK, mask_mod=seen)


def _listed(blocks_BB: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks of keys of each block of queries, and the blocks of keys, those first."""
    order_BB = blocks_BB.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_BB.sum(-1, dtype=torch.int32)[None, None], order_BB.int()[None, None]
