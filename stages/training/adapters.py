"""Interface to peft: low-rank adapters on a transformers model, and merged weights.

Adapters are injected in place, so the model keeps its class, and losses, packing and checkpoints are unaffected.

A sampler gets the adapters themselves (`write_adapters`), because a merged bf16 weight cannot represent a small update: W + Δ rounds
to W wherever |Δ| is below 2^-9 |W|, which is nearly everywhere in the first steps.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pedigree.configs.methods.training import Lora
from pedigree.stages.job.failures import StageError

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
"""peft's prefix of layer names in adapter files."""


def add_adapters(model: Any, lora: Lora, seed: int) -> None:
    """Add adapters to linear layers of the model's body and freeze everything else; B starts at zero, so outputs do not change.

    Raises:
        StageError: `targets` names a layer that the body lacks, or the body has no layers for adapters.
    """
    from peft import LoraConfig, inject_adapter_in_model

    settings: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "lora_dropout": 0.0, "bias": "none"}
    # by the model's config, peft mistakes dense layers of a mixture for experts; a ModuleList has no config
    inside = nn.ModuleList([model])
    config = LoraConfig(**settings, target_modules=[f"0.{name}" for name in targets(model, lora)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for A
        inject_adapter_in_model(config, inside)


def targets(model: Any, lora: Lora) -> list[str]:
    """Full names of the linear layers to adapt, in the body only, without output or score head.

    Routers with other outputs than a product, and experts stored as one parameter, are not linear layers.
    """
    body = {id(part) for part in model.base_model.modules()}
    linear = [name for name, part in model.named_modules() if type(part) is nn.Linear and id(part) in body]
    if not linear:
        raise StageError(f"the body of {type(model).__name__} has no plain linear layers for lora: train it without `lora`")
    if lora.targets == ALL_LINEAR:
        return linear
    for wanted in lora.targets:
        if not any(is_named(name, wanted) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise StageError(f"lora.targets: the model has no linear layer {wanted!r}; it has {known}")
    return [name for name in linear if any(is_named(name, wanted) for wanted in lora.targets)]


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with an adapter, by name."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Compute without adapters in a `with` block."""
    layers: list[Any] = list(adapted_layers(model).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def is_named(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def plain_weights(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], Tensor]]]:
    """(name in a plain model, its parameters, function that combines them) for every weight, with adapters merged in fp32, and every
    persistent buffer, which has no parameters: a router's correction of its scores is one.

    Call the function while the parameters are gathered (ZeRO-3 partitions them).
    """
    layers: list[Any] = list(adapted_layers(model).values())
    adapters = {id(layer.base_layer.weight): layer for layer in layers}
    own = {id(parameter) for layer in layers for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters())}
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name in model.state_dict():  # by module, which an engine loads one at a time
        plain, parameter = name.replace(".base_layer.", "."), parameters.get(name)
        if name in buffers:
            yield plain, [], buffers[name].detach
        if parameter is None or id(parameter) in own:  # a second name of a tied weight has no parameter
            continue
        layer = adapters.get(id(parameter))
        if layer is None:
            yield plain, [parameter], parameter.detach
        else:
            ((adapter, scale),) = layer.scaling.items()
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            yield plain, [parameter, a, b], lambda w=parameter, a=a, b=b, scale=scale: merged(w, a, b, scale)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in an adapter's file, parameter) of every A and B."""
    for name, parameter in model.named_parameters():
        for kind in ("lora_A", "lora_B"):
            before, found, _ = name.partition(f".{kind}.")
            if found:
                yield f"{PREFIX}{before}.{kind}.weight", parameter


def write_adapters(folder: Path, lora: Lora, weights: dict[str, Tensor]) -> None:
    """Write a folder that peft and vLLM load as an adapter, in the dtype of the weights.

    `folder` is new or empty; `weights` are those of `adapter_weights`, gathered.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    layers = sorted({name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in weights})
    scale = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": layers, **scale}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B A in fp32."""
    return weight.float() + scale * (b.float() @ a.float())
