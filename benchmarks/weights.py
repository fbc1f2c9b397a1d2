"""Trained weights on their way to an engine: through memory, against a folder that is written and that vLLM loads.

    python -m benchmarks.weights [--model smollm2-135m] [--readings N]

Trainer and engine are in this process, both ways alternate, and after each the engine answers the same.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import RUNS, Interval, Reading, Watch, described, write
from benchmarks.workloads import make_policy, packaged
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import Optimizer, Sampling
from pedigree.data.artifacts.artifacts import open_artifact
from pedigree.data.chat.chat import Chat
from pedigree.pipelines.jobs.job_environment import device_settings
from pedigree.stages.rlvr.weight_transfer import HostMemory, parts
from pedigree.stages.sampling.engines import open_sampler
from pedigree.stages.sampling.sampler import Request, Sampler, write_version
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.trainer import Trainer

NUMERICS = Numerics(device="cpu", threads=os.cpu_count() or 1)


def by_folder(trainer: Trainer, engine: Sampler, chat: Chat, folder: Path) -> float:
    """Seconds of the trainer's half."""
    began = time.perf_counter()
    trainer.export(folder, chat)
    write_version(folder, 1)
    written = time.perf_counter() - began
    engine.load(folder)
    return written


def by_memory(trainer: Trainer, engine: Sampler, chat: Chat, folder: Path) -> float:
    loading, began = 0.0, time.perf_counter()
    memory = HostMemory(trainer)
    for part in parts(trainer, memory, 1):
        filled = time.perf_counter()
        engine.update(part)
        loading += time.perf_counter() - filled
    memory.close()
    return time.perf_counter() - began - loading


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--readings", type=int, default=RUNS)
    given = parser.parse_args(arguments)
    os.environ.update(device_settings(NUMERICS))
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        measure(given.model, given.readings, Path(folder))


def measure(model: str, readings: int, scratch: Path) -> None:
    make_policy(model, packaged("alpaca-en-demo", "conversation"), scratch)
    watch, policy = Watch(), open_artifact(scratch / "policy")
    placement = Placement(sampler_memory_gb=0.25)
    settings: dict[str, Any] = {"dtype": "bf16", "context": 80, "numerics": NUMERICS, "placement": placement, "inline": True}
    ways = {"folder": by_folder, "memory": by_memory}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    trainers: dict[str, list[float]] = {name: [] for name in ways}
    with open_sampler(policy.payload, **settings) as engine:
        module = load_policy(policy, NUMERICS)
        trainer = Trainer(module, optimizer=Optimizer(learning_rate=1e-5), total_steps=1, dtype="bf16", numerics=NUMERICS, seed=0)
        answers = set()
        for turn in range(readings + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                own = way(trainer, engine, Chat(policy.payload), scratch / "weights")
                if turn:  # the first fills caches
                    taken[name].append(time.perf_counter() - began)
                    trainers[name].append(own)
                answers.add(repr(engine.generate([Request(list(range(3, 40)), 7)], Sampling(max_tokens=16), [])))
    if len(answers) != 1:
        sys.exit("the engine does not answer the same")
    halves = ", ".join(f"{described(Interval.of(trainers[name]))['median']:g} s by {name}" for name in ways)
    text = f"{model}, trained in bf16, {NUMERICS.threads} threads; of these the trainer's half takes {halves}"
    reading = Reading("weights to an engine, memory against folder", taken["memory"], taken["folder"], "s", False, None, {"text": text})
    write("weights", [reading], ("torch", "transformers", "safetensors"), watch.read())


if __name__ == "__main__":
    main()
