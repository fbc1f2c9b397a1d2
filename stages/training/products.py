"""Products of bf16 matrices on CPUs without bf16 units.

There torch multiplies bf16 matrices 3 (AVX-512) to 60 (AVX2) times slower than fp32 ones. bf16 units multiply exactly, accumulate in
fp32 and round the sum to bf16 once; an fp32 product of the widened operands does the same, up to summation order, at the speed of
fp32. With `through_fp32`, torch's CPU kernels get bf16 operands as fp32 and their results are rounded: in forward and backward passes, in
compiled code, and for all callers.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_scaled_dot_product_flash_attention_for_cpu_backward")
"""torch (aten) operations whose results all have the dtype of their operands. Forward attention is already fast."""
INTO = ("mm.out", "addmm.out", "bmm.out", "baddbmm.out")
"""Their variants that write into a tensor, which torch's compiler and grouped matrix products call."""

_library: torch.library.Library | None = None


def through_fp32(wanted: bool) -> None:
    """Set whether this process multiplies bf16 matrices on the CPU in fp32."""
    global _library
    if wanted and _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # kernels are replaced on purpose
            for name in PRODUCTS:
                _library.impl(name, _widened(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True)
            for name in INTO:
                _library.impl(name, _widened_into(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True)
    elif not wanted and _library is not None:
        _library._destroy()
        _library = None


def _widened(kernel: Any) -> Callable[..., Any]:
    def product(keys: Any, *operands: Any, **settings: Any) -> Any:
        if not _has_bf16(operands):
            return kernel.call_boxed(keys, *operands, **settings)
        found = kernel.call_boxed(keys, *map(_wide, operands), **settings)
        return found.bfloat16() if isinstance(found, Tensor) else tuple(part if part is None else part.bfloat16() for part in found)

    return product


def _widened_into(kernel: Any) -> Callable[..., Tensor]:
    def product(keys: Any, *operands: Any, out: Tensor, **settings: Any) -> Tensor:
        if not _has_bf16(operands):
            return kernel.call_boxed(keys, *operands, out=out, **settings)
        wide = torch.empty_like(out, dtype=torch.float32)
        kernel.call_boxed(keys, *map(_wide, operands), out=wide, **settings)
        return out.copy_(wide)

    return product


def _has_bf16(operands: tuple[Any, ...]) -> bool:
    return any(isinstance(one, Tensor) and one.dtype == torch.bfloat16 for one in operands)


def _wide(operand: Any) -> Any:
    return operand.float() if isinstance(operand, Tensor) and operand.dtype == torch.bfloat16 else operand
