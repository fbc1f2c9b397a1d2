"""Attention of packed documents on a CPU as one operation.

torch's flash attention for CPUs (Dao 2023, arXiv 2307.08691) is called once per document, but autograd and the compiler see one node
for the row. That avoids their overhead per document, and a compiled layer does not depend on the number of documents.

Computes in fp32: on CPUs the backward pass of bf16 attention is several times slower and less accurate.

Shapes: T tokens of the row, H heads, K key heads, D width of a head, S spans.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pedigree.stages.core.spans import Span, calls, mask_of

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Call:
    """One call of the kernel."""

    rows: slice
    """Its queries, and the last of its keys."""
    prefix: slice
    """Its first keys; usually empty."""
    mask_TS: Tensor | None
    """0 where a query sees a key, -inf elsewhere; None for a causal mask."""

    def keys(self, all_TKD: Tensor) -> Tensor:
        own = all_TKD[self.rows]
        return own if self.prefix.stop == 0 else torch.cat([all_TKD[self.prefix], own])


@lru_cache(maxsize=4)
def planned(table: tuple[tuple[int, int, int, int], ...], window: int | None) -> tuple[Call, ...]:
    """The calls for a row, cached because all layers with the same window need the same ones."""
    return tuple(_call(together, window) for together in calls([Span(*numbers) for numbers in table]))


def _call(together: list[Span], window: int | None) -> Call:
    first, last = together[0], together[-1]
    seen = mask_of(together, window, torch.device("cpu"))
    added = None if seen is None else torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    rows, prefix = slice(first.start, last.start + last.length), slice(first.prefix_start, first.prefix_start + first.prefix_length)
    return Call(rows, prefix, added)


def _calls(table_S4: Tensor, window: int | None) -> tuple[Call, ...]:
    return planned(tuple(tuple(numbers) for numbers in table_S4.tolist()[:-1]), window)


def by_flash(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, table_S4: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention within spans and to their prefixes, shape (T, H, D).

    Args:
        query_THD, key_TKD, value_TKD: in any dtype, with equal D.
        table_S4: `Spans.table_S4`.
        scale: factor of the scores.
        window: number of tokens that a token sees, including itself; None for no limit.
    """
    return _attend(query_THD, key_TKD, value_TKD, table_S4, scale, window)[0].to(query_THD.dtype)


@torch.library.custom_op("pedigree::attend", mutates_args=())
def _attend(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, table_S4: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """(result, log Σ exp of each query's scores of shape (H, T)), both fp32."""
    query, key, value = (given.float() for given in (query_THD, key_TKD, value_TKD))
    result_THD, sums_HT = torch.empty(query.shape), torch.empty(query.shape[1], query.shape[0])
    for call in _calls(table_S4, window):
        given = (_form(query[call.rows]), _form(call.keys(key)), _form(call.keys(value)))
        found, sums = flash(*given, 0.0, call.mask_TS is None, attn_mask=call.mask_TS, scale=scale)
        result_THD[call.rows], sums_HT[:, call.rows] = found[0].transpose(0, 1), sums[0]
    return result_THD, sums_HT


@torch.library.custom_op("pedigree::attend_backward", mutates_args=())
def _attend_backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    result_THD: Tensor,
    sums_HT: Tensor,
    table_S4: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtype, summed in fp32."""
    query, key, value = (given.float() for given in (query_THD, key_TKD, value_TKD))
    grad_query, grad_key, grad_value = torch.empty(query.shape), torch.zeros(key.shape), torch.zeros(value.shape)
    for call in _calls(table_S4, window):
        given = (_form(grad_THD[call.rows]), _form(query[call.rows]), _form(call.keys(key)), _form(call.keys(value)))
        kept = (_form(result_THD[call.rows]), sums_HT[None, :, call.rows])
        for_query, *for_both = flash_backward(*given, *kept, 0.0, call.mask_TS is None, attn_mask=call.mask_TS, scale=scale)
        grad_query[call.rows] = for_query[0].transpose(0, 1)
        before = call.prefix.stop - call.prefix.start
        for whole, found in zip((grad_key, grad_value), for_both, strict=True):
            found_SKD = found[0].transpose(0, 1)
            whole[call.rows] += found_SKD[before:]
            if before:
                whole[call.prefix] += found_SKD[:before]
    return grad_query.to(query_THD.dtype), grad_key.to(key_TKD.dtype), grad_value.to(value_TKD.dtype)


def _form(part_THD: Tensor) -> Tensor:
    """(t, H, D) → (1, H, t, D), as the kernel requires."""
    return part_THD.transpose(0, 1)[None]


@_attend.register_fake
def _(query_THD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, width = query_THD.shape
    return query_THD.new_empty(tokens, heads, width, dtype=torch.float32), query_THD.new_empty(heads, tokens, dtype=torch.float32)


@_attend_backward.register_fake
def _(_: Tensor, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (given.new_empty(given.shape) for given in (query_THD, key_TKD, value_TKD))
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.scale, ctx.window = scale, window


def _backward(ctx: Any, grad_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, table_S4, result_THD, sums_HT = ctx.saved_tensors
    return (*_attend_backward(grad_THD, query, key, value, result_THD, sums_HT, table_S4, ctx.scale, ctx.window), None, None, None)


_attend.register_autograd(_backward, setup_context=_keep)
