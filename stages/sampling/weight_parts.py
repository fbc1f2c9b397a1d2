"""Receives a trainer's weights in an engine, part by part, through shared memory: the trainer fills it
(`stages/rlvr/weight_transfer.py`), and refills it after every engine has copied from it.

vLLM's own transfer (`vllm/distributed/weight_transfer`, 0.32) works like this too, but only on GPUs, and its half in the trainer imports
vLLM. Here one protocol carries memory of the host and handles of CUDA, and loads with the functions that vLLM's back ends use.
"""

import base64
import mmap
import os
import pickle
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pedigree.stages.sampling.sampler import WeightPart

ALIGNMENT = 64


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where tensors of so many bytes begin, and the end of the last."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return found


def tensors_of(part: WeightPart, device: torch.device) -> list[tuple[str, Tensor]]:
    """The tensors of a part, without a copy."""
    if part.handles:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        rebuild: Any = rebuild_cuda_tensor
        index = device.index or 0
        given = pickle.loads(base64.b64decode(part.handles))[str(torch.cuda.get_device_properties(index).uuid)]
        # the sixth argument numbers the GPU as the sender sees it
        return [(name, rebuild(*one[:6], index, *one[7:])) for (name, *_), one in zip(part.tensors, given, strict=True)]
    sizes = [getattr(torch, dtype).itemsize * prod(shape) for _, dtype, shape in part.tensors]
    *starts, end = offsets(sizes)
    file = os.open(part.path, os.O_RDWR)
    try:
        memory = torch.frombuffer(mmap.mmap(file, end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
    finally:
        os.close(file)
    return [
        (name, memory[start : start + size].view(getattr(torch, dtype)).view(shape))
        for (name, dtype, shape), start, size in zip(part.tensors, starts, sizes, strict=True)
    ]


@torch.no_grad()
def take(worker: Any, part: WeightPart) -> None:
    """Load a part into the model of a worker of vLLM; with the last one, the model is complete again."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config):
        if part.begins:
            initialize_layerwise_reload(model)
        tensors = tensors_of(part, worker.device)
        model.load_weights(iter(tensors))
        if part.version is None:
            _keep(model, {tensor.untyped_storage().data_ptr() for _, tensor in tensors})
        else:
            finalize_layerwise_reload(model, worker.model_config)
    if worker.device.type == "cuda":
        torch.cuda.synchronize()
    elif part.version is not None:
        pack_output_head(model)


def _keep(model: Any, shared: set[int]) -> None:
    """Copy tensors in `shared` memory that vLLM holds until the rest of their layer arrives: the memory is about to be filled again."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        for _, call in get_layerwise_info(module).loaded_weights:
            for name, given in call.arguments.items():
                if isinstance(given, Tensor) and not given.is_meta and given.untyped_storage().data_ptr() in shared:
                    call.arguments[name] = given.clone()


def pack_output_head(model: Any) -> None:
    """Repack the output head. On CPU the head uses a packed copy of its weights, which vLLM 0.32 does not update if it is tied to the
    embeddings: new embeddings would be used with the old head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
