"""Floating-point operations and seconds of training and generation: each function implements one formula of `formulas.md`.

Symbols: N parameters multiplied per token (without the input embedding), s tokens of a document, otherwise as in `shapes`.
"""

import math
import platform

from pedigree.configs.base.work import MAX_RUNNING
from pedigree.data.host import machine
from pedigree.pipelines.estimate.peak_memory import kv_bytes_per_token
from pedigree.pipelines.estimate.shapes import Shape

CPU_UTILIZATION = 0.6
"""Share of the matmul rate that a job reaches on a CPU. SFT of SmolLM2-135M: 0.53 in bf16 on two cores of an AMD EPYC with bf16 units
(docs/benchmarks.md), 0.95 by the CPU time of a step in fp32 on a Xeon without them; vLLM sampling on the EPYC: 0.43."""
SERIAL_SHARE = 0.06
"""Serial fraction of a step of SmolLM2-135M in fp32, measured by the CPU time of two threads."""


def forward(shape: Shape, document: float) -> float:
    """Operations of a forward pass per token, for documents of `document` tokens."""
    return 2 * shape.multiplied + 2 * shape.layers * shape.heads * shape.head_dim * document


def training(shape: Shape, document: float, *, checkpointing: bool, adapters: bool = False) -> float:
    """Operations of a forward and backward pass per token; gradient checkpointing adds a second forward pass."""
    return ((2 if adapters else 3) + checkpointing) * forward(shape, document)


def seconds(operations: float, gpus: int, peak: float, utilization: float) -> float:
    """Time of operations on ranks that each reach a share of the peak, in operations per second."""
    return operations / (gpus * peak * utilization)


def speedup(threads: int) -> float:
    """Speedup of `threads` threads over one."""
    return threads / (1 + SERIAL_SHARE * (threads - 1))


def block_size(device: str, dtype: str, context: float, workers: int) -> int:
    """Tokens per block of vLLM's KV cache (on a CPU, `stages.sampling.cpu_engine.block_size`)."""
    if device == "cuda":
        return 16
    if dtype == "bf16" and machine.has_amx():
        return 128
    return 16 if context <= 256 and workers == 1 and platform.machine() == "x86_64" else 32


def unshared(prompt: float, samples: int, block: int) -> float:
    """Mean prompt tokens computed per answer with vLLM's automatic prefix caching.

    The first answer computes all tokens, the others only those beyond the shared whole blocks, which is at least the last token.
    """
    beyond = prompt - block * ((prompt - 1) // block)
    return (prompt + (samples - 1) * beyond) / samples


def generation(
    shape: Shape,
    *,
    requests: float,
    together: int,
    prompt: float,
    computed: float,
    answer: float,
    size: int,
    ranks: int,
    peak: float,
    utilization: float,
    bandwidth: float,
) -> float:
    """Seconds to answer `requests` in chunks of `together`, of which `MAX_RUNNING` run concurrently.

    `prompt` is tokens per prompt, of which `computed` are computed on average (`unshared`); `answer` is tokens of the longest answer of a
    chunk, which determines its duration, as each reads the weights once. `size` is bytes per weight; `peak` (operations) and `bandwidth`
    (bytes) are those of one GPU per second, and `utilization` is the share of the peak that is reached.
    """
    whole, rest = divmod(math.ceil(requests), max(1, together))
    chunks = whole * math.ceil(together / MAX_RUNNING) + math.ceil(rest / MAX_RUNNING)
    cache = requests * (prompt + answer / 2) * kv_bytes_per_token(shape, size)
    reading = answer * (chunks * size * shape.multiplied + cache) / ranks / bandwidth
    computing = seconds(requests * answer * forward(shape, prompt + answer), ranks, peak, utilization)
    return max(reading, computing) + seconds(requests * computed * forward(shape, prompt), ranks, peak, utilization)
