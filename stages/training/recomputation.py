"""Gradient checkpointing: of each layer only the inputs are kept, and the backward pass computes the layer again (Chen et al. 2016,
arXiv 1604.06174).

transformers checkpoints a layer in training mode only, and training mode also switches on dropout, router noise and layer drop, in
modules and in plain function calls. Here a layer is in training mode while it is asked whether to checkpoint, and never while it
computes: whatever a model calls its dropout, it stays off.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stages.job.job import StageError


def recompute_layers(model: nn.Module) -> None:
    """Makes the backward pass compute the model's layers again instead of keeping what they have computed.

    Args:
        model: of transformers, in evaluation mode.

    Raises:
        StageError: transformers cannot checkpoint the layers of this model.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise StageError(
            f"gradient_checkpointing is true, and transformers cannot checkpoint a {type(model).__name__}: set it to false, and lower "
            "micro_batch_tokens if memory runs out"
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer.training = True
        layer._gradient_checkpointing_func = partial(_recomputed, layer)


def _recomputed(layer: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """What transformers calls with the layer's own computation; nothing in it is random, so no random state is kept."""
    if not torch.is_grad_enabled():
        return _in_evaluation_mode(layer, compute, *inputs)
    return checkpoint(_in_evaluation_mode, layer, compute, *inputs, use_reentrant=False, preserve_rng_state=False)


def _in_evaluation_mode(layer: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    layer.training = False
    try:
        return compute(*inputs)
    finally:
        layer.training = True
