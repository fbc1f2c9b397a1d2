"""Our training stages against TRL on one machine: useful tokens per second and peak memory, same model, rows and batches.

    python -m benchmarks.training [--only NAME,NAME] [--keep FOLDER]

Three processes take their optimizer steps in turn (`benchmarks/pacing.py`), over the same documents in the same order: ours, TRL with
the allocator and thread settings of our jobs, and TRL with what its documentation asks for. Useful tokens are those of prompts and
answers, no padding, counted once per document on all sides. Work is equal: losses and gradient norms of the first step must agree.
The first steps warm up and are not counted; a run gives all useful tokens of the others over all their seconds. There are several
runs, each with new processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pacing import Laps, Worker, race
from benchmarks.report import RUNS, Reading, Watch, write
from benchmarks.workloads import PEERS, THREADS, WORKLOADS, Workload
from pedigree.pipelines.jobs.job_environment import device_settings

PACKAGES = ("torch", "transformers", "deepspeed", "trl", "accelerate")
AS_DOCUMENTED, MEMORY = "TRL as documented", "peak memory"
"""Suffixes of a workload's title in the names of its other readings."""


def tokens_per_step(workload: Workload, folder: Path) -> list[int]:
    """Useful tokens of each optimizer step."""
    lengths = [sum(len(document["ids"]) for document in unit) for unit in json.loads((folder / "units.json").read_text())]
    size = workload.global_batch
    return [sum(lengths[step * size : (step + 1) * size]) for step in range(workload.steps)]


def speed(laps: Laps, tokens: list[int], warmup: int) -> float:
    """Useful tokens per second over all counted steps."""
    return sum(tokens[warmup:]) / sum(laps.seconds[warmup:])


def refuse_unequal(workload: Workload, ours: Laps, peer: Laps) -> dict[str, float]:
    """How far loss and norm of the gradient of the first steps are apart, relative to the peer's. A policy gradient's loss is near zero
    whatever is trained: its gradient alone is compared.

    Raises:
        SystemExit: further than rounding explains, so the two sides do not do the same work.
    """
    names = ("grad_norm",) if workload.task == "rlvr" else ("loss", "grad_norm")
    apart = {name: abs(ours.first[name] - peer.first[name]) / abs(peer.first[name]) for name in names}
    bounds = {"loss": workload.tolerance, "grad_norm": 5 * workload.tolerance}
    for name, gap in apart.items():
        if not gap <= bounds[name]:
            raise SystemExit(
                f"{workload.title}: the first {name} is {ours.first[name]:.5f} here and {peer.first[name]:.5f} at the peer, {gap:.2%} "
                f"apart (bound {bounds[name]:.2%}): the sides do not train the same"
            )
    return {name: round(gap, 6) for name, gap in apart.items()}


def readings_of(workload: Workload, tokens: list[int], runs: list[dict[str, Laps]]) -> list[Reading]:
    """Readings from the laps of each run, by the side's name: `ours` and the peers'."""
    apart, *_ = [refuse_unequal(workload, run["ours"], run[peer]) for run in runs for peer in PEERS]
    speeds = {side: [speed(run[side], tokens, workload.warmup) for run in runs] for side in runs[0]}
    peaks = {side: [run[side].peak_bytes / 2**30 for run in runs] for side in runs[0]}
    setting = {"setting": workload.setting}
    notes = {
        "first_ours": {name: round(runs[0]["ours"].first[name], 5) for name in apart},
        "first_peer": {name: round(runs[0]["tuned"].first[name], 5) for name in apart},
        "apart": apart,
        "steps": workload.steps - workload.warmup,
        "useful_tokens": sum(tokens[workload.warmup :]),
    }
    unit = "useful tokens/s"
    return [
        Reading(workload.title, speeds["ours"], speeds["tuned"], unit, goal=workload.goal, notes=notes | setting),
        Reading(f"{workload.title}, {AS_DOCUMENTED}", speeds["ours"], speeds["documented"], unit),
        Reading(f"{workload.title}, {MEMORY}", peaks["ours"], peaks["tuned"], "GiB", higher_is_better=False, goal=1.0, notes=setting),
    ]


def measure(workload: Workload, folder: Path) -> list[Reading]:
    """Measure one workload, all sides, several times with new processes."""
    prepare(workload, folder)
    runs = [race(workers(workload, folder), workload.steps) for _ in range(RUNS)]
    return readings_of(workload, tokens_per_step(workload, folder), runs)


def prepare(workload: Workload, folder: Path) -> None:
    """Make model and rows if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "units.json").exists():
        workload.write(folder)
        subprocess.run([sys.executable, "-m", "benchmarks.workloads", str(folder)], check=True)


def workers(workload: Workload, folder: Path) -> dict[str, Worker]:
    """A process for each side."""

    def worker(side: str, module: str, settings: dict[str, str]) -> Worker:
        return Worker([sys.executable, "-m", f"benchmarks.{module}", str(folder)], folder / f"{side}.log", settings)

    ours = {"ours": worker("ours", "ours", device_settings(workload.our_numerics()))}
    return ours | {peer: worker(peer, "peer", settings) for peer, settings in PEERS.items()}


def matrix_rate() -> float:
    """GFLOP/s of products of bf16 matrices of 2048 rows: the current speed of the machine."""
    import torch

    torch.set_num_threads(THREADS)
    one, other = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        one @ other
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / statistics.median(seconds[2:]) / 1e9


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("--only", default="", help=f"names, comma-separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--keep", type=Path, help="a folder for prepared models, rows and logs, kept for the next run")
    given: Any = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name] or list(WORKLOADS)
    unknown = sorted(set(names) - set(WORKLOADS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            began, watch, rate = time.monotonic(), Watch(), matrix_rate()
            readings = measure(WORKLOADS[name], (given.keep or Path(temporary)) / name)
            machine = watch.read() | {"matrix_gflops": [round(rate), round(matrix_rate())]}
            write(f"training-{name}", readings, PACKAGES, machine)
            print(f"  ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
