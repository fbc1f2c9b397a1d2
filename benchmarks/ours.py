"""Our side of a training benchmark: the stage's own `run`, paced by its own log of steps.

python -m benchmarks.ours FOLDER
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.pacing import Enough, Pace
from benchmarks.workloads import LEARNING_RATE, SEED, THREADS, Workload, read
from configs.declarations import DECLARATIONS
from configs.execution import Numerics, Placement
from data.artifacts import open_artifact
from stages.job import Inputs, Job


class PacedJob(Job):
    """A job whose line in the training curve ends a lap."""

    pace: Pace

    def log(self, step: int, **numbers: float) -> None:
        super().log(step, **numbers)
        self.pace.losses.append(numbers["loss"])
        self.pace.lap()


def inputs_of(workload: Workload, folder: Path) -> Inputs:
    port = "data" if workload.task == "sft" else "preferences"
    return {"policy": {"policy": open_artifact(folder / "policy")}, port: {"data": open_artifact(folder / "data")}}


def config_of(workload: Workload) -> Any:
    """What the stage is asked for; everything that is not named is the stage's default."""
    fields: dict[str, Any] = {
        "global_batch": workload.global_batch,
        "max_length": workload.max_length,
        "dtype": "bf16",
        "optimizer": {"learning_rate": LEARNING_RATE, "schedule": "constant"},
        "seed": SEED,
    }
    own = {"sft": {}, "reward_model": {"holdout": 0.0}, "preference_train": {"loss": {"type": "dpo", "beta": 0.1}}}
    return DECLARATIONS[workload.task].config.model_validate(fields | own[workload.task])


def main(folder: Path) -> None:
    workload = read(folder)
    pace = Pace(workload.steps)
    numerics = Numerics(device="cpu", threads=THREADS, **workload.numerics)
    job = PacedJob(folder / "ours", "bench/training", "k", numerics, Placement(checkpoint_every_s=10**6), {})
    job.pace = pace
    stage = importlib.import_module(f"stages.{workload.task}")
    inputs, config = inputs_of(workload, folder), config_of(workload)
    pace.ready()
    try:
        stage.run(config, inputs, job)
    except Enough:
        pace.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
