"""RLVR: policy + prompts with verifiers → policy, by policy gradients on rollouts from vLLM in the same job.

One step: prompts → rollouts of the current weights → verified rewards → one or several updates → weights to the sampler. The
algorithms are in `configs/methods/policy_gradient.py`, the update in `stages/training/policy_update.py`.
Rank 0 owns the sampler and broadcasts the rollouts to all ranks, so they do not depend on the number of ranks. Every step draws fresh
rollouts with seeds from (seed, step, prompt id, index): the step number is the only data position.

Not implemented: resampling groups without a learning signal. A reward that cannot be computed is missing, never 0.
"""

import json
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pedigree.configs.base.frozen import finite
from pedigree.configs.methods.policy_gradient import Ppo
from pedigree.configs.methods.training import Rlvr, Sampling
from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.stages.core.batches import step_rows
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.rlvr.handover import awake, release, shares_gpus, sleep_level, start_before_trainer
from pedigree.stages.rlvr.kind import ROLLOUT_CHUNK
from pedigree.stages.rlvr.rewarding import Rewards, open_rewards
from pedigree.stages.sampling.engines import open_sampler
from pedigree.stages.sampling.sampler import Generation, Request, Sampler, model_context, seed_of, write_version
from pedigree.stages.training import kernels
from pedigree.stages.training.checkpoints import Checkpoints
from pedigree.stages.training.models import load_policy, load_value_model
from pedigree.stages.training.policy_update import Learner, TrainingSample, initial_state, update_policy
from pedigree.stages.training.probe import probe
from pedigree.stages.training.reference import fixed_policy
from pedigree.stages.training.router_loss import RouterLoss, routers_of
from pedigree.stages.training.trainer import Trainer
from pedigree.stages.training.training_rows import report_drops
from pedigree.stages.verifiers import Verdict, VerifierError, verify_each
from pedigree.stages.verifiers.reward_programs import Answered

BEGINNING = {"step": 0, "updates": 0, "informative": 0, "trained_tokens": 0, "missing": 0, "rewards": [], "gaps": [], "shown": []}
SHOWN_STEPS, SHOWN_PROMPTS, SHOWN_ANSWERS = 10, 2, 4


@dataclass(frozen=True)
class Rollout:
    """One answer with its verifier score and reward; NaN if unknown."""

    prompt: dict[str, Any]
    prompt_ids: list[int]
    answer: Generation
    text: str
    score: float
    reward: float
    terms: dict[str, float | None]
    """As in `rewarding.Rewarded`."""
    cause: str = ""


