"""Supervised fine-tuning: base policy + conversations → policy.

The loss is -log π over the trained tokens (by default the assistant's, including end-of-turn tokens), divided by their count in the
global batch (`mean`), or by the configured number of sequences (`sum`). Not implemented: per-token weights, NEFTune.

curve   loss and entropy in nats per trained token; tokens, trained tokens and samples of the step; `packing`, the filled share of the
        forward passes' capacity (packed: of the token budget; padded: of rows times width)
"""

import time
from collections.abc import Sequence
from typing import Any

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sft
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations
from pedigree.stages.core.batches import MicroBatch, Unit, step_rows, steps_per_epoch
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.training.checkpoints import Checkpoints
from pedigree.stages.training.feed import GlobalBatch
from pedigree.stages.training.models import load_policy
from pedigree.stages.training.probe import probe
from pedigree.stages.training.token_cache import units_of
from pedigree.stages.training.trainer import MetricSums, Trainer
from pedigree.stages.training.training_rows import Row, fitting, gather, report_rows


def run(config: Sft, inputs: Inputs, job: Job) -> dict[str, Any]:
    base, numerics = only(inputs, "policy"), job.numerics
    chat = Chat(base.payload)
    with job.busy("reading rows"):
        given = gather(inputs["data"].values())
    refuse_without_marks(given, config)
    every = units_of(given, Conversations(config.train_on), chat, job, base, inputs["data"].values())
    rows, units = fitting(given, every, config.max_length, job, config.too_long)
    report_rows(len(given), len(rows), every, config, job)
    epoch = steps_per_epoch(len(units), config.global_batch)
    total = config.epochs * epoch
    with job.busy("loading the model"):
        module = load_policy(base, numerics, config.lora, config.seed)
    trainer = Trainer(module, optimizer=config.optimizer, total_steps=total, dtype=config.dtype, numerics=numerics, seed=config.seed)
    probe(trainer.module, numerics, trainer.device)
    checkpoints = Checkpoints(job, trainer)
    state = checkpoints.resume() or {"step": 0, "tokens": 0}
    last = float("nan")

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
            for micro_batch in feed.micro_batches():
                logps_N, entropy_N = trainer.module(micro_batch.batch, entropy=True)
                loss = -logps_N.sum() * micro_batch.weight
                trainer.backward(loss / denominator)
                sums.add({"loss": loss, "entropy": entropy_N.sum() * micro_batch.weight})
                capacity += capacity_of(micro_batch.batch, numerics)
            stats = trainer.step()
            found = trainer.totals({**sums.sums(), "capacity": capacity}, {"grad_norm": stats.grad_norm})

            last = found["loss"] / num_tokens
            trainer.refuse_not_finite(step + 1, last, found["grad_norm"])
            length = sum(len(doc) for unit in batch for doc in unit)
            speed = length / (time.monotonic() - started)
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
            )
            job.progress(step + 1, total, loss=last, tokens_per_second=speed)
            state = {"step": step + 1, "tokens": state["tokens"] + num_tokens}
            if step + 1 < total:
                checkpoints.after_step(step + 1, state)

    with job.busy("writing the model"):
        trainer.export(job.out / "payload", chat)
    trainer.close()
    return {"rows": len(rows), "steps": total, "trained_tokens": state["tokens"], "loss": last}


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
