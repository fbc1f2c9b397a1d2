"""Forward passes prepared ahead: while the device computes one, a thread of the host makes the tensors of the next.

A stage says what its passes are about, round by round (`Round`, mostly a step's global batch), as a function of the step alone; so
nothing of what is prepared needs to be in a checkpoint, and a job that goes on prepares the same again. On GPUs tensors are made in
pinned memory: they are copied while the host goes on, and no pass waits for the device.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from configs.execution import Numerics
from stages.core.batches import Micro, MicroBatch, Unit, collate, plan_step

T = TypeVar("T")
DEPTH = 4
"""Passes that lie ready at most."""
_END = object()


@contextmanager
def ahead(items: Iterable[T], depth: int = DEPTH) -> Iterator[Iterator[T]]:
    """The items in their order, at most `depth` of them made by a thread before they are taken.

    What the thread raises is raised where the item would have been taken. The thread ends with the block, at the latest when the item
    at work is done.
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
        except BaseException as error:  # the boundary of the thread: whoever waits for the item gets it
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

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        ended.set()
        room.release()
        thread.join()


def nothing(_: Sequence[int]) -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Round:
    """Units whose passes are made one after the other, the same on all ranks."""

    units: Sequence[Unit]
    beside: Callable[[Sequence[int]], Mapping[str, Tensor]] = nothing
    """What a pass over these places of `units` needs besides, on the host."""


@dataclass(frozen=True)
class Prepared:
    """One forward pass of this rank."""

    units: tuple[int, ...]
    """Places in its round."""
    weight: float
    """0 for a pass that only keeps ranks in step."""
    batch: MicroBatch
    beside: Mapping[str, Tensor]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Prepared":
        return replace(self, batch=self.batch.each(change), beside={name: change(value) for name, value in self.beside.items()})


class Feed:
    """The passes of rounds that are prepared ahead."""

    def __init__(self, prepared: Iterator[Prepared | None], device: torch.device) -> None:
        self._prepared, self._device = prepared, device

    def passes(self) -> Iterator[Prepared]:
        """The passes of the next round, on the device; all are to be taken before the round after it."""
        while (made := next(self._prepared)) is not None:
            yield made.each(lambda tensor: tensor.to(self._device, non_blocking=True))


@contextmanager
def feed(rounds: Iterable[Round], rank: int, world_size: int, numerics: Numerics, pad_id: int, device: torch.device) -> Iterator[Feed]:
    """The passes of one rank, prepared ahead also beyond the end of a round, while its gradient is applied."""

    def prepare() -> Iterator[Prepared | None]:
        if device.index is not None:
            torch.cuda.set_device(device)  # of this thread: pinned memory belongs to a context
        for one in rounds:
            for micro in plan_step(one.units, rank, world_size, numerics) if one.units else []:
                made = made_of(one, micro, numerics, pad_id)
                yield made.each(Tensor.pin_memory) if device.type == "cuda" else made
            yield None

    with ahead(prepare()) as prepared:
        yield Feed(prepared, device)


def made_of(given: Round, micro: Micro, numerics: Numerics, pad_id: int) -> Prepared:
    batch = collate([given.units[place] for place in micro.units], numerics, pad_id, micro.most_trained)
    return Prepared(micro.units, micro.weight, batch, given.beside(micro.units))