def run(config: Rlvr, inputs: Inputs, job: Job) -> dict[str, Any]:
    policy = only(inputs, "policy")
    chat = Chat(policy.payload)
    refuse(config, inputs, job, model_context(policy.payload))
    with job.busy("reading rows"):
        pool = records.load(only(inputs, "prompts"))
    prompts, dropped = usable_prompts(pool, chat, config, job)
    with open_rewards(config, [row for row, _ in prompts], job) as rewards, rollout_sampler(policy.payload, config, job) as sampler:
        learner = make_learner(config, inputs, chat, job)
        trainer = learner.trainer
        checkpoints = Checkpoints(job, trainer, *([learner.critic] if learner.critic else []))
        state = checkpoints.resume() or {**BEGINNING, "memory": initial_state(config.algorithm)}
        if state["updates"]:
            load_weights(sampler, trainer, state["updates"], config, chat, job)

        for step in range(state["step"], config.steps):
            started = time.monotonic()
            batch = [prompts[row] for row in step_rows(step, len(prompts), config.prompts_per_step, config.seed)]
            with awake(sampler, trainer, sleep_level(config, step)):
                rolled = roll_out(sampler, rewards, batch, step, config, chat, job) if sampler and rewards else None
            rollouts, greedy = cast(tuple[list[Rollout], list[float] | None], trainer.broadcast(rolled))
            refuse_stale({rollout.answer.version for rollout in rollouts}, state["updates"], step)
            if all(math.isnan(rollout.reward) for rollout in rollouts):
                cause = next((rollout.cause for rollout in rollouts if rollout.cause), "see the log for the reasons")
                raise StageError(f"no answer of step {step + 1} has a reward: {cause}")
            samples = [TrainingSample(r.prompt["id"], r.prompt_ids, r.answer.response_ids, r.answer.logprobs, r.reward) for r in rollouts]
            done = update_policy(learner, samples, config.samples_per_prompt, step, state["memory"], greedy)
            dropped = shares_gpus(job.numerics) and sleep_level(config, step) == 2
            if (done.updates or dropped) and step + 1 < config.steps:
                load_weights(sampler, trainer, state["updates"] + done.updates, config, chat, job)

            numbers = reward_numbers(rollouts) | ({} if greedy is None else {"greedy_reward": mean(present(greedy))}) | done.metrics
            speed = sum(len(rollout.answer.response_ids) for rollout in rollouts) / (time.monotonic() - started)
            informative = {"informative_groups": numbers["informative_groups"]}
            job.log(step + 1, **numbers, tokens=tokens_of(rollouts, config, job), tokens_per_second=speed)
            job.progress(step + 1, config.steps, reward=numbers["reward"], **informative, tokens_per_second=speed)
            state = {
                "step": step + 1,
                "updates": state["updates"] + done.updates,
                "informative": state["informative"] + int(numbers["informative_groups"]),
                "trained_tokens": state["trained_tokens"] + int(numbers["trained_tokens"]),
                "missing": state["missing"] + int(numbers["missing_rewards"]),
                "rewards": [*state["rewards"], numbers["reward"]],
                "gaps": [*state["gaps"], numbers["logprob_gap"]],
                "shown": state["shown"] + (show(rollouts, step, config) if step % max(1, config.steps // SHOWN_STEPS) == 0 else []),
                "memory": done.state,
            }
            if job.rank == 0:
                write_rows(job.evidence / "rollouts.jsonl", state["shown"])
            if step + 1 < config.steps:
                checkpoints.after_step(step + 1, state)

        refuse_no_signal(state, config)
        with job.busy("writing the model"):
            trainer.export(job.out / "payload", chat)
        for engine in filter(None, (trainer, learner.critic)):
            engine.close()
    shutil.rmtree(job.folder / "weights", ignore_errors=True)
    edge = max(1, config.steps // 10)
    return {
        "steps": config.steps,
        "updates": state["updates"],
        "informative_groups": state["informative"],
        "trained_tokens": state["trained_tokens"],
        "prompts": len(prompts),
        "dropped_prompts": dropped,
        "missing_rewards": state["missing"],
        "first_reward": mean(state["rewards"][:edge]),
        "last_reward": mean(state["rewards"][-edge:]),
        "largest_logprob_gap": max(state["gaps"]),
    }


def make_learner(config: Rlvr, inputs: Inputs, chat: Chat, job: Job) -> Learner:
    """The policy with its optimizer, and the reference and value model if the algorithm requires them."""
    policy, numerics, algorithm = only(inputs, "policy"), job.numerics, config.algorithm
    settings: dict[str, Any] = {"dtype": config.dtype, "numerics": numerics, "seed": config.seed}
    warmup = algorithm.critic.warmup_steps if isinstance(algorithm, Ppo) else 0
    total = (config.steps - warmup) * algorithm.updates
    with job.busy("loading the model"):
        module = load_policy(policy, numerics, config.lora, config.seed, config.head)
    trainer = Trainer(module, optimizer=config.optimizer, total_steps=total, **settings)
    probe(trainer.module, numerics, trainer.device)
    reference = critic = None
    if algorithm.kl is not None:
        start = only_or_none(inputs, "reference") or policy
        with job.busy("loading the reference"):
            reference = fixed_policy(start, policy, trainer, numerics)
    if isinstance(algorithm, Ppo):
        with job.busy("loading the value model"):
            module = load_value_model(only_or_none(inputs, "value") or policy, numerics, chat.pad_id)
        total = config.steps * algorithm.updates
        critic = Trainer(module, optimizer=algorithm.critic.optimizer, total_steps=total, name="critic", **settings)
        probe(critic.module, numerics, critic.device)
    return Learner(
        algorithm=algorithm,
        trainer=trainer,
        router_loss=RouterLoss(trainer, routers_of(policy.payload, config.router_aux_loss_coef)),
        numerics=numerics,
        pad_id=chat.pad_id,
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
        seed=config.seed,
        reference=reference,
        critic=critic,
        max_gap=config.max_logprob_gap,
    )


def refuse(config: Rlvr, inputs: Inputs, job: Job, context: int) -> None:
    """Check the inputs before any model is loaded."""
    kernels.refuse(only(inputs, "policy").payload, job.numerics)
    routers_of(only(inputs, "policy").payload, config.router_aux_loss_coef)
    for port in ("reference", "value"):
        given = only_or_none(inputs, port)
        if given is not None and vocabulary(given) != vocabulary(only(inputs, "policy")):
            raise StageError(f"the {port} has a different vocabulary than the policy: use one with the same base model")
    if config.max_prompt_length + config.sampling.max_tokens > context:
        raise StageError(
            f"max_prompt_length {config.max_prompt_length} + max_tokens {config.sampling.max_tokens} exceed the policy's context of "
            f"{context}: lower one of them"
        )
    if job.placement.sampler_process == "inline" and job.numerics.world_size > 1:
        raise StageError(f"sampler_process inline requires world_size 1, not {job.numerics.world_size}: set `sampler_process: own`")


def vocabulary(model: Artifact) -> int:
    """Vocabulary size of a model."""
    return json.loads((model.payload / "config.json").read_text())["vocab_size"]


def refuse_no_signal(state: dict[str, Any], config: Rlvr) -> None:
    """Raise StageError if no group ever had unequal rewards: any update came from KL or momentum alone."""
    if not state["informative"]:
        raise StageError(
            f"none of {config.steps} steps had a group with unequal rewards (mean reward {mean(state['rewards']):.3f}): the prompts "
            "are all too easy or too hard for this policy; use other prompts, more samples_per_prompt, or a higher temperature"
        )


def usable_prompts(
    rows: list[dict[str, Any]], chat: Chat, config: Rlvr, job: Job
) -> tuple[list[tuple[dict[str, Any], list[int]]], dict[str, int]]:
    """((prompt, token ids) that fit and can be verified, reason → dropped prompts).

    Raises:
        StageError: fewer are left than one step requires.
    """
    kept, drops = [], []
    for number, row in enumerate(rows):
        job.doing("tokenizing", number, len(rows), "prompts")
        ids = chat.prompt(row["messages"], row.get("template_arguments"))
        unverified = row["verifier"] is None and config.reward.verifies
        if not unverified and len(ids) <= config.max_prompt_length:
            kept.append((row, ids))
            continue
        reason = "no verifier" if unverified else "longer than max_prompt_length"
        drops.append({"id": row["id"], "source": row["source"], "reason": reason, "length": len(ids)})
    counts = dict(Counter(drop["reason"] for drop in drops))
    if job.rank == 0:
        write_rows(job.evidence / "drops.jsonl", drops)
    if len(kept) < config.prompts_per_step:
        raise StageError(
            f"{len(kept)} of {len(rows)} prompts are usable (dropped: {counts}), but a step requires {config.prompts_per_step}: "
            "raise max_prompt_length, use prompts with verifiers, or lower prompts_per_step"
        )
    why = ", ".join(f"{reason}: {number}" for reason, number in counts.items())
    report_drops(len(drops), len(rows), "prompts", why, "raise max_prompt_length, or use prompts with verifiers", config, job)
    return kept, counts


@contextmanager
def rollout_sampler(model_folder: Path, config: Rlvr, job: Job) -> Iterator[Sampler | None]:
    """The sampler on rank 0, None elsewhere. On GPUs it is ready and asleep."""
    if job.rank != 0:
        start_before_trainer(None, job)
        yield None
        return
    with open_sampler(
        model_folder,
        dtype=config.dtype,
        context=config.max_prompt_length + config.sampling.max_tokens,
        numerics=job.numerics,
        placement=job.placement,
        inline=job.placement.sampler_process == "inline",
        adapter_rank=config.lora.rank if config.lora else None,
        sleeps=shares_gpus(job.numerics),
        head=config.head,
    ) as sampler:
        start_before_trainer(sampler, job)
        yield sampler


def load_weights(sampler: Sampler | None, trainer: Trainer, version: int, config: Rlvr, chat: Chat, job: Job) -> None:
    """Transfer the trained weights, or only the adapters, to the sampler through a folder; called on all ranks. Their version is the
    number of updates that made them."""
    folder = job.folder / "weights"
    if sampler:
        shutil.rmtree(folder, ignore_errors=True)
    if config.lora is not None:
        trainer.export_adapters(folder, config.lora)
    else:
        trainer.export(folder, chat)
    release(trainer)
    if sampler:
        write_version(folder, version)
        (sampler.load if config.lora is None else sampler.load_adapters)(folder)


def refuse_stale(versions: Collection[int], updates: int, step: int) -> None:
    """Check that all answers were sampled with the trainer's weights. One update may move log-probs by less than rounding does, so their
    gap alone cannot tell.

    Raises:
        StageError: they were not.
    """
    if stale := sorted(set(versions) - {updates}):
        raise StageError(
            f"answers of step {step + 1} were sampled with weights after {stale[0]} updates, but the trainer has made {updates}: the "
            "sampler did not load the trainer's weights. Run the stage again, and report the error if it returns"
        )


def roll_out(
    sampler: Sampler, rewards: Rewards, batch: list[tuple[dict[str, Any], list[int]]], step: int, config: Rlvr, chat: Chat, job: Job
) -> tuple[list[Rollout], list[float] | None]:
    """(answers with rewards, grouped by prompt; rewards of greedy answers if the algorithm uses them as baseline)."""

    def answer(drawn: list[tuple[dict[str, Any], list[int], int]], samples: int, sampling: Sampling) -> list[Rollout]:
        requests = [Request(ids, seed_of(config.seed, step, prompt["id"], index)) for prompt, ids, index in drawn]
        found: list[Generation] = []
        for start in range(0, len(requests), ROLLOUT_CHUNK):
            chunk = requests[start : start + ROLLOUT_CHUNK]
            found += sampler.generate(chunk, sampling, [chat.eos_id], lambda _: job.progress(step, config.steps))
        texts = [chat.decode(one.response_ids) for one in found]
        scores: list[float] = []

        def beat() -> None:
            job.doing("verifying", len(scores))  # a verifier may take minutes; each has a time limit

        asked = (prompt["verifier"] if config.reward.verifies else None for prompt, *_ in drawn)
        for (prompt, *_), verdict in zip(drawn, verify_each(zip(asked, texts, strict=True), beat), strict=True):
            beat()
            scores.append(score_of(prompt, verdict))
        answered = [
            Answered(prompt, text, one.response_ids, one.finish_reason, None if math.isnan(score) else score)
            for (prompt, *_), one, text, score in zip(drawn, found, texts, scores, strict=True)
        ]
        return [
            Rollout(prompt, ids, one, text, score, *rewarded)
            for (prompt, ids, _), one, text, score, rewarded in zip(drawn, found, texts, scores, rewards.of(answered, samples), strict=True)
        ]

    samples = config.samples_per_prompt
    rollouts = answer([(prompt, ids, index) for prompt, ids in batch for index in range(samples)], samples, config.sampling)
    if config.algorithm.advantage != "greedy":
        return rollouts, None
    greedy = answer([(prompt, ids, 0) for prompt, ids in batch], 1, config.sampling.model_copy(update={"temperature": 0.0}))
    return rollouts, [rollout.reward for rollout in greedy]


def score_of(prompt: dict[str, Any], verdict: Verdict | VerifierError | None) -> float:
    """The verifier's score; NaN if the verifier cannot run, which says nothing about the answer, or was not asked."""
    if isinstance(verdict, Verdict):
        return verdict.score
    if verdict is not None:
        print(f"no score for an answer to {prompt['id']}: {verdict}", flush=True)
    return math.nan


def tokens_of(rollouts: list[Rollout], config: Rlvr, job: Job) -> int:
    """Tokens of prompts and answers, counting a shared prompt once."""
    answers = config.samples_per_prompt if job.numerics.shares_prompts else 1
    return sum(len(one.answer.response_ids) for one in rollouts) + sum(len(one.prompt_ids) for one in rollouts[::answers])


def reward_numbers(rollouts: list[Rollout]) -> dict[str, float]:
    """Metrics of one step's rollouts: rewards and their parts, lengths, truncation."""
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if not math.isnan(rollout.score):
            parts[f"score_{rollout.prompt['verifier']['name']}"].append(rollout.score)
        for name, value in rollout.terms.items():
            if value is not None and not math.isnan(value):
                parts[f"reward_{name}"].append(value)
    rewards = [rollout.reward for rollout in rollouts]
    return {
        "reward": mean(present(rewards)),
        **{name: mean(values) for name, values in sorted(parts.items())},
        "missing_rewards": float(len(rewards) - len(present(rewards))),
        "response_length": mean([float(len(rollout.answer.response_ids)) for rollout in rollouts]),
        "truncated": mean([float(rollout.answer.finish_reason == "length") for rollout in rollouts]),
    }


def present(rewards: list[float]) -> list[float]:
    """The rewards that are not missing."""
    return [reward for reward in rewards if not math.isnan(reward)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def show(rollouts: list[Rollout], step: int, config: Rlvr) -> list[dict[str, Any]]:
    """A few prompts of a step with some of their answers, for human readers."""
    shown = []
    for start in range(0, min(len(rollouts), SHOWN_PROMPTS * config.samples_per_prompt), config.samples_per_prompt):
        group = rollouts[start : start + config.samples_per_prompt][:SHOWN_ANSWERS]
        texts, prompt = [rollout.text for rollout in group], group[0].prompt
        rewards = finite([rollout.reward for rollout in group])
        row = {"step": step + 1, "id": prompt["id"], "messages": prompt["messages"], "answers": texts, "rewards": rewards}
        terms = {name: finite([rollout.terms[name] for rollout in group]) for name in group[0].terms}
        shown.append(row | ({"terms": terms} if terms else {}))
    return shown
