"""A model's own forward in fp32, from the weights that it computes with."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_OWN = nn.Module.__getattr__
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def in_fp32(module: nn.Module) -> Iterator[None]:
    """Make a forward pass in the block, by the module's own code, compute in fp32 with the weights' values.

    A parameter is widened each time a module's code reads it, and the copy is freed after use: the memory is that of the largest single
    weight, not of a second model. Weights that ZeRO-3 partitions are read while gathered, as without the block, so the block also works
    inside DeepSpeed's engine. Embeddings, and all that follows from them, are fp32 then; buffers stay as they are. The model keeps no
    graph: use it without gradients. Of several threads one at a time is in such a block, because it changes torch's class of modules.
    """
    own, inside = _OWN, {id(part) for part in module.modules()}

    def widened(part: nn.Module, name: str) -> Any:
        found = own(part, name)
        return found.detach().float() if isinstance(found, nn.Parameter) and found.is_floating_point() and id(part) in inside else found

    with _ONE_AT_A_TIME:
        nn.Module.__getattr__ = widened  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with torch.no_grad():
                yield
        finally:
            nn.Module.__getattr__ = own  # pyright: ignore[reportAttributeAccessIssue]
