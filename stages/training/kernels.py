"""Fused kernels for a loaded model (`Numerics.kernels`), from liger-kernel or torch's compiler.

Both replace the same parts: RMS norms, rotary embeddings and gated MLPs, whose many small operations are
memory-bound. Attention, linear layers and adapters are unchanged. Only this instance is changed; other models of the same
architecture in this process keep their kernels.

`liger`: Triton kernels, for the architectures on which the tests check them. Its fused losses are not used: they return a batch's mean
loss, but our losses need log-probabilities of tokens. Its `fused_selective_log_softmax` has no gradient, and its cross-entropy without
reduction has no entropy and no fp32 temperature, so the log-softmax stays ours.

`compiled`: `torch.compile`, once per class and model, for any number of tokens, including the log-softmax. On a CPU it compiles whole
layers, because attention of packed rows is one operation there (`stages/training/cpu_attention.py`); elsewhere the parts above, because
a layer has a graph break at attention and would be recompiled for every number of documents. The generated code, and with it the
summation order of a norm's gradient, depends on the sizes that the compiler sees first. Therefore `settle` runs a row of fixed size before
the first step, and the compiler's disk cache is not used, so that a resumed job computes the same bits.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pedigree.configs.base.installation import missing
from pedigree.configs.language.execution import Numerics
from pedigree.data.host.machine import has_gpu
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.logprobs import EntropyGradient, PolicyModule, RewardModule, RowKernels, rows_forward

Module = TypeVar("Module", bound=PolicyModule | RewardModule)

ACTIVATIONS = {
    "llama": "silu",
    "mistral": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
    "smollm3": "silu",
    "phi3": "silu",
    "olmo2": "silu",
    "gemma": "gelu_pytorch_tanh",
}
"""Architectures on which liger's kernels are tested → the activation that the kernels compute regardless of the model's config."""
ROTATE = "apply_rotary_pos_emb"
"""Name of the function in transformers' modeling files."""
RECOMPILE_LIMIT = 64
"""Maximum variants of one compiled part (with or without gradient, one row or several, ...); a job needs a handful, and fails above it."""
WARMUP_TOKENS = 64
"""Tokens of each document in the row that `settle` compiles."""


def refuse(payload: Path, numerics: Numerics) -> None:
    """Check that the configured kernels support a model, before it is loaded.

    Raises:
        StageError: liger is not installed, or does not support the model.
    """
    if numerics.kernels != "liger":
        return
    if importlib.util.find_spec("liger_kernel") is None:
        raise StageError(f"kernels is liger, but liger-kernel is not installed: {missing('train', gpu=has_gpu())}, or set kernels to torch")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(payload, local_files_only=True, trust_remote_code=False)
    if config.model_type not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise StageError(f"kernels liger supports {known}, but this model is a {config.model_type}: set kernels to compiled or torch")
    computed, own = ACTIVATIONS[config.model_type], getattr(config, "hidden_activation", None) or config.hidden_act
    if own != computed and (own, computed) != ("swish", "silu"):  # two names of one function
        raise StageError(
            f"kernels liger computes {computed} in a {config.model_type}, but this model's activation is {own}: "
            "set kernels to compiled or torch"
        )


def fuse(module: Module, numerics: Numerics) -> Module:
    """Install the configured kernels in a loaded model, and return it.

    Raises:
        StageError: the model has nothing to compile.
    """
    if numerics.kernels == "liger":
        _liger(module.model)
    elif numerics.kernels == "compiled":
        _compiled(module, numerics)
    return module


