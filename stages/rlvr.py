"""RLVR: policy + prompts with verifiers → policy, by GRPO with rollouts from vLLM in the same job.

One step: prompts → rollouts of the current weights → verified rewards → group advantages → one update → weights to the sampler.
Rank 0 owns the sampler and hands the rollouts to all ranks, so they do not depend on the number of ranks. Every step draws fresh
rollouts with seeds from (seed, step, prompt id, index): the step number is the whole data position.

What we leave out, and why: several updates per batch (one keeps ρ = 1 at the update, so clipping is at rest and old log-probs are
the trainer's own); refilling groups without signal; shaping of lengths (a truncated answer gets what its verifier says; their share
is logged). Rewards that cannot be had are missing, never 0.
"""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.training import Rlvr
from data import records
from data.artifacts import write_rows
from data.chat import Chat
from stages.core.batches import MicroBatch, Unit, collate, document, plan_step, step_rows
from stages.core.logprobs import PolicyModule, probe_isolation
from stages.core.policy_gradient import clipped_policy_loss, group_advantages, kl_k3
from stages.core.verifiers import verify
from stages.engines.checkpoints import Checkpoints
from stages.engines.models import frozen, load_policy
from stages.engines.sampler import Generation, Request, Sampler, model_context, open_sampler, seed_of
from stages.engines.trainer import TORCH_DTYPES, Trainer
from stages.job import Inputs, Job, StageError, only

ROLLOUT_CHUNK = 256
"""Requests submitted to the sampler together."""
SHOWN_STEPS, SHOWN_PROMPTS, SHOWN_ANSWERS = 10, 2, 4


@dataclass(frozen=True)
class Rollout:
    """One answer, and what its verifier said; the reward is NaN where it could not say anything."""

    prompt: dict[str, Any]
    prompt_ids: list[int]
    answer: Generation
    text: str
    reward: float


