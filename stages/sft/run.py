"""Supervised fine-tuning: base policy + conversations → policy.

The loss is -log π over the trained tokens (by default the assistant's, including end-of-turn tokens), divided by their count in the
global batch (`mean`), or by the configured number of sequences (`sum`). The loss of held-out
rows is always per token. Mixtures of experts add the loss of their routers (`stages/training/router_loss.py`).
Not implemented: per-token weights, NEFTune.

curve   loss and entropy in nats per trained token; tokens, trained tokens and samples of the step; `packing`, the filled share of the
        forward passes' capacity (packed: of the token budget; padded: of rows times width)
"""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sft
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations
from pedigree.data.records.sequences import Mapped
from pedigree.stages.core.batches import MicroBatch, Unit, step_rows, steps_per_epoch, total_steps
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.training.checkpoints import Checkpoints
from pedigree.stages.training.feed import GlobalBatch, PreparedMicroBatch
from pedigree.stages.training.held_out import HeldOut
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.probe import probe
from pedigree.stages.training.router_loss import RouterLoss, routers_of
from pedigree.stages.training.token_cache import units_of
from pedigree.stages.training.trainer import MetricSums, Trainer
from pedigree.stages.training.training_rows import Row, fitting, gather, report_rows, split


def run(config: Sft, inputs: Inputs, job: Job) -> dict[str, Any]:
    base, numerics = only(inputs, "policy"), job.numerics
    routers = routers_of(base.payload, config.router_aux_loss_coef)
    chat = Chat(base.payload)
    with job.busy("reading rows"):
        given = gather(inputs["data"].values())
    refuse_without_marks(given, config)
    every = units_of(given, Conversations(config.train_on), chat, job, base, inputs["data"].values())
    rows, kept = fitting(given, every, config.max_length, job, config.too_long)
    units, held = (Mapped(side, kept.__getitem__) for side in split(rows, config.holdout, config.seed))
    report_rows(given, len(units), len(held), every, config, job)
    epoch = steps_per_epoch(len(units), config.global_batch)
    total = total_steps(len(units), config.global_batch, config.epochs, config.max_steps)
    with job.busy("loading the model"):
        module = load_policy(base, numerics, config.lora, config.seed)
    trainer = Trainer(module, optimizer=config.optimizer, total_steps=total, dtype=config.dtype, numerics=numerics, seed=config.seed)
    probe(trainer.module, numerics, trainer.device)
    router_loss = RouterLoss(trainer, routers, job.steady)
    checkpoints = Checkpoints(job, trainer)
    state = checkpoints.resume() or {"step": 0, "tokens": 0}
    held_out, held_tokens = HeldOut(GlobalBatch(held), config, total), sum(doc.num_trained for unit in held for doc in unit)
    last, measured = float("nan"), {}

    def batch_of(step: int) -> list[Unit]:
        return [units[i] for i in step_rows(step, len(units), config.global_batch, config.shuffled_by)]

    batches = (GlobalBatch(batch_of(step)) for step in range(state["step"], total))
    with trainer.feed(batches, chat.pad_id) as feed:
        for step in range(state["step"], total):
            started = time.monotonic()
            batch = batch_of(step)
            num_tokens = sum(doc.num_trained for unit in batch for doc in unit)
            denominator = num_tokens if config.loss_reduction == "mean" else config.global_batch
            capacity, sums = 0.0, MetricSums()
            for micro_batch in router_loss.over(feed.micro_batches()):
                found = loss_and_entropy(trainer, micro_batch)
                router_loss.backward(found["loss"] / denominator, micro_batch)
                sums.add(found, micro_batch.weight)
                capacity += capacity_of(micro_batch.batch, numerics)
            stats = trainer.step()
            routed = router_loss.metrics()
            found = trainer.totals({**sums.sums(), "capacity": capacity}, {"grad_norm": stats.grad_norm, **routed})

            last = found["loss"] / num_tokens
            trainer.refuse_not_finite(step + 1, last, found["grad_norm"])
            length = sum(len(doc) for unit in batch for doc in unit)
            speed = length / (time.monotonic() - started)
            sums_of_held = held_out.measure(step + 1, trainer, chat.pad_id, job, lambda one: loss_and_entropy(trainer, one))
            measured = {f"held_out_{name}": value / held_tokens for name, value in sums_of_held.items()}
            job.log(
                step + 1,
                loss=last,
                grad_norm=found["grad_norm"],
                learning_rate=stats.learning_rate,
                entropy=found["entropy"] / num_tokens,
                epoch=(step + 1) / epoch,
                samples=len(batch),
                tokens=length,
                trained_tokens=num_tokens,
                packing=length / found["capacity"],
                tokens_per_second=speed,
                **{name: found[name] for name in routed},
                **trainer.paces.slowest(),
                **measured,
            )
            job.progress(step + 1, total, loss=last, tokens_per_second=speed)
            state = {"step": step + 1, "tokens": state["tokens"] + num_tokens}
            if step + 1 < total:
                checkpoints.after_step(step + 1, state)

    with job.busy("writing the model"):
        trainer.export(job.out / "payload", chat)
    trainer.close()
    counts = {"rows": len(units), **({"held_out_rows": len(held)} if config.holdout else {}), "steps": total}
    return {**counts, "trained_tokens": state["tokens"], "loss": last, **measured}


def loss_and_entropy(trainer: Trainer, micro_batch: PreparedMicroBatch) -> dict[str, Tensor]:
    """Their sums over the trained tokens of a micro-batch."""
    logps_N, entropy_N = trainer.module(micro_batch.batch, entropy=True)
    return {"loss": -logps_N.sum(), "entropy": entropy_N.sum()}


def refuse_without_marks(rows: Sequence[Row], config: Sft) -> None:
    if config.train_on == "marked" and not any("train" in message for row in rows for message in row["messages"]):
        raise StageError(
            f"train_on is marked, but none of {len(rows)} rows has a turn with `train: true` or `train: false`: mark the turns in the "
            "source, or set train_on to assistant or last_turn"
        )


def capacity_of(batch: MicroBatch, numerics: Numerics) -> int:
    """Token capacity of a forward pass. Packed: its budget, or the size of a longer document; padded: rows times width."""
    size = batch.input_ids_BT.numel()
    return max(numerics.micro_batch_tokens, size) if numerics.packing else size
