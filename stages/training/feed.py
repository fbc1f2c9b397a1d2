"""Prefetch a rank's micro-batches: while the device computes one, a host thread builds the tensors of the next.

A stage's global batches depend only on the step, so prefetched data need not be in checkpoints, and a resumed job prepares the same
micro-batches. On GPUs tensors are built in pinned memory and copied asynchronously.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import MicroBatch, Unit, collate, plan_step

T = TypeVar("T")
PREFETCH_DEPTH = 4
"""Maximum number of micro-batches prepared ahead."""
_END = object()


@contextmanager
def prefetch(items: Iterable[T], depth: int = PREFETCH_DEPTH) -> Iterator[Iterator[T]]:
    """Iterate over items in order, with up to `depth` of them produced ahead in a thread.

    An exception in the thread is raised at its item's position. The thread ends with the block, after its current item.
    """
    source = iter(items)
    thread = ThreadPoolExecutor(1, "prefetch")
    ahead = deque(thread.submit(next, source, _END) for _ in range(depth))

    def take() -> Iterator[Any]:
        while (item := ahead.popleft().result()) is not _END:
            ahead.append(thread.submit(next, source, _END))
            yield item

    try:
        yield take()
    finally:
        thread.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class GlobalBatch:
    """Units that all ranks process together, usually the global batch of an optimizer step. Equal on all ranks."""

    units: Sequence[Unit]
    extras: Callable[[Sequence[int]], Mapping[str, Tensor]] = lambda _: {}
    """Unit indices → further tensors for a micro-batch of these units (labels, margins, log-probs), on the host."""


@dataclass(frozen=True)
class PreparedMicroBatch:
    """One forward pass of this rank, with the tensors of its loss."""

    units: tuple[int, ...]
    """Indices in its global batch."""
    weight: float
    """0 for a repeated pass that only keeps the ranks in step."""
    batch: MicroBatch
    extras: Mapping[str, Tensor]

    def each(self, change: Callable[[Tensor], Tensor]) -> "PreparedMicroBatch":
        """Apply a function to every tensor."""
        return replace(self, batch=self.batch.each(change), extras={name: change(value) for name, value in self.extras.items()})


class Feed:
    """The micro-batches of one rank, prefetched."""

    def __init__(self, prefetched: Iterator[PreparedMicroBatch | None], device: torch.device) -> None:
        self._prefetched, self._device = prefetched, device

    def micro_batches(self) -> Iterator[PreparedMicroBatch]:
        """The micro-batches of the next global batch, on the device. Consume all of them before the next call."""
        while (micro_batch := next(self._prefetched)) is not None:
            yield micro_batch.each(lambda tensor: tensor.to(self._device, non_blocking=True))


@contextmanager
def feed(
    batches: Iterable[GlobalBatch], rank: int, world_size: int, numerics: Numerics, pad_id: int, device: torch.device
) -> Iterator[Feed]:
    """Open the feed of one rank. The next global batch is prefetched while the gradient of the current one is applied."""
    together = numerics.sequence_parallel

    def prepare() -> Iterator[PreparedMicroBatch | None]:
        if device.index is not None:
            torch.cuda.set_device(device)  # for this thread: pinned memory belongs to a CUDA context
        for batch in batches:
            for planned in plan_step(batch.units, rank // together, world_size // together, numerics) if batch.units else []:
                tensors = collate([batch.units[index] for index in planned.units], numerics, pad_id)
                micro_batch = PreparedMicroBatch(planned.units, planned.weight, tensors, batch.extras(planned.units))
                yield micro_batch.each(Tensor.pin_memory) if device.type == "cuda" else micro_batch
            yield None

    with prefetch(prepare()) as prefetched:
        yield Feed(prefetched, device)
