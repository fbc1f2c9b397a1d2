"""vLLM settings specific to CPUs."""

import platform
from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from pedigree.data.host import machine

PREFILL_TOKENS = 8192
"""Maximum prompt tokens of one engine step, because prompts are not chunked; longer contexts raise it."""
SHORT_CONTEXT = 256
"""Context in tokens up to which blocks of 16 save more by prefix sharing than their kernel costs."""


class ShortBlocks(CPUAttentionBackend):
    """vLLM's CPU attention with blocks of 16 tokens, which its kernel supports but vLLM does not offer."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


def arguments(dtype: str, context: int, kv_bytes: int, workers: int) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`, for requests of at most `context` tokens and so many tensor-parallel `workers`."""
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # with it, a seed per request crashes the CPU engine
        "max_num_batched_tokens": max(PREFILL_TOKENS, context),
        "kv_cache_memory_bytes": kv_bytes,
        "block_size": block_size(dtype, context, workers),
    }


def block_size(dtype: str, context: int, workers: int) -> int | None:
    """Tokens per block of the KV cache; requests share prompt prefixes in whole blocks. None: vLLM's default of 128.

    The bf16 attention kernel for AMX requires vLLM's default. The kernel for blocks of 16 exists only on x86. vLLM's worker
    processes do not have our backend, and vLLM's own takes multiples of 32.
    """
    if dtype == "bfloat16" and machine.has_amx():
        return None
    if context > SHORT_CONTEXT or workers > 1 or platform.machine() != "x86_64":
        return 32
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ShortBlocks.__name__}")
    return 16