def _liger(model: Any) -> None:
    """Apply liger to the instance. Liger also patches classes and functions of transformers' module; those are restored."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    modeling = sys.modules[type(model.base_model).__module__]
    own = dict(vars(modeling))
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    changed = {name: value for name, value in vars(modeling).items() if own.get(name) is not value}
    for name in changed:
        setattr(modeling, name, own[name])
    _rotate_by(model, changed[ROTATE])


def _compiled(module: PolicyModule | RewardModule, numerics: Numerics) -> None:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    options: dict[str, Any] = {"fx_graph_cache": False, "deterministic": numerics.deterministic}

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=True, options=dict(options))

    body = module.model.base_model
    whole_layers = numerics.device == "cpu" and numerics.shares_prompts
    forms: dict[type, Callable[..., Any]] = {}
    for part in _parts(body, whole_layers):
        kind = type(part)
        forms[kind] = forms.get(kind) or compiled(kind.forward)
        part.forward = MethodType(forms[kind], part)
    if not forms:
        raise StageError(f"kernels compiled: a {type(body).__name__} has no layer, norm or gated MLP to compile: set kernels to torch")
    rotate = getattr(sys.modules[type(body).__module__], ROTATE, None)
    if rotate is not None and not any(_is_layer(kind) for kind in forms):
        _rotate_by(module.model, compiled(rotate))
    if isinstance(module, PolicyModule):
        module.rows = RowKernels(compiled(rows_forward), compiled(fusable_rows_backward))


def _parts(module: nn.Module, whole_layers: bool) -> Iterator[nn.Module]:
    """The parts of a model to compile. A layer with experts is not compiled as a whole: the compiler does not support the backward pass
    of transformers' grouped matrix product."""
    for part in module.children():
        whole = whole_layers and _is_layer(type(part)) and not any("Expert" in type(inner).__name__ for inner in part.modules())
        if whole or _is_norm(part) or _is_gated(part):
            yield part
        else:
            yield from _parts(part, whole_layers)


def _is_layer(kind: type) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return issubclass(kind, GradientCheckpointingLayer)


def _is_norm(part: nn.Module) -> bool:
    """Whether it is a norm worth compiling; `nn.LayerNorm` is already a single kernel."""
    return type(part).__name__.endswith("Norm") and not isinstance(part, nn.LayerNorm) and not list(part.children())


def _is_gated(part: nn.Module) -> bool:
    """Whether it is a gated MLP, act(gate) · up, with separate or fused projections; experts have parameters with these names instead."""
    ups = ("gate_up_proj",) if hasattr(part, "gate_up_proj") else ("gate_proj", "up_proj")
    return all(isinstance(getattr(part, name, None), nn.Module) for name in ("down_proj", *ups))


def _rotate_by(model: nn.Module, rotate: Callable[..., Any]) -> None:
    """Make the attention of this instance use `rotate` instead of its module's function."""
    for part in model.modules():
        plain: Any = type(part).forward
        if isinstance(plain, FunctionType) and ROTATE in plain.__code__.co_names:
            own = FunctionType(plain.__code__, {**plain.__globals__, ROTATE: rotate}, plain.__name__, plain.__defaults__, plain.__closure__)
            own.__kwdefaults__ = plain.__kwdefaults__
            part.forward = MethodType(own, part)


def fusable_rows_backward(
    logits_NV: Tensor,
    targets_N: Tensor,
    normalizers_N: Tensor,
    weights_N: Tensor,
    temperature: float,
    entropies: EntropyGradient | None = None,
) -> Tensor:
    """`rows_backward` without a scatter, which would materialize an fp32 copy of the rows."""
    logps = logits_NV.float() / temperature - normalizers_N[:, None]
    probabilities = logps.exp()
    hits = torch.arange(logits_NV.shape[1], device=logits_NV.device)[None] == targets_N[:, None]
    gradient = (hits.float() - probabilities) * weights_N[:, None]
    if entropies is not None:
        entropies_N, gradients_N = entropies
        gradient = gradient - gradients_N[:, None] * probabilities * (logps + entropies_N[:, None])
    return gradient.to(logits_NV.dtype)


def settle(module: Any, trained: Sequence[nn.Parameter], numerics: Numerics, device: torch.device) -> None:
    """Compile for training with a forward and backward pass over artificial documents, as large as the numerics allow.
    Leaves no gradients. The module is on its device, in its dtype; `trained` are its trainable parameters.

    Raises:
        StageError: the model cannot be compiled.
    """
    if numerics.kernels != "compiled":
        return
    import torch._dynamo.exc

    config = module.model.config.get_text_config()
    length = min(WARMUP_TOKENS, getattr(config, "max_position_embeddings", WARMUP_TOKENS))
    count = max(1, numerics.micro_batch_tokens // length) if numerics.packing else numerics.micro_batch_sequences
    ids = [3 + 7 * place % max(1, config.vocab_size - 4) for place in range(length)]
    batch = collate([(document(ids[:1], ids[1:]),)] * count, numerics, 0).to(device)
    try:
        found = module(batch)
        total = (found[0] if isinstance(found, tuple) else found).sum()
        torch.autograd.grad(total, tuple(trained), allow_unused=True)
    except torch._dynamo.exc.TorchDynamoException as error:
        why = str(error).splitlines()[0]
        raise StageError(f"kernels compiled: torch cannot compile this model ({why}): set kernels to torch") from error
