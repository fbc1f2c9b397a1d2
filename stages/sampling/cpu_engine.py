"""What vLLM is asked for on a CPU, beside what it is asked for everywhere."""

import platform
from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

PREFILL_TOKENS = 8192
"""Most prompt tokens of one engine step, where prompts are not chunked; longer contexts raise it."""
SHORT_CONTEXT = 256
"""Tokens up to which blocks of 16 save more by sharing than their kernel costs."""


class ShortBlocks(CPUAttentionBackend):
    """vLLM's attention on CPUs, with the blocks of 16 tokens for which it has a kernel but which it does not offer."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


def arguments(dtype: str, context: int, kv_bytes: int, workers: int) -> dict[str, Any]:
    """Of `vllm.EngineArgs`.

    Args:
        dtype: what the engine computes in.
        context: tokens of the longest request.
        kv_bytes: of the KV cache.
        workers: tensor-parallel processes.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # with it, a seed per request crashes the CPU engine
        "max_num_batched_tokens": max(PREFILL_TOKENS, context),
        "kv_cache_memory_bytes": kv_bytes,
        "block_size": block_size(dtype, context, workers),
    }


def block_size(dtype: str, context: int, workers: int) -> int | None:
    """Tokens in a block of the KV cache: requests share the beginning of their prompts in whole blocks. None: vLLM's own 128.

    In bf16 the attention kernel for AMX units goes by vLLM's own blocks. The kernel for blocks of 16 is one of x86. Workers are processes
    of vLLM's, and know its own attention alone, which takes multiples of 32.
    """
    if dtype != "float32":
        return None
    if context > SHORT_CONTEXT or workers > 1 or platform.machine() != "x86_64":
        return 32
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ShortBlocks.__name__}")
    return 16
