"""Reward model: policy + preference pairs → a scalar head on the policy's body, trained by Bradley–Terry.

The score is read at the answer's end-of-turn token, in fp32. Pairs held out (by hash of their id) give the accuracy, and the mean
and standard deviation by which `judge` normalises rewards. What we leave out: margins, ensembles, several labels.
"""

import hashlib
import math
import time
from typing import Any

import torch

from configs.training import RewardModel
from data.artifacts import write_json
from data.chat import Chat
from stages.core import losses
from stages.core.batches import Unit, collate, plan_step, step_rows, steps_per_epoch
from stages.engines.checkpoints import Checkpoints
from stages.engines.models import load_reward_model
from stages.engines.rows import gather, pairs, preference, to_units
from stages.engines.trainer import Trainer
from stages.job import Inputs, Job, StageError, only


def run(config: RewardModel, inputs: Inputs, job: Job) -> dict[str, Any]:
    base, numerics = only(inputs, "policy"), job.numerics
    chat = Chat(base.payload)
    rows, every = to_units(pairs(gather(inputs["preferences"].values()), config.lists), preference(chat), config.max_length, job)
    held = [pair for row, pair in zip(rows, every, strict=True) if is_held_out(row["list"], config.holdout, config.seed)]
    units = [pair for row, pair in zip(rows, every, strict=True) if not is_held_out(row["list"], config.holdout, config.seed)]
    if not units:
        raise StageError(f"all {len(every)} pairs are held out: lower holdout ({config.holdout}) or give more pairs")
    total = config.epochs * steps_per_epoch(len(units), config.global_batch)
    module = load_reward_model(base.payload, numerics, config.lora, config.seed, pad_token_id=chat.pad_id)
    head = module.model.score.weight
    with torch.no_grad():  # N(0, 1/(d + 1)), Stiennon et al. 2020, appendix B.1
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(config.seed)) / math.sqrt(head.shape[1] + 1))
    trainer = Trainer(module, optimizer=config.optimizer, total_steps=total, dtype=config.dtype, numerics=numerics, seed=config.seed)
    checkpoints = Checkpoints(job, trainer)
    state = checkpoints.resume() or {"step": 0}
    loss_mean = float("nan")

    for step in range(state["step"], total):
        started = time.monotonic()
        batch = [units[i] for i in step_rows(step, len(units), config.global_batch, config.seed)]
        loss_sum = accuracy = margin = 0.0
        for micro in plan_step(batch, trainer.rank, trainer.world_size, numerics):
            chosen_P, rejected_P = score_pairs(trainer, [batch[i] for i in micro.units], job, chat)
            loss, sums = losses.bradley_terry(chosen_P, rejected_P, config.loss.centering)
            trainer.backward(loss * micro.weight / len(batch))
            loss_sum += loss.item() * micro.weight
            accuracy += sums["accuracy"].item() * micro.weight
            margin += sums["margin"].item() * micro.weight
        stats = trainer.step()
        loss_mean, accuracy, margin = (value / len(batch) for value in trainer.sum(loss_sum, accuracy, margin))

        trainer.refuse_not_finite(step + 1, loss_mean, stats)
        speed = sum(len(doc) for unit in batch for doc in unit) / (time.monotonic() - started)
        job.log(
            step + 1,
            loss=loss_mean,
            accuracy=accuracy,
            margin=margin,
            grad_norm=stats.grad_norm,
            learning_rate=stats.learning_rate,
            tokens_per_second=speed,
        )
        job.progress(step + 1, total, loss=loss_mean, accuracy=accuracy, tokens_per_second=speed)
        if step + 1 < total:
            checkpoints.after_step(step + 1, {"step": step + 1})

    report = held_out_report(trainer, held or units, job, chat)  # without a hold-out, rewards are normalised by training pairs
    trainer.export(job.out / "payload", chat)
    if trainer.rank == 0:
        write_json(job.out / "payload" / "reward_stats.json", {"mean": report["reward_mean"], "std": report["reward_std"]})
    trainer.close()
    counts = {"pairs": len(units), "held_out_pairs": len(held), "steps": total}
    return {**counts, "loss": loss_mean, **({f"held_out_{name}": value for name, value in report.items()} if held else {})}


def is_held_out(row_id: str, share: float, seed: int) -> bool:
    """A preference's side depends on its id alone, so that more data moves no row across, and all pairs of a list are on one side."""
    number = int(hashlib.sha256(f"{seed}/{row_id}".encode()).hexdigest()[:12], 16)
    return number / 16**12 < share


def score_pairs(trainer: Trainer, units: list[Unit], job: Job, chat: Chat) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores of chosen, scores of rejected), each of shape (P,); both sides share one forward pass."""
    batch = collate(units, job.numerics, chat.pad_id).to(trainer.device)
    scores_D = trainer.module(batch)
    return scores_D[0::2], scores_D[1::2]


@torch.no_grad()
def held_out_report(trainer: Trainer, units: list[Unit], job: Job, chat: Chat) -> dict[str, float]:
    """Accuracy, margin, and the distribution of rewards; the same on every rank."""
    sums = [0.0] * 4  # right, margin, Σ s, Σ s²
    for micro in plan_step(units, trainer.rank, trainer.world_size, job.numerics):
        chosen_P, rejected_P = score_pairs(trainer, [units[i] for i in micro.units], job, chat)
        both = torch.cat([chosen_P, rejected_P]).double()
        values = ((chosen_P > rejected_P).sum(), (chosen_P - rejected_P).sum(), both.sum(), (both**2).sum())
        sums = [total + float(value) * micro.weight for total, value in zip(sums, values, strict=True)]
    right, margin, total, squares = trainer.sum(*sums)
    mean = total / (2 * len(units))
    return {
        "accuracy": right / len(units),
        "margin": margin / len(units),
        "reward_mean": mean,
        "reward_std": math.sqrt(max(squares / (2 * len(units)) - mean**2, 1e-12)),
    }
