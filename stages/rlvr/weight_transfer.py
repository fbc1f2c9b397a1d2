"""Transfers the trained weights to the engines without a file, part by part, through memory from which the engines copy."""

import base64
import mmap
import os
import pickle
import shutil
from collections.abc import Iterator

import torch
from torch import Tensor

from pedigree.configs.methods.training import Rlvr
from pedigree.stages.job.job import Job
from pedigree.stages.rlvr.handover import release
from pedigree.stages.sampling.engines import Fleet
from pedigree.stages.sampling.sampler import WeightPart, write_version
from pedigree.stages.sampling.vllm_engine import allocator
from pedigree.stages.sampling.weight_parts import offsets
from pedigree.stages.training.trainer import Trainer

PART_BYTES = 64 << 20
"""Bytes of a part; a larger parameter is a part of its own."""


def load_weights(engines: Fleet | None, trainer: Trainer, version: int, config: Rlvr, job: Job) -> None:
    """Transfer the trained weights to the engines, adapters through a folder; called on all ranks. Their version is the number of updates
    that made them."""
    if config.lora is not None:
        folder = job.folder / "weights"
        if engines:
            shutil.rmtree(folder, ignore_errors=True)
        trainer.export_adapters(folder, config.lora)
        release(trainer)
        if engines:
            write_version(folder, version)
            engines.load_adapters(folder)
        return
    release(trainer)
    gpus = job.placement.engines * job.numerics.tensor_parallel
    memory = GpuMemory(trainer, opened=trainer.rank < gpus) if reachable(config, job) else HostMemory(trainer)
    try:
        for part in parts(trainer, memory, version):
            if engines:
                engines.update(part)
            trainer.barrier()
    finally:
        memory.close()


def reachable(config: Rlvr, job: Job) -> bool:
    """Whether each engine is another process on a GPU of one of this machine's ranks, where it can use the rank's memory."""
    placement, numerics = job.placement, job.numerics
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = numerics.device == "cuda" and placement.sampler_process == "own" and config.asynchronous is None
    return own and placement.engines * numerics.tensor_parallel <= ranks


class HostMemory:
    """Memory of the host that rank 0 fills. Its file has no name in any folder: the kernel frees it with the last process that uses it,
    however that ends, and the size of /dev/shm is no limit."""

    def __init__(self, trainer: Trainer) -> None:
        self._rank = trainer.rank
        self._file = os.memfd_create("weights")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[tuple[str, str, list[int]]] = []
        self.used = 0

    def put(self, name: str, tensor: Tensor) -> None:
        start, end = self.used, self.used + offsets([tensor.nbytes])[-1]
        if end > len(self._bytes) and self._rank == 0:
            size = max(end, PART_BYTES)
            os.ftruncate(self._file, size)
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        if self._rank == 0:
            self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._tensors.append(_described(name, tensor))
        self.used = end

    def part(self, begins: bool, version: int | None) -> WeightPart:
        found = WeightPart(self._tensors, begins, version, path=f"/proc/{os.getpid()}/fd/{self._file}")
        self._tensors, self.used = [], 0
        return found

    def close(self) -> None:
        os.close(self._file)


class GpuMemory:
    """Copies on each rank's GPU, which engines on the same GPU open by CUDA's handles (`reduce_tensor`, as vLLM's `ipc_engine.py`).

    Expandable segments, which jobs on GPUs use, have no such handles: they are off while the copies are made.
    """

    def __init__(self, trainer: Trainer, *, opened: bool) -> None:
        """`opened`: whether an engine uses this rank's GPU; a copy with a handle would never be freed if no engine opened it."""
        self._trainer, self._opened = trainer, opened
        self._tensors: list[tuple[str, str, list[int]]] = []
        self._held: list[Tensor] = []
        self._sent: list[Tensor] = []
        if settings := allocator(expandable=False):
            torch.cuda.memory._set_allocator_settings(settings)
        self.used = 0

    def put(self, name: str, tensor: Tensor) -> None:
        self._tensors.append(_described(name, tensor))
        if self._opened:
            self._held.append(tensor.to(self._trainer.device).contiguous().clone())
        self.used += tensor.nbytes

    def part(self, begins: bool, version: int | None) -> WeightPart:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize()
        uuid = str(torch.cuda.get_device_properties(self._trainer.device).uuid)
        handles = self._trainer.from_all_ranks({uuid: [reduce_tensor(tensor)[1] for tensor in self._held]} if self._opened else {})
        pickled = base64.b64encode(pickle.dumps({gpu: own for one in handles for gpu, own in one.items()})).decode()
        found = WeightPart(self._tensors, begins, version, handles=pickled)
        self._sent, self._held, self._tensors, self.used = self._held, [], [], 0  # engines use it until the next part
        return found

    def close(self) -> None:
        self._sent = []
        torch.cuda.ipc_collect()
        if settings := allocator(expandable=True):
            torch.cuda.memory._set_allocator_settings(settings)


def parts(trainer: Trainer, memory: HostMemory | GpuMemory, version: int) -> Iterator[WeightPart]:
    """All weights in `memory`, as many at a time as `PART_BYTES` hold; called on all ranks."""
    begins = True
    for name, tensor in trainer.weights():
        if memory.used and memory.used + tensor.nbytes > PART_BYTES:
            yield memory.part(begins, None)
            begins = False
        memory.put(name, tensor)
    yield memory.part(begins, version)


def _described(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
