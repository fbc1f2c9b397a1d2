"""Floating-point operations and seconds of training and generation; each function is one formula, with its source.

Symbols: N parameters that a token is multiplied by (without the input embedding), s tokens of a document, otherwise as in `shapes`.
"""

import math
import platform

from configs.base.work import MAX_RUNNING
from pipelines.estimate.memory import Formula, kv_bytes_per_token
from pipelines.estimate.shapes import Shape

FORMULAS = (
    Formula(
        "operations of a forward pass",
        "2N + 2·L·AD·s per token",
        "Kaplan et al. 2020, arXiv 2001.08361, §2.1; attention: Chowdhery et al. 2022, arXiv 2204.02311, app. "
        "B, halved because a token sees what is before it",
    ),
    Formula(
        "operations of training",
        "three times a forward pass; with LoRA, whose weights get no gradient, twice; one more where layers are computed again",
        "Kaplan et al. 2020; Korthikanti et al. 2022, arXiv 2205.05198, §4",
    ),
    Formula(
        "time of training",
        "operations / (R · peak · utilization)",
        "utilization is assumed, or what finished stages of the kind reached on such a machine",
    ),
    Formula(
        "time of generation",
        "longest answer · (chunks · eN + requests · (prompt + answer/2) · KV bytes) / (P · bandwidth · "
        "bandwidth_utilization), or the answers' operations / (P · peak · utilization) where that is longer; + prompts' operations / "
        "(P · peak · utilization); requests: those of one of `engines`; chunks: of so many as are submitted together, at most 256, the "
        "last of what is left",
        "Pope et al. 2022, arXiv 2211.05102, §2: a token of each request reads all weights and its own keys "
        "and values; Williams et al. 2009, CACM 52(4): the slower of memory and arithmetic decides",
    ),
    Formula(
        "peak of a CPU",
        "rate of one core · t / (1 + σ(t - 1)), t = `threads`, σ = 0.06",
        "the rate is measured (`stages/training/product_rate.py`); Amdahl 1967, AFIPS 30; σ measured, as told above",
    ),
)
CPU_UTILIZATION = 0.6
"""Share of the products' rate that a job reaches on a CPU. SFT of SmolLM2-135M: 0.53 in bf16 on two cores of an AMD EPYC with bf16 units
(docs/benchmarks.md), 0.95 by the processor time of a step in fp32 on a Xeon without; sampling by vLLM on the EPYC: 0.43."""
SERIAL_SHARE = 0.06
"""Of a step of SmolLM2-135M in fp32, what one thread computes while the other waits: measured by the processor time of two threads."""


def forward(shape: Shape, document: float) -> float:
    """Operations of a forward pass, per token of documents of so many tokens."""
    return 2 * shape.multiplied + 2 * shape.layers * shape.heads * shape.head_dim * document


def training(shape: Shape, document: float, *, checkpointing: bool, adapters: bool = False) -> float:
    """Operations of forward and backward pass per token; with gradient checkpointing a second forward pass is computed."""
    passes = (2 if adapters else 3) + checkpointing
    return passes * forward(shape, document)


def seconds(operations: float, gpus: int, peak: float, utilization: float) -> float:
    """Args: operations of all; ranks; operations a second of one GPU; the share of it that is reached."""
    return operations / (gpus * peak * utilization)


def speedup(threads: int) -> float:
    """How many times as fast as one thread so many are."""
    return threads / (1 + SERIAL_SHARE * (threads - 1))


def block_size(device: str, dtype: str, context: float, workers: int) -> int:
    """Tokens in a block of vLLM's KV cache (on a CPU `stages.sampling.cpu_engine.block_size`)."""
    if device == "cuda":
        return 16
    if dtype != "fp32":
        return 128
    return 16 if context <= 256 and workers == 1 and platform.machine() == "x86_64" else 32


def unshared(prompt: float, samples: int, block: int) -> float:
    """Tokens of a prompt that are computed for an answer to it, in the mean: all for its first, and for the others those beyond the whole
    blocks that they share. At least the last token is computed (vLLM's automatic prefix caching)."""
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
    """Seconds to answer requests in chunks.

    Args:
        shape: of the model.
        requests: all of them.
        together: requests that are submitted together, of which `MAX_RUNNING` run at the same time.
        prompt: tokens of one.
        computed: those of them that are computed, in the mean (`unshared`).
        answer: tokens of the longest answer of a chunk: all wait for it, and for each of them the weights are read once, however few wait.
        size: bytes of a weight.
        ranks: of the engine.
        peak: operations a second of one GPU.
        utilization: share of it that prompts reach.
        bandwidth: bytes a second that one GPU reads of its memory.
    """  # fmt: skip
    whole, rest = divmod(math.ceil(requests), max(1, together))
    chunks = whole * math.ceil(together / MAX_RUNNING) + math.ceil(rest / MAX_RUNNING)
    cache = requests * (prompt + answer / 2) * kv_bytes_per_token(shape, size)
    reading = answer * (chunks * size * shape.multiplied + cache) / ranks / bandwidth
    computing = seconds(requests * answer * forward(shape, prompt + answer), ranks, peak, utilization)
    return max(reading, computing) + seconds(requests * computed * forward(shape, prompt), ranks, peak, utilization)
