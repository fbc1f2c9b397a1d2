"""Gradient checkpointing: store only each layer's inputs, and recompute the layer in the backward pass (Chen et al. 2016,
arXiv 1604.06174).

transformers checkpoints a layer only in training mode, which also enables dropout, router noise and layer drop, in modules and in
plain function calls. Here a layer is in training mode only for the decision to checkpoint, and never while it computes, so that dropout
stays off.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pedigree.stages.job.failures import StageError


def recompute_layers(model: nn.Module) -> None:
    """Make the backward pass of a transformers model in evaluation mode recompute its layers instead of storing their activations.

    Raises:
        StageError: transformers cannot checkpoint the layers of this model.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise StageError(
            f"gradient_checkpointing is true, but transformers cannot checkpoint a {type(model).__name__}: set it to false, and lower "
            "micro_batch_tokens if memory runs out"
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer.training = True
        layer._gradient_checkpointing_func = partial(_recomputed, layer)


def _recomputed(layer: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """The checkpointing function that transformers calls. The computation is deterministic, so no random state is stored."""
    if not torch.is_grad_enabled():
        return _in_evaluation_mode(layer, compute, *inputs)
    return checkpoint(_in_evaluation_mode, layer, compute, *inputs, use_reentrant=False, preserve_rng_state=False)


def _in_evaluation_mode(layer: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    layer.training = False
    try:
        return compute(*inputs)
    finally:
        layer.training = True
