"""How fast this machine multiplies matrices: `python -m stages.engines.product_rate THREADS` prints it as JSON.

A process of its own, because what plans loads no torch. The shapes are those of a small model's layers and of a micro-batch. Of many
short tries the fastest counts, so that other work on the machine distorts little.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

TOKENS, SHAPES = 1024, ((576, 1536), (1536, 576), (576, 576))
"""Rows of a micro-batch, and inputs and outputs of the layers of SmolLM2-135M."""
SECONDS = 0.6
"""Of tries, for each of the three numbers."""
READ_BYTES = 256 << 20
"""More than a processor's caches hold."""


def main(threads: int) -> dict[str, float]:
    """Operations a second in products of each dtype, and bytes a second that are read from memory."""
    torch.set_num_threads(threads)
    weights = torch.ones(READ_BYTES // 4)
    return {
        "fp32": products(torch.float32),
        "bf16": products(torch.bfloat16),
        "bandwidth": READ_BYTES / fastest(lambda: weights.sum()),
    }


def products(dtype: torch.dtype) -> float:
    """Operations a second."""
    pairs = [(torch.randn(TOKENS, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)) for inputs, outputs in SHAPES]
    operations = sum(2 * TOKENS * inputs * outputs for inputs, outputs in SHAPES)
    return operations / fastest(lambda: [linear(rows, weight) for rows, weight in pairs])


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest try; the first ones, which warm up, are longer."""
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end or best == float("inf"):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(main(int(sys.argv[1]))))
