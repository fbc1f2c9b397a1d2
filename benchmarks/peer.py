"""The peer's side of a training benchmark: TRL, configured as its documentation advises for a machine without flash-attention.

    python -m benchmarks.peer FOLDER

bf16 by autocast over fp32 weights (its default), fused AdamW (its default), no gradient checkpointing (nor on our side: memory
suffices, and both are faster), rows of similar length side by side. Its packing is left out: the documentation reserves it for
flash-attention, and its packed rows put other documents into a step. DPO has no padding-free mode in this version.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.pacing import Enough, Pace
from benchmarks.workloads import LEARNING_RATE, SEED, Workload, read, rewards


def columns(workload: Workload, units: list[Any]) -> list[dict[str, Any]]:
    """The units in the form of the peer's collators."""
    if workload.task == "sft":
        return [
            {
                "input_ids": doc["ids"],
                "labels": [token if said else -100 for token, said in zip(doc["ids"], doc["trained"], strict=True)],
            }
            for (doc,) in units
        ]
    if workload.task == "reward_model":
        return [{"chosen_ids": chosen["ids"], "rejected_ids": rejected["ids"]} for chosen, rejected in units]
    rows = []
    for chosen, rejected in units:
        prompt = chosen["trained"].index(True)
        rows.append({"prompt_ids": chosen["ids"][:prompt], "chosen_ids": chosen["ids"][prompt:], "rejected_ids": rejected["ids"][prompt:]})
    return rows


def settings(workload: Workload, folder: Path) -> dict[str, Any]:
    length = "max_completion_length" if workload.task == "rlvr" else "max_length"
    return {
        "output_dir": str(folder / "peer"),
        "per_device_train_batch_size": workload.peer_batch,
        "gradient_accumulation_steps": workload.global_batch * workload.group // workload.peer_batch,
        "max_steps": workload.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        length: workload.max_length,
        "bf16": True,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
    }


def trainer_of(workload: Workload, folder: Path, callbacks: list[Any]) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    class PreparedDPOTrainer(DPOTrainer):
        """Use the ids as they are, as the other two trainers do anyway."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    payload = folder / "policy" / "payload"
    tokenizer = AutoTokenizer.from_pretrained(payload)
    rows = None if workload.task == "rlvr" else Dataset.from_list(columns(workload, json.loads((folder / "units.json").read_text())))
    given = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": callbacks}
    if workload.task == "reward_model":
        model = AutoModelForSequenceClassification.from_pretrained(payload, num_labels=1, dtype=torch.float32)
        head = model.score.weight
        with torch.no_grad():  # the start of our stage
            head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(SEED)) / math.sqrt(head.shape[1] + 1))
        return RewardTrainer(model=model, args=RewardConfig(**settings(workload, folder)), **given)
    model = AutoModelForCausalLM.from_pretrained(payload, dtype=torch.float32)
    if workload.task == "rlvr":
        return grpo_trainer(workload, folder, model, tokenizer, callbacks)
    if workload.task == "sft":
        return SFTTrainer(model=model, args=SFTConfig(**settings(workload, folder)), **given)
    reference = AutoModelForCausalLM.from_pretrained(payload, dtype=torch.float32)
    config = DPOConfig(beta=0.1, **settings(workload, folder))
    return PreparedDPOTrainer(model=model, ref_model=reference, args=config, **given)


def grpo_trainer(workload: Workload, folder: Path, model: Any, tokenizer: Any, callbacks: list[Any]) -> Any:
    """Generated rollouts replace sampling; a prompt's text is its number."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    units = json.loads((folder / "units.json").read_text())

    def asked(prompts: list[str]) -> list[tuple[int, int]]:
        """(unit, index of the answer), for prompts that are repeated for each of their answers."""
        return [(int(prompt), prompts[:place].count(prompt)) for place, prompt in enumerate(prompts)]

    def roll_out(prompts: list[str], *_: Any) -> dict[str, Any]:
        documents = [units[number][which] for number, which in asked(prompts)]
        starts = [document["trained"].index(True) for document in documents]
        completions = [document["ids"][start:] for document, start in zip(documents, starts, strict=True)]
        return {
            "prompt_ids": [document["ids"][:start] for document, start in zip(documents, starts, strict=True)],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
        }

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [rewards(number, workload.group)[which] for number, which in asked(prompts)]

    config = GRPOConfig(
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        num_generations=workload.group,
        shuffle_dataset=False,
        **settings(workload, folder),
    )
    rows = Dataset.from_list([{"prompt": str(number)} for number in range(len(units))])
    given = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": callbacks}
    return GRPOTrainer(model=model, reward_funcs=[reward], args=config, rollout_func=roll_out, **given)


def main(folder: Path) -> None:
    workload = read(folder)
    pace = Pace(workload.steps)
    from transformers import TrainerCallback

    class Paced(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pace.lap()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                pace.logged(logs)

    trainer = trainer_of(workload, folder, [Paced()])
    pace.ready()
    try:
        trainer.train()
    except Enough:
        pace.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
