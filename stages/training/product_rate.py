"""How fast one core multiplies matrices: `python -m stages.training.product_rate` prints it as JSON.

A process of its own, because what plans loads no torch. One thread computes, and its processor time counts, not the clock: what else
runs on the machine changes little.
"""

import json
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

TOKENS, SHAPES = 1024, ((576, 1536), (1536, 576), (576, 576))
"""Rows of a micro-batch, and inputs and outputs of the layers of SmolLM2-135M."""
SECONDS = 0.6
"""Of each of the three measurements."""
READ_BYTES = 256 << 20
"""More than a processor's caches hold."""


def main() -> dict[str, float]:
    """Operations a second in products of each dtype, and bytes a second that are read from memory."""
    torch.set_num_threads(1)
    weights = torch.ones(READ_BYTES // 4)
    return {
        "fp32": products(torch.float32),
        "bf16": products(torch.bfloat16),
        "bandwidth": READ_BYTES / seconds(lambda: weights.sum()),
    }


def products(dtype: torch.dtype) -> float:
    """Operations a second."""
    pairs = [(torch.randn(TOKENS, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)) for inputs, outputs in SHAPES]
    operations = sum(2 * TOKENS * inputs * outputs for inputs, outputs in SHAPES)
    return operations / seconds(lambda: [linear(rows, weight) for rows, weight in pairs])


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, after a first one that warms up."""
    work()
    end, began, calls = time.perf_counter() + SECONDS, time.thread_time(), 0
    while time.perf_counter() < end or calls == 0:
        work()
        calls += 1
    return (time.thread_time() - began) / calls


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(main()))
