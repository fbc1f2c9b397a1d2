"""What the processor of this machine can do, as the kernel tells it: nothing is imported that computes."""

import functools
import os
import re
from pathlib import Path

from configs.execution import Numerics

CPUINFO = Path("/proc/cpuinfo")
BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
"""Instruction sets that multiply bf16 numbers: x86's two, and Arm's."""
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""What oneDNN may be limited to, by one of these variables, so that it leaves bf16 units alone."""


@functools.cache
def instruction_sets(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Names as the kernel has them, e.g. `avx2`; none where it does not tell."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(found[1].split() if found else ())


def has_bf16_units() -> bool:
    """Whether products of bf16 matrices are fast here: torch, oneDNN and vLLM use the same instructions for them."""
    limited = any(os.environ.get(name, "").upper() in WITHOUT_BF16 for name in ONEDNN_LIMITS)
    return not limited and not instruction_sets().isdisjoint(BF16_UNITS)


def settled(numerics: Numerics) -> Numerics:
    """The numerics with what they leave to the machine that computes."""
    if numerics.bf16_products != "auto":
        return numerics
    units = numerics.device == "cuda" or has_bf16_units()
    return numerics.model_copy(update={"bf16_products": "units" if units else "fp32"})
