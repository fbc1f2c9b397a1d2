"""Our side of a training benchmark: the stage's own `run`, paced by its own log of steps; of RLVR the update with made rollouts.

python -m benchmarks.ours FOLDER
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.pacing import Enough, Pace
from benchmarks.workloads import LEARNING_RATE, SEED, Workload, read, rewards
from pedigree.configs.language.execution import Placement
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import open_artifact
from pedigree.stages.job.job import Inputs, Job


class PacedJob(Job):
    """A job that ends a lap with each line of its training curve."""

    pace: Pace

    def log(self, step: int, **numbers: float) -> None:
        super().log(step, **numbers)
        self.pace.logged(numbers)
        self.pace.lap()


def inputs_of(workload: Workload, folder: Path) -> Inputs:
    if workload.task == "rlvr":
        return {"policy": {"policy": open_artifact(folder / "policy")}}
    port = "data" if workload.task == "sft" else "preferences"
    return {"policy": {"policy": open_artifact(folder / "policy")}, port: {"data": open_artifact(folder / "data")}}


def config_of(workload: Workload) -> Any:
    """Config of the stage; all other fields keep the stage's defaults."""
    batch = {"global_batch": workload.global_batch, "max_length": workload.max_length}
    rollouts = {
        "algorithm": {"type": "dapo"},
        "steps": workload.steps,
        "prompts_per_step": workload.global_batch,
        "samples_per_prompt": workload.group,
        "sampling": {"max_tokens": workload.max_length},
        "max_prompt_length": workload.max_length,
        "max_logprob_gap": 1e3,  # made rollouts come from no sampler
    }
    own = {
        "sft": batch,
        "reward_model": {**batch, "holdout": 0.0},
        "preference_train": {**batch, "loss": {"type": "dpo", "beta": 0.1}},
        "rlvr": rollouts,
    }
    optimizer = {"learning_rate": LEARNING_RATE, "schedule": "constant"}
    shared = {"dtype": workload.dtype, "optimizer": optimizer, "seed": SEED}
    return KINDS[workload.task].config.model_validate(own[workload.task] | shared)


def updates(config: Any, inputs: Inputs, job: Job, workload: Workload, folder: Path) -> None:
    """RLVR without its sampler: the learner of the stage and its update, on synthetic rollouts."""
    from pedigree.data.chat.chat import Chat
    from pedigree.stages.rlvr.run import make_learner
    from pedigree.stages.training.policy_update import TrainingSample, initial_state, update_policy

    learner = make_learner(config, inputs, Chat(folder / "policy" / "payload"), job)
    state, size = initial_state(config.algorithm), workload.global_batch
    units = json.loads((folder / "units.json").read_text())
    for step in range(workload.steps):
        samples = []
        for number, unit in list(enumerate(units))[step * size : (step + 1) * size]:
            for document, reward in zip(unit, rewards(number, workload.group), strict=True):
                prompt = document["trained"].index(True)
                ids = document["ids"][prompt:]
                samples.append(TrainingSample(str(number), document["ids"][:prompt], ids, [0.0] * len(ids), reward))
        done = update_policy(learner, samples, workload.group, step, state)
        state = done.state
        job.log(step + 1, **done.metrics)


def main(folder: Path) -> None:
    workload = read(folder)
    pace = Pace(workload.steps)
    job = PacedJob(folder / "ours", "bench/training", "k", workload.our_numerics(), Placement(checkpoint_every_s=10**6), {})
    job.folder.mkdir(exist_ok=True)
    job.pace = pace
    inputs, config = inputs_of(workload, folder), config_of(workload)
    pace.ready()
    try:
        if workload.task == "rlvr":
            updates(config, inputs, job, workload, folder)
        importlib.import_module(f"pedigree.stages.{workload.task}.run").run(config, inputs, job)
    except Enough:
        pace.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
