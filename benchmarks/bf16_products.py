"""SFT in bf16 on a CPU, its products through fp32, against SFT in fp32 and against torch's own bf16 kernels: the same rows and steps.

    python -m benchmarks.bf16_products [--keep FOLDER]

On a CPU without bf16 units the first ratio says what bf16 costs beside fp32, the second what it would cost without the detour.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.pacing import Worker, race
from benchmarks.report import RUNS, Reading, Watch, write
from benchmarks.training import matrix_rate, prepare, speed, tokens_per_step
from benchmarks.workloads import WORKLOADS, Workload
from pedigree.data.host.machine import has_bf16_units, instruction_sets
from pedigree.pipelines.jobs.job_environment import device_settings

SFT = replace(WORKLOADS["sft"], steps=4)
OURS = "through fp32"
SIDES = {
    OURS: replace(SFT, numerics={"bf16_products": "fp32"}),
    "dtype fp32": replace(SFT, dtype="fp32"),
    "torch's bf16": replace(SFT, numerics={"bf16_products": "units"}),
}
GOALS = {"dtype fp32": 0.9, "torch's bf16": 1.0}
"""Of our speed over each of the others'."""


def worker(name: str, workload: Workload, shared: Path) -> Worker:
    """A process for one side, which shares policy and rows with the others."""
    folder = shared / name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    for given in ("policy", "data"):
        if not (folder / given).exists():
            (folder / given).symlink_to(shared / given)
    workload.write(folder)
    command = [sys.executable, "-m", "benchmarks.ours", str(folder)]
    return Worker(command, folder / "log.txt", device_settings(workload.our_numerics()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bf16_products")
    parser.add_argument("--keep", type=Path, help="a folder for the prepared model, rows and logs, kept for the next run")
    given: Any = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder, watch, rate = (given.keep or Path(temporary)).resolve(), Watch(), matrix_rate()
        prepare(SFT, folder)
        tokens = tokens_per_step(SFT, folder)
        runs = [race({name: worker(name, side, folder) for name, side in SIDES.items()}, SFT.steps) for _ in range(RUNS)]
        speeds = {name: [speed(run[name], tokens, SFT.warmup) for run in runs] for name in SIDES}
        readings = [
            Reading(f"SFT in bf16 {OURS} over {peer}", speeds[OURS], speeds[peer], "useful tokens/s", goal=goal)
            for peer, goal in GOALS.items()
        ]
        machine = watch.read() | {
            "matrix_gflops": [round(rate), round(matrix_rate())],
            "bf16_units": has_bf16_units(),
            "instruction_sets": list(instruction_sets()),
        }
        write("bf16-products", readings, ("torch", "transformers", "deepspeed"), machine)


if __name__ == "__main__":
    main()
