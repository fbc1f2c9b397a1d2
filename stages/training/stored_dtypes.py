"""Which values of a bf16 model's files are finer than bf16: persistent buffers, and parameters that transformers keeps in fp32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def to_dtype(model: Any, dtype: torch.dtype) -> None:
    """Round a model's parameters to what its files should contain. Buffers are no weights and stay: transformers rounds them when it loads
    a model that computes with rounded ones."""
    finer = _kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if finer(name) else dtype)


def is_stored_in_bf16(payload: Path, auto: Any) -> bool:
    """Whether all weights of a folder are bf16. Loaded as such they are pages of the file, which all ranks of a machine share; in fp32
    each rank would hold the whole model.

    Args:
        auto: the class of transformers that makes the model.
    """
    from safetensors import safe_open

    dtypes: dict[str, str] = {}
    for path in payload.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            dtypes |= {name: file.get_slice(name).get_dtype() for name in file.keys()}
    others = {name for name, dtype in dtypes.items() if dtype != "BF16"}
    return not others or (len(others) < len(dtypes) and others == _finer(payload, auto, others))


def _finer(payload: Path, auto: Any, names: set[str]) -> set[str]:
    """Those of the tensors that are no weights, or that transformers keeps in fp32 in a bf16 model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(payload, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = auto.from_config(config)
    kept, buffers = _kept_in_fp32(model, torch.bfloat16), {_last(name) for name, _ in model.named_buffers()}
    return {name for name in names if kept(name) or _last(name) in buffers}


def _kept_in_fp32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether transformers gives a parameter of this name fp32 when it loads the model in `dtype`."""
    from transformers.core_model_loading import build_glob_alternation

    patterns = model._get_dtype_plan(dtype)
    if not patterns:
        return lambda name: False
    pattern, *_ = build_glob_alternation(list(patterns))
    return lambda name: pattern.search(name) is not None


def _last(name: str) -> str:
    """What a file calls a module differs more than its own names do."""
    return name.rpartition(".")[2]