def run(config: Rlvr, inputs: Inputs, job: Job) -> dict[str, Any]:
    policy, numerics, group = only(inputs, "policy"), job.numerics, config.samples_per_prompt
    chat = Chat(policy.payload)
    refuse(config, job, model_context(policy.payload))
    prompts, dropped = usable_prompts(records.load(only(inputs, "prompts")), chat, config, job)
    with rollout_sampler(policy.payload, config, job) as sampler:
        settings = {"optimizer": config.optimizer, "total_steps": config.steps, "dtype": config.dtype, "seed": config.seed}
        trainer = Trainer(load_policy(policy, numerics), numerics=numerics, **settings)
        probe_isolation(trainer.module, numerics, trainer.device)
        dtype = TORCH_DTYPES[config.dtype]
        reference = frozen(load_policy(policy, numerics), trainer.device, dtype) if config.algorithm.kl else None
        checkpoints = Checkpoints(job, trainer)
        state = checkpoints.resume() or {"step": 0, "updates": 0, "missing": 0, "rewards": [], "gaps": [], "shown": []}
        if state["updates"]:
            load_weights(sampler, trainer, chat, job)

        for step in range(state["step"], config.steps):
            started = time.monotonic()
            batch = [prompts[row] for row in step_rows(step, len(prompts), config.prompts_per_step, config.seed)]
            rolled = roll_out(sampler, batch, step, config, chat, job) if sampler else None
            rollouts: list[Rollout] = trainer.broadcast(rolled)
            rewards_PG = torch.tensor([rollout.reward for rollout in rollouts]).view(len(batch), group)
            if rewards_PG.isnan().all():
                raise StageError(f"no answer of step {step + 1} could be verified; the reasons are in the log")
            advantages_PG, kept_PG = group_advantages(rewards_PG)
            chosen = kept_PG.flatten().nonzero()[:, 0].tolist()
            sums = forward_backward(
                [rollouts[i] for i in chosen or range(len(rollouts))],
                advantages_PG.flatten()[chosen] if chosen else None,
                trainer,
                reference,
                config,
                job,
                chat,
            )
            check_gap(sums, step, config)
            numbers = reward_numbers(rollouts, rewards_PG) | {
                "kept_groups": float(kept_PG.any(1).sum()),
                "entropy": sums["entropy"],
                "logprob_gap": sums["gap"],
            }
            if chosen:
                stats = trainer.step()
                trainer.refuse_not_finite(step + 1, sums["loss"], stats)
                numbers |= {"loss": sums["loss"], "clip_fraction": sums["clipped"], "grad_norm": stats.grad_norm}
                numbers |= {"learning_rate": stats.learning_rate} | ({"kl": sums["kl"]} if reference else {})
            if chosen and step + 1 < config.steps:
                load_weights(sampler, trainer, chat, job)

            seconds = time.monotonic() - started
            speed = sum(len(rollout.answer.response_ids) for rollout in rollouts) / seconds
            job.log(step + 1, **numbers, tokens_per_second=speed)
            job.progress(step + 1, config.steps, reward=numbers["reward"], kept_groups=numbers["kept_groups"], tokens_per_second=speed)
            state = {
                "step": step + 1,
                "updates": state["updates"] + bool(chosen),
                "missing": state["missing"] + int(rewards_PG.isnan().sum()),
                "rewards": [*state["rewards"], numbers["reward"]],
                "gaps": [*state["gaps"], sums["gap"]],
                "shown": state["shown"] + (show(rollouts, step, config) if step % max(1, config.steps // SHOWN_STEPS) == 0 else []),
            }
            if job.rank == 0:
                write_rows(job.evidence / "rollouts.jsonl", state["shown"])
            if step + 1 < config.steps:
                checkpoints.after_step(step + 1, state)

        refuse_no_signal(state, config)
        trainer.export(job.out / "payload", chat)
        trainer.close()
    shutil.rmtree(job.folder / "weights", ignore_errors=True)
    edge = max(1, config.steps // 10)
    return {
        "steps": config.steps,
        "updates": state["updates"],
        "prompts": len(prompts),
        "dropped_prompts": dropped,
        "missing_rewards": state["missing"],
        "first_reward": mean(state["rewards"][:edge]),
        "last_reward": mean(state["rewards"][-edge:]),
        "largest_logprob_gap": max(state["gaps"]),
    }


def refuse(config: Rlvr, job: Job, context: int) -> None:
    """What cannot end well is said before anything is loaded."""
    sampling = config.sampling
    if sampling.temperature == 0:
        raise StageError("sampling.temperature is 0: all answers to a prompt would be equal; it must be above 0, e.g. 1.0")
    if sampling.top_p != 1:
        raise StageError(f"sampling.top_p is {sampling.top_p}: it must be 1, or rollouts come from another distribution than is trained")
    if config.max_prompt_length + sampling.max_tokens > context:
        raise StageError(
            f"max_prompt_length {config.max_prompt_length} + max_tokens {sampling.max_tokens} exceed the policy's context of {context}: "
            "lower one of them"
        )
    if job.placement.sampler_process == "inline" and job.numerics.world_size > 1:
        raise StageError(f"sampler_process inline needs world_size 1, not {job.numerics.world_size}: set `sampler_process: own`")


def refuse_no_signal(state: dict[str, Any], config: Rlvr) -> None:
    """A run whose every group had equal rewards has trained nothing."""
    if not state["updates"]:
        raise StageError(
            f"none of {config.steps} steps had a group with unequal rewards (mean reward {mean(state['rewards']):.3f}): the prompts "
            "are all too easy or all too hard for this policy; take others, more samples_per_prompt, or a higher temperature"
        )


def usable_prompts(
    rows: list[dict[str, Any]], chat: Chat, config: Rlvr, job: Job
) -> tuple[list[tuple[dict[str, Any], list[int]]], dict[str, int]]:
    """((prompt, its ids) that fit and can be verified, why others were dropped).

    Raises:
        StageError: fewer are left than one step takes.
    """
    kept, drops = [], []
    for row in rows:
        ids = chat.prompt(row["messages"])
        reason = None
        if row["verifier"] is None:
            reason = "no verifier"
        elif len(ids) > config.max_prompt_length:
            reason = "longer than max_prompt_length"
        if reason:
            drops.append({"id": row["id"], "source": row["source"], "reason": reason, "length": len(ids)})
        else:
            kept.append((row, ids))
    counts: dict[str, int] = defaultdict(int)
    for drop in drops:
        counts[drop["reason"]] += 1
    if job.rank == 0:
        write_rows(job.evidence / "drops.jsonl", drops)
    if len(kept) < config.prompts_per_step:
        raise StageError(
            f"{len(kept)} of {len(rows)} prompts are usable (dropped: {dict(counts)}), a step takes {config.prompts_per_step}: "
            "raise max_prompt_length, give prompts with verifiers, or lower prompts_per_step"
        )
    return kept, dict(counts)


@contextmanager
def rollout_sampler(model_folder: Path, config: Rlvr, job: Job) -> Iterator[Sampler | None]:
    """The sampler on rank 0, None elsewhere."""
    if job.rank != 0:
        yield None
        return
    with open_sampler(
        model_folder,
        dtype=config.dtype,
        context=config.max_prompt_length + config.sampling.max_tokens,
        numerics=job.numerics,
        placement=job.placement,
        inline=job.placement.sampler_process == "inline",
    ) as sampler:
        yield sampler


def load_weights(sampler: Sampler | None, trainer: Trainer, chat: Chat, job: Job) -> None:
    """The trainer's weights to the sampler, by way of a folder; called on all ranks."""
    folder = job.folder / "weights"
    if sampler:
        shutil.rmtree(folder, ignore_errors=True)
    trainer.export(folder, chat)
    if sampler:
        sampler.load(folder)


def roll_out(
    sampler: Sampler, batch: list[tuple[dict[str, Any], list[int]]], step: int, config: Rlvr, chat: Chat, job: Job
) -> list[Rollout]:
    """Answers to each prompt, side by side, with rewards."""
    asked = [(prompt, ids, index) for prompt, ids in batch for index in range(config.samples_per_prompt)]
    requests = [Request(ids, seed_of(config.seed, step, prompt["id"], index)) for prompt, ids, index in asked]
    answers: list[Generation] = []
    for start in range(0, len(requests), ROLLOUT_CHUNK):
        chunk = requests[start : start + ROLLOUT_CHUNK]
        answers += sampler.generate(chunk, config.sampling, [chat.eos_id], lambda _: job.progress(step, config.steps))
    rollouts = []
    for (prompt, ids, _), answer in zip(asked, answers, strict=True):
        text = chat.decode(answer.response_ids)
        rollouts.append(Rollout(prompt, ids, answer, text, reward(prompt, text)))
    return rollouts


def reward(prompt: dict[str, Any], text: str) -> float:
    """The verifier's score; NaN where it cannot be run, which says nothing of the answer."""
    try:
        return verify(prompt["verifier"], text).score
    except ValueError as error:
        print(f"no reward for an answer to {prompt['id']}: {error}", flush=True)
        return math.nan


def forward_backward(
    rollouts: list[Rollout],
    advantages_D: torch.Tensor | None,
    trainer: Trainer,
    reference: PolicyModule | None,
    config: Rlvr,
    job: Job,
    chat: Chat,
) -> dict[str, float]:
    """Gradient of the token-mean loss over these rollouts, on all ranks; means per token over all of them.

    Without advantages there is no gradient: the forward pass serves the agreement of sampler and trainer alone.
    """
    units: list[Unit] = [(document(rollout.prompt_ids, rollout.answer.response_ids),) for rollout in rollouts]
    num_tokens = sum(doc.num_trained for (doc,) in units)
    sums: dict[str, float] = {"loss": 0.0, "clipped": 0.0, "kl": 0.0, "entropy": 0.0, "gap": 0.0}
    for micro in plan_step(units, trainer.rank, trainer.world_size, job.numerics):
        batch = collate([units[i] for i in micro.units], job.numerics, chat.pad_id).to(trainer.device)
        sampled_N = torch.tensor([logp for i in micro.units for logp in rollouts[i].answer.logprobs], device=trainer.device)
        with torch.set_grad_enabled(advantages_D is not None):
            logps_N, entropy_N = trainer.module(batch, temperature=config.sampling.temperature, entropy=True)
        if advantages_D is not None:
            advantages_N = advantages_D[list(micro.units)].to(trainer.device)[batch.documents_N]
            loss, parts = grpo_loss(logps_N, advantages_N, batch, reference, config)
            trainer.backward(loss * micro.weight / num_tokens)
            for name, value in {"loss": loss.item(), **parts}.items():
                sums[name] += value * micro.weight
        sums["entropy"] += entropy_N.sum().item() * micro.weight
        sums["gap"] += (logps_N.detach() - sampled_N).abs().sum().item() * micro.weight
    return {name: value / num_tokens for name, value in zip(sums, trainer.sum(*sums.values()), strict=True)}


def grpo_loss(
    logps_N: torch.Tensor, advantages_N: torch.Tensor, batch: MicroBatch, reference: PolicyModule | None, config: Rlvr
) -> tuple[torch.Tensor, dict[str, float]]:
    """(Σ_t clipped objective + kl * k3(θ ‖ initial policy), parts); see `configs.training.Grpo`."""
    algorithm = config.algorithm
    old_logps_N = logps_N.detach()  # one update per batch: the policy that is updated is the one that was sampled from
    loss, clipped = clipped_policy_loss(logps_N, old_logps_N, advantages_N, algorithm.clip_low, algorithm.clip_high)
    kl = 0.0
    if reference is not None:
        with torch.no_grad():
            reference_logps_N, _ = reference(batch, temperature=config.sampling.temperature)
        penalty = kl_k3(logps_N, reference_logps_N)
        loss, kl = loss + algorithm.kl * penalty, penalty.item()
    return loss, {"clipped": clipped.item(), "kl": kl}


def check_gap(sums: dict[str, float], step: int, config: Rlvr) -> None:
    """The sampler answers from the trainer's weights."""
    if not sums["gap"] <= config.max_logprob_gap:
        raise StageError(
            f"in step {step + 1} sampler and trainer differ by {sums['gap']:.4g} in the log-prob of a token, on average (bound "
            f"max_logprob_gap {config.max_logprob_gap}): the sampler has the wrong weights, or the dtype needs a higher bound"
        )


def reward_numbers(rollouts: list[Rollout], rewards_PG: torch.Tensor) -> dict[str, float]:
    """The curve's view of one step's rollouts: rewards where there are any, lengths, truncation."""
    by_verifier: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if not math.isnan(rollout.reward):
            by_verifier[rollout.prompt["verifier"]["name"]].append(rollout.reward)
    present = [reward for rewards in by_verifier.values() for reward in rewards]
    return {
        "reward": mean(present),
        **{f"reward_{name}": mean(rewards) for name, rewards in sorted(by_verifier.items())},
        "missing_rewards": float(rewards_PG.isnan().sum()),
        "response_length": mean([float(len(rollout.answer.response_ids)) for rollout in rollouts]),
        "truncated": mean([float(rollout.answer.finish_reason == "length") for rollout in rollouts]),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def show(rollouts: list[Rollout], step: int, config: Rlvr) -> list[dict[str, Any]]:
    """A few prompts of a step with some of their answers, for people."""
    shown = []
    for start in range(0, min(len(rollouts), SHOWN_PROMPTS * config.samples_per_prompt), config.samples_per_prompt):
        group = rollouts[start : start + config.samples_per_prompt][:SHOWN_ANSWERS]
        rewards = [None if math.isnan(rollout.reward) else rollout.reward for rollout in group]
        shown.append(
            {
                "step": step + 1,
                "id": group[0].prompt["id"],
                "messages": group[0].prompt["messages"],
                "answers": [rollout.text for rollout in group],
                "rewards": rewards,
            }
        )
    return shown
