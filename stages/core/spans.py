"""Spans of a packed row, each of which attends to itself, causally, and to all of one earlier span."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 256
"""On CPUs a prompt with its answers of up to this many tokens is computed by one masked call, because many tiny calls cost more."""


@dataclass(frozen=True)
class Span:
    """A run of tokens of the row."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class Spans:
    """The spans of a row in order, without gaps, in the formats of the attention kernels."""

    all: tuple[Span, ...]
    queries_S1: Tensor
    """Cumulative lengths of spans, int32."""
    keys_S1: Tensor
    """Cumulative lengths of spans with their prefixes, int32."""
    key_places: Tensor | None
    """Positions of these keys in the row; None if every prefix is empty."""
    table_S4: Tensor
    """The spans as numbers, in the order of `Span`'s fields, on the host: an argument for operations that are opaque to the compiler."""
    sequence_parallel: int = 1
    """Ranks that compute the row together (`stages/training/sequence_parallel.py`)."""
    _made: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(span.prefix_length + span.length for span in self.all)

    def masks(self, window: int | None) -> tuple[Tensor | None, ...]:
        """For each of `calls` its mask, queries × keys, True where seen; None if causal. Built on first use, because GPU kernels need
        none."""
        if window is not None and window >= self.longest:
            window = None
        return self.once(window, lambda: tuple(mask_of(call, window, self.queries_S1.device) for call in calls(self.all)))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made for the first layer that needs it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Spans":
        """Apply a function to every tensor."""
        places = None if self.key_places is None else change(self.key_places)
        return replace(self, queries_S1=change(self.queries_S1), keys_S1=change(self.keys_S1), key_places=places, _made={})


def spans_of(all_spans: Sequence[Span], sequence_parallel: int = 1) -> Spans:
    lengths = [span.length for span in all_spans]
    with_prefix = [span.prefix_length + span.length for span in all_spans]
    places = None
    if any(span.prefix_length for span in all_spans):
        both = [((span.prefix_start, span.prefix_length), (span.start, span.length)) for span in all_spans]
        runs = [run for prefix_and_span in both for run in prefix_and_span]
        places = torch.from_numpy(np.concatenate([np.arange(start, start + length) for start, length in runs]))
    return Spans(
        all=tuple(all_spans),
        queries_S1=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        keys_S1=torch.tensor([0, *accumulate(with_prefix)], dtype=torch.int32),
        key_places=places,
        # with an empty last span: the compiler would specialize on a row with a single span
        table_S4=torch.tensor([*(astuple(span) for span in all_spans), (0, 0, 0, 0)]),
        sequence_parallel=sequence_parallel,
    )


def calls(all_spans: Sequence[Span]) -> list[list[Span]]:
    """Spans grouped by kernel call on a CPU: a small prompt with its answers, or a single span."""
    grouped: list[list[Span]] = []
    for span in all_spans:
        last = grouped[-1] if grouped else []
        shares = bool(last) and span.prefix_length > 0 and span.prefix_start == last[0].start
        if shares and sum(other.length for other in last) + span.length <= SMALL:
            last.append(span)
        else:
            grouped.append([span])
    return grouped


def mask_of(call: Sequence[Span], window: int | None, device: torch.device) -> Tensor | None:
    """True where a query sees a key; the keys of a single span are its prefix and its own tokens, those of several spans all their
    tokens."""
    first = call[0]
    if len(call) == 1:
        keys = first.prefix_length + first.length
        if window is not None and keys > window:
            seen = torch.ones(keys, keys, dtype=torch.bool, device=device).tril().triu(1 - window)
            return seen[first.prefix_length :]
        if not first.prefix_length:
            return None
        return torch.ones(first.length, keys, dtype=torch.bool, device=device).tril(first.prefix_length)
    width = sum(span.length for span in call)
    mask = torch.zeros(width, width, dtype=torch.bool, device=device)
    times = torch.empty(width, dtype=torch.long, device=device)
    """Position of each token in its document."""
    for span in call:
        begin, end = span.start - first.start, span.start - first.start + span.length
        mask[begin:end, begin:end] = torch.ones(span.length, span.length, dtype=torch.bool, device=device).tril()
        mask[begin:end, : span.prefix_length].fill_(True)
        times[begin:end] = torch.arange(span.prefix_length, span.prefix_length + span.length, device=device)
    return mask if window is None else mask & (times[:, None] - times[None, :] < window)
