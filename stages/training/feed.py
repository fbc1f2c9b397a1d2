"""The micro-batches of a rank, prefetched: while the device computes one, a thread of the host makes the tensors of the next.

A stage names its global batches one after the other, as a function of the step alone; so nothing that is prefetched needs to be in a
checkpoint, and a job that resumes prepares the same micro-batches again. On GPUs tensors are made in pinned memory: they are copied
while the host goes on, and no forward pass waits for the device.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from configs.language.execution import Numerics
from stages.core.batches import MicroBatch, MicroBatchPlan, Unit, collate, plan_step

T = TypeVar("T")
PREFETCH_DEPTH = 4
"""Most micro-batches that are ready before they are used."""
_END = object()


@contextmanager
def prefetch(items: Iterable[T], depth: int = PREFETCH_DEPTH) -> Iterator[Iterator[T]]:
    """The items in their order, at most `depth` of them made by a thread before they are taken.

    An exception in the thread is raised where its item would have been taken. The thread ends with the block, at the latest when the
    item that it is making is done.
    """
    room, ended = threading.Semaphore(depth), threading.Event()
    ready: SimpleQueue[tuple[T | object, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            source = iter(items)
            while room.acquire() and not ended.is_set():
                ready.put((next(source), None))
        except StopIteration:
            ready.put((_END, None))
        except BaseException as error:  # the boundary of the thread: the consumer that waits for the item gets it
            ready.put((_END, error))

    def take() -> Iterator[Any]:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            room.release()
            yield item

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        ended.set()
        room.release()
        thread.join()


def no_extras(_: Sequence[int]) -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True)
class GlobalBatch:
    """Units that all ranks work through together: mostly the global batch of an optimizer step. Equal on all ranks."""

    units: Sequence[Unit]
    extras: Callable[[Sequence[int]], Mapping[str, Tensor]] = no_extras
    """Indices of units → further tensors that a micro-batch of these units needs (labels, margins, log-probs), on the host."""


@dataclass(frozen=True)
class PreparedMicroBatch:
    """One forward pass of this rank, with what its loss needs besides the tokens."""

    units: tuple[int, ...]
    """Indices in its global batch."""
    weight: float
    """0 for a repeated pass that only keeps the ranks in step."""
    batch: MicroBatch
    extras: Mapping[str, Tensor]

    def each(self, change: Callable[[Tensor], Tensor]) -> "PreparedMicroBatch":
        """The same with every tensor changed."""
        return replace(self, batch=self.batch.each(change), extras={name: change(value) for name, value in self.extras.items()})


class Feed:
    """The micro-batches of one rank, prefetched."""

    def __init__(self, prefetched: Iterator[PreparedMicroBatch | None], device: torch.device) -> None:
        self._prefetched, self._device = prefetched, device

    def micro_batches(self) -> Iterator[PreparedMicroBatch]:
        """Those of the next global batch, on the device; take all of them before those of the one after it."""
        while (micro_batch := next(self._prefetched)) is not None:
            yield micro_batch.each(lambda tensor: tensor.to(self._device, non_blocking=True))


@contextmanager
def feed(
    batches: Iterable[GlobalBatch], rank: int, world_size: int, numerics: Numerics, pad_id: int, device: torch.device
) -> Iterator[Feed]:
    """The micro-batches of one rank. Those of the next global batch are prefetched while the gradient of this one is applied."""

    def prepare() -> Iterator[PreparedMicroBatch | None]:
        if device.index is not None:
            torch.cuda.set_device(device)  # of this thread: pinned memory belongs to a context
        for batch in batches:
            for planned in plan_step(batch.units, rank, world_size, numerics) if batch.units else []:
                micro_batch = prepare_micro_batch(batch, planned, numerics, pad_id)
                yield micro_batch.each(Tensor.pin_memory) if device.type == "cuda" else micro_batch
            yield None

    with prefetch(prepare()) as prefetched:
        yield Feed(prefetched, device)


def prepare_micro_batch(batch: GlobalBatch, planned: MicroBatchPlan, numerics: Numerics, pad_id: int) -> PreparedMicroBatch:
    tensors = collate([batch.units[index] for index in planned.units], numerics, pad_id, planned.most_trained)
    return PreparedMicroBatch(planned.units, planned.weight, tensors, batch.extras(planned.units))
