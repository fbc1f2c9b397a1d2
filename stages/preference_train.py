"""Preference optimisation: policy + preference pairs (+ reference) → policy, by DPO or length-normalised DPO.

The reference is fixed: the `reference` input, or the policy as it came. Its log-probabilities come from the very micro-batches of
training, so that rounding cancels in the first step (L_0 = log 2). What we leave out: reference sync, NLL terms, label smoothing.
"""

import math
import time
from typing import Any

import torch
from torch import Tensor

from configs.training import DpoNorm, PreferenceTrain
from data.chat import Chat
from stages.core import losses
from stages.core.batches import MicroBatch, collate, plan_step, step_rows, steps_per_epoch
from stages.core.logprobs import probe_isolation
from stages.engines.checkpoints import Checkpoints
from stages.engines.models import frozen, load_policy, same_weights
from stages.engines.rows import gather, pairs, preference, to_units
from stages.engines.trainer import TORCH_DTYPES, Trainer
from stages.job import Inputs, Job, StageError, only, only_or_none

FIRST_LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 0.05}
"""|L_0 - log 2| when policy and reference are one model: above it, they are not compared alike."""


def run(config: PreferenceTrain, inputs: Inputs, job: Job) -> dict[str, Any]:
    policy, numerics = only(inputs, "policy"), job.numerics
    reference = only_or_none(inputs, "reference") or policy
    chat = Chat(policy.payload)
    _, units = to_units(pairs(gather(inputs["preferences"].values()), config.lists), preference(chat), config.max_length, job)
    total = config.epochs * steps_per_epoch(len(units), config.global_batch)
    trainer = Trainer(
        load_policy(policy, numerics, config.lora, config.seed),
        optimizer=config.optimizer,
        total_steps=total,
        dtype=config.dtype,
        numerics=numerics,
        seed=config.seed,
    )
    probe_isolation(trainer.module, numerics, trainer.device)
    fixed = frozen(load_policy(reference, numerics), trainer.device, TORCH_DTYPES[config.dtype])
    same = same_weights(policy, reference)
    checkpoints = Checkpoints(job, trainer)
    state = checkpoints.resume() or {"step": 0, "first_loss": None, "last": None}

    for step in range(state["step"], total):
        started = time.monotonic()
        batch = [units[i] for i in step_rows(step, len(units), config.global_batch, config.seed)]
        sums: dict[str, float] = {}
        for micro in plan_step(batch, trainer.rank, trainer.world_size, numerics):
            tensors = collate([batch[i] for i in micro.units], numerics, chat.pad_id).to(trainer.device)
            with torch.no_grad():
                reference_logps_N, _ = fixed(tensors)
            logps_N, _ = trainer.module(tensors)
            ratio_w_P, ratio_l_P = log_ratios(tensors, logps_N - reference_logps_N, normalise=isinstance(config.loss, DpoNorm))
            loss, parts = losses.dpo(ratio_w_P, ratio_l_P, config.loss.beta)
            trainer.backward(loss * micro.weight / len(batch))
            for name, value in {"loss": loss.detach(), **parts}.items():
                sums[name] = sums.get(name, 0.0) + value.item() * micro.weight
        stats = trainer.step()
        names = sorted(sums)
        means = {name: value / len(batch) for name, value in zip(names, trainer.sum(*(sums[name] for name in names)), strict=True)}

        trainer.refuse_not_finite(step + 1, means["loss"], stats)
        if step == 0 and same:
            check_first_loss(means["loss"], config)
        speed = sum(len(doc) for pair in batch for doc in pair) / (time.monotonic() - started)
        job.log(step + 1, **means, grad_norm=stats.grad_norm, learning_rate=stats.learning_rate, tokens_per_second=speed)
        job.progress(step + 1, total, loss=means["loss"], accuracy=means["accuracy"], tokens_per_second=speed)
        first_loss = means["loss"] if state["first_loss"] is None else state["first_loss"]
        state = {"step": step + 1, "first_loss": first_loss, "last": means}
        if step + 1 < total:
            checkpoints.after_step(step + 1, state)

    trainer.export(job.out / "payload", chat)
    trainer.close()
    return {"pairs": len(units), "steps": total, "first_loss": state["first_loss"], **state["last"]}


def log_ratios(batch: MicroBatch, difference_N: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    """(r of chosen, r of rejected) of shape (P,): Σ_t log π_θ - log π_ref, divided by the answer's length where asked."""
    ratios_D = batch.sum_by_document(difference_N)
    if normalise:
        ratios_D = ratios_D / batch.sum_by_document(torch.ones_like(difference_N))
    return ratios_D[0::2], ratios_D[1::2]


def check_first_loss(loss: float, config: PreferenceTrain) -> None:
    tolerance = FIRST_LOSS_TOLERANCE[config.dtype]
    if abs(loss - math.log(2)) > tolerance:
        raise StageError(
            f"the first loss is {loss:.4f} where policy and reference are one model: it must be log 2 = 0.6931 within {tolerance}; "
            "their log-probabilities are not computed alike"
        )
