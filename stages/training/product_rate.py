"""Measure how fast one core multiplies matrices: `python -m pedigree.stages.training.product_rate` prints the result as JSON.

A separate process, because planning does not load torch. Measures processor time of a single thread, so that other work on the machine
has little effect.
"""

import json
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

TOKENS, SHAPES = 1024, ((576, 1536), (1536, 576), (576, 576))
"""Rows of a micro-batch, and inputs and outputs of the layers of SmolLM2-135M."""
SECONDS = 0.6
"""Duration of each of the three measurements."""
READ_BYTES = 256 << 20
"""More than a processor's caches."""


def main() -> dict[str, float]:
    """Operations per second in products of each dtype, and memory reads in bytes per second."""
    torch.set_num_threads(1)
    weights = torch.ones(READ_BYTES // 4)
    return {
        "fp32": products(torch.float32),
        "bf16": products(torch.bfloat16),
        "bandwidth": READ_BYTES / seconds(lambda: weights.sum()),
    }


def products(dtype: torch.dtype) -> float:
    """Operations per second."""
    pairs = [(torch.randn(TOKENS, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)) for inputs, outputs in SHAPES]
    operations = sum(2 * TOKENS * inputs * outputs for inputs, outputs in SHAPES)
    return operations / seconds(lambda: [linear(rows, weight) for rows, weight in pairs])


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, after a warm-up call."""
    work()
    end, began, calls = time.perf_counter() + SECONDS, time.thread_time(), 0
    while time.perf_counter() < end or calls == 0:
        work()
        calls += 1
    return (time.thread_time() - began) / calls


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(main()))
