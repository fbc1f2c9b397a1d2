"""Which rank is slow: the seconds that each needs for an amount of its own work, relative to the others.

Ranks wait for each other, so a step takes equally long on all. Only parts of training passes without an exchange are timed: forward passes
(as Megatron-LM's `StragglerDetector` does), or linear layers where a forward pass exchanges weights (ZeRO-3) or parts of rows
(`sequence_parallel`). Seconds are divided by the size of the work, because ranks get rows of different lengths.

Nothing waits for a measurement. GPUs mark times by events, which are read when the host has waited for metrics anyway and travel with the
next ones (`Trainer.totals`), so that a line of the curve may show the paces of the step before.
"""

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from pedigree.configs.language.execution import Numerics
from pedigree.stages.training.logprobs import body_of

MOST_LAYERS = 64
"""Linear layers timed per pass, evenly spread: an event costs a GPU's host microseconds."""
MOST_SPANS = 4096
"""Latest spans kept between two exchanges; a value model's trainer has none."""


class Paces:
    """Measures this rank's pace in seconds per unit of work, and keeps those of all ranks."""

    def __init__(self, module: Any, numerics: Numerics) -> None:
        """`module`: of a `Trainer`. With one rank nothing is measured."""
        self.own = 0.0
        """To exchange next; 0 if nothing was measured."""
        self._every: list[Sequence[float]] = []
        self._on_gpu, self._began = numerics.device == "cuda", None
        self._spans: deque[tuple[Any, Any, int]] = deque(maxlen=MOST_SPANS)
        exchanging = numerics.zero_stage == 3 or numerics.sequence_parallel > 1
        parts = _linear_layers(body_of(module.model)[1]) if exchanging else [module]
        for part in parts if numerics.world_size > 1 else ():
            part.register_forward_pre_hook(self._begin)  # after DeepSpeed's own, which waits for the weights
            part.register_forward_hook(self._end, prepend=True)

    def exchanged(self, paces_R: Sequence[float]) -> None:
        """Keep the paces of all ranks, and measure again; called when the device has done all work in its queue."""
        if all(paces_R):
            self._every.append(paces_R)
        spans = [*self._spans]
        self._spans.clear()
        seconds = sum(began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began for began, ended, _ in spans)
        self.own = seconds / sum(work for *_, work in spans) if spans else 0.0

    def slowest(self) -> dict[str, float]:
        """`slowest_of` the paces exchanged since the last call, for the curve."""
        every, self._every = self._every, []
        return slowest_of(every)

    def _begin(self, *_: Any) -> None:
        self._began = self._mark() if torch.is_grad_enabled() else None

    def _end(self, part: Any, given: Any, output: Any) -> None:
        if self._began is not None:
            work = output.numel() * part.in_features if isinstance(part, nn.Linear) else given[0].input_ids_BT.numel()
            self._spans.append((self._began, self._mark(), work))

    def _mark(self) -> Any:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def slowest_of(every_XR: Sequence[Sequence[float]]) -> dict[str, float]:
    """`slowdown`, max_r Σ_x p / mean_r Σ_x p over the paces p of ranks r in exchanges x: 1 if equal, at most the number of ranks; and
    `slowest_rank`, its rank. Empty without paces."""
    sums_R = [sum(paces) for paces in zip(*every_XR, strict=True)]
    if not sums_R:
        return {}
    slowest = max(sums_R)
    return {"slowdown": slowest * len(sums_R) / sum(sums_R), "slowest_rank": sums_R.index(slowest)}


def _linear_layers(body: nn.Module) -> Sequence[nn.Module]:
    every = [part for part in body.modules() if isinstance(part, nn.Linear)]
    return every[:: 1 + len(every) // MOST_LAYERS]
