"""Trained weights on their way to an engine: through memory, against a folder that is written and that vLLM loads.

    python -m benchmarks.weights POLICY [--readings N]

POLICY is the folder of a model, e.g. `artifacts/demo/sft/payload`. Trainer and engine are in this process, both ways alternate, and after
each the engine answers the same. Run it with the environment of a job (`device_settings`), and with 5 GiB of memory free.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.report import RUNS, Reading, Watch, write
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import Optimizer, Sampling
from pedigree.data.chat.chat import Chat
from pedigree.stages.rlvr.weight_transfer import HostMemory, parts
from pedigree.stages.sampling.engines import open_sampler
from pedigree.stages.sampling.sampler import Request, Sampler, write_version
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.trainer import Trainer

NUMERICS = Numerics(device="cpu", threads=os.cpu_count() or 1)
GOAL = 2.0


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
    parser.add_argument("policy", type=Path)
    parser.add_argument("--readings", type=int, default=RUNS)
    given = parser.parse_args(arguments)
    watch, policy = Watch(), SimpleNamespace(payload=given.policy)
    placement = Placement(sampler_memory_gb=0.25)
    settings: dict[str, Any] = {"dtype": "bf16", "context": 80, "numerics": NUMERICS, "placement": placement, "inline": True}
    ways = {"folder": by_folder, "memory": by_memory}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    trainers: dict[str, list[float]] = {name: [] for name in ways}
    with open_sampler(given.policy, **settings) as engine, tempfile.TemporaryDirectory() as temporary:
        module: Any = load_policy(policy, NUMERICS)  # type: ignore[arg-type]
        trainer = Trainer(module, optimizer=Optimizer(learning_rate=1e-5), total_steps=1, dtype="bf16", numerics=NUMERICS, seed=0)
        answers = set()
        for turn in range(given.readings + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                own = way(trainer, engine, Chat(given.policy), Path(temporary) / "weights")
                if turn:  # the first fills caches
                    taken[name].append(time.perf_counter() - began)
                    trainers[name].append(own)
                answers.add(repr(engine.generate([Request(list(range(3, 40)), 7)], Sampling(max_tokens=16), [])))
    if len(answers) != 1:
        sys.exit("the engine does not answer the same")
    notes = {f"trainer's half, {name}, s": [round(one, 3) for one in trainers[name]] for name in ways}
    reading = Reading("weights to an engine, memory against folder", taken["memory"], taken["folder"], "s", False, GOAL, notes)
    print(notes)
    write("weights", [reading], ("torch", "transformers", "safetensors"), watch.read())


if __name__ == "__main__":
    main()
