"""RLVR: policy + prompts with verifiers → policy, by policy gradients on rollouts from vLLM in the same job.

One step: prompts → rollouts of the current weights → verified rewards → groups to train on → one or several updates → weights to the
sampler. The algorithms are in `configs/methods/policy_gradient.py`, the rollouts in `rolling.py`, when they are made in
`pacing.py`, the choice of groups in `group_selection.py`, the update in `stages/training/policy_update.py`.
Rank 0 owns the sampler and broadcasts the rollouts to all ranks, so they do not depend on the number of ranks. Every step draws fresh
rollouts with seeds from (seed, step, prompt id, index): the step's number, its position in the order of prompts, the prompts set aside and
the successes to replay are the only data state.

A reward that cannot be computed is missing, never 0.
"""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from pedigree.configs.base.frozen import finite
from pedigree.configs.methods.policy_gradient import Ppo
from pedigree.configs.methods.training import Rlvr
from pedigree.data.artifacts.artifacts import write_rows
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.rlvr.group_selection import Cursor, without_others
from pedigree.stages.rlvr.handover import rollout_sampler, sleep_level, takes_turns
from pedigree.stages.rlvr.hints import refuse_unhinted
from pedigree.stages.rlvr.kind import served
from pedigree.stages.rlvr.pacing import Clock, note_other_weights, open_pace, refuse_stale, staleness
from pedigree.stages.rlvr.rewarding import open_rewards
from pedigree.stages.rlvr.rolling import RECORDS, Prompt, Roller, Rollout, StepRollouts, mean
from pedigree.stages.rlvr.weight_transfer import load_weights
from pedigree.stages.sampling.partners import open_environments
from pedigree.stages.sampling.policy_servers import serving
from pedigree.stages.sampling.sampler import model_context
from pedigree.stages.training import kernels
from pedigree.stages.training.checkpoints import Checkpoints
from pedigree.stages.training.models import load_policy, load_value_model, refuse_without_scores
from pedigree.stages.training.policy_update import Learner, TrainingSample, UpdateResult, initial_state, update_policy
from pedigree.stages.training.probe import probe
from pedigree.stages.training.reference import fixed_policy, refuse_unlike_tokens
from pedigree.stages.training.router_loss import RouterLoss, routers_of
from pedigree.stages.training.trainer import Trainer
from pedigree.stages.training.training_rows import report_drops
from pedigree.stages.verifiers import Verifying

COUNTED = (
    "informative_groups", "trained_tokens", "missing_rewards", "generated_batches", "resampled_prompts", "hopeless_groups", "hinted_groups",
    "replayed_answers",
)  # fmt: skip
"""Metrics whose sums over all steps are metrics of the run."""
BEGINNING = {"step": 0, "position": 0, "updates": 0, "counted": {}, "rewards": [], "gaps": [], "shown": []}
TIMED = "asynchronous: which weights sampled a token depended on the time that engines and trainer took, so another run has other bits"
SHOWN_STEPS, SHOWN_PROMPTS, SHOWN_ANSWERS = 10, 2, 4


def run(config: Rlvr, inputs: Inputs, job: Job) -> dict[str, Any]:
    policy = only(inputs, "policy")
    chat = Chat(policy.payload)
    refuse(config, inputs, job, model_context(policy.payload))
    with job.busy("reading rows"):
        pool = records.load(only(inputs, "prompts"))
    prompts, dropped = usable_prompts(pool, chat, config, job)
    refuse_unhinted([row for row, _ in prompts], config, chat, job)
    with (
        Verifying() as verifying,
        serving(served(config), inputs, job, beside=config.asynchronous is not None) as servers,
        open_rewards(config, [row for row, _ in prompts], inputs.get("reward_models", {}), servers, job) as rewards,
        open_environments(config.environment, [row for row, _ in prompts], [chat], servers, job) as environments,
        rollout_sampler(policy.payload, config, job) as engines,
    ):
        learner = make_learner(config, inputs, chat, job)
        trainer = learner.trainer
        checkpoints = Checkpoints(job, trainer, *([learner.critic] if learner.critic else []))
        state: dict[str, Any] = checkpoints.resume() or {**BEGINNING, "memory": initial_state(config.algorithm)}
        state = {"recent": [state["updates"]], "successes": {}} | state
        if rewards:
            rewards.resume(state.get("raters", {}))
        if state["updates"]:
            load_weights(engines, trainer, state["updates"], config, job)
        if config.asynchronous and config.asynchronous.max_staleness and config.asynchronous.in_flight and TIMED not in job.marks:
            job.note(TIMED)
        note_other_weights(config, job, state["step"])
        cursor, roller = Cursor(state["position"], state.get("set_aside", ())), None
        if engines and rewards:
            roller = Roller(engines, verifying, rewards, prompts, config, chat, job, environments, {**state["successes"]})
        with open_pace(roller, trainer, config, state["step"], cursor) as pace:
            for step in range(state["step"], config.steps):
                clock = Clock(engines)
                with clock.waiting():
                    rolled = cast(StepRollouts, trainer.broadcast(pace.take(cursor, step)))
                rollouts, cursor = rolled.rollouts, rolled.cursor
                refuse_unrewarded(rollouts, step)
                fresh, replayed = ([one.answer for one in rollouts if one.replayed == old] for old in (False, True))
                lag = refuse_stale(fresh, state["recent"], max_staleness(config), step)
                learning = replace(learner, max_gap=math.inf) if lag or replayed else learner
                samples = training_samples(rollouts, config)
                job.doing("training")
                done = update_policy(learning, samples, config.samples_per_prompt, step, state["memory"], rolled.greedy)
                with clock.waiting():
                    pace.before_load()
                emptied = takes_turns(config, job.numerics) and sleep_level(config, step) == 2
                if (done.updates or emptied) and step + 1 < config.steps:
                    load_weights(engines, trainer, state["updates"] + done.updates, config, job)
                pace.done(step + 1)

                numbers = rolled.numbers | done.metrics | ({"staleness": lag} if config.asynchronous else {}) | clock.idle()
                numbers |= {"replay_staleness": staleness(replayed, state["updates"])} if replayed else {}
                numbers |= trainer.paces.slowest()
                speed = rolled.tokens / clock.seconds
                job.log(step + 1, **numbers, tokens=tokens_of(rollouts, config, job), tokens_per_second=speed)
                signal = {name: numbers[name] for name in ("reward", "informative_groups")}
                job.progress(step + 1, config.steps, **signal, tokens_per_second=speed)
                state = state_after(state, rolled, done, numbers, config) | ({"raters": rewards.models()} if rewards else {})
                if job.rank == 0:
                    write_rows(job.evidence / "rollouts.jsonl", state["shown"])
                if step + 1 < config.steps:
                    checkpoints.after_step(step + 1, state)

        refuse_no_signal(state, config)
        with job.busy("writing the model"):
            trainer.export(job.out / "payload", chat)
        for one in filter(None, (trainer, learner.critic)):
            one.close()
    for used in ("weights", RECORDS):
        shutil.rmtree(job.folder / used, ignore_errors=True)
    return {"prompts": len(prompts), "dropped_prompts": dropped} | totals(state, config)


def state_after(state: dict[str, Any], rolled: StepRollouts, done: UpdateResult, numbers: dict[str, float], config: Rlvr) -> dict[str, Any]:
    """What the checkpoint after a step contains, from the state before it."""
    step, updates = state["step"], state["updates"] + done.updates
    shown = show(rolled.rollouts, step, config) if step % max(1, config.steps // SHOWN_STEPS) == 0 else []
    return {
        "step": step + 1,
        **rolled.cursor._asdict(),
        "updates": updates,
        "recent": [*state["recent"], updates][-1 - max_staleness(config) :],
        "counted": {name: state["counted"].get(name, 0) + int(numbers[name]) for name in COUNTED if name in numbers},
        "rewards": [*state["rewards"], numbers["reward"]],
        "gaps": [*state["gaps"], numbers["logprob_gap"]],
        "shown": state["shown"] + shown,
        "memory": done.state,
        "successes": state["successes"] | rolled.successes,
    }


def max_staleness(config: Rlvr) -> int:
    return config.asynchronous.max_staleness if config.asynchronous else 0


def training_samples(rollouts: list[Rollout], config: Rlvr) -> list[TrainingSample]:
    """What the update takes of the answers."""
    masks, size = config.algorithm.mask_truncated, config.samples_per_prompt
    rewards = without_others([one.reward for one in rollouts], size, config.algorithm.keep)
    samples = []
    for one, reward in zip(rollouts, rewards, strict=True):
        answer, sampled = one.answer, one.turns.sampled if one.turns else None
        masked = masks and answer.finish_reason == "length"
        turn_rewards = one.turn_rewards(config)
        samples.append(
            TrainingSample(one.prompt["id"], one.prompt_ids, answer.response_ids, answer.logprobs, reward, masked, sampled, turn_rewards)
        )
    return samples


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
    reference = teacher = critic = None
    if algorithm.refers:
        start = only_or_none(inputs, "reference") or policy
        with job.busy("loading the reference"):
            reference = fixed_policy(start, policy, trainer, numerics)
    if algorithm.teacher is not None:
        with job.busy("loading the teacher"):
            teacher = fixed_policy(only(inputs, "teacher"), policy, trainer, numerics)
    if isinstance(algorithm, Ppo):
        with job.busy("loading the value model"):
            module = load_value_model(only_or_none(inputs, "value") or policy, numerics, chat.pad_id)
        total = config.steps * algorithm.updates
        critic = Trainer(module, optimizer=algorithm.critic.optimizer, total_steps=total, name="critic", **settings)
        probe(critic.module, numerics, critic.device)
    return Learner(
        algorithm=algorithm,
        trainer=trainer,
        router_loss=RouterLoss(trainer, routers_of(policy.payload, config.router_aux_loss_coef), job.steady),
        numerics=numerics,
        pad_id=chat.pad_id,
        temperature=config.sampling.temperature,
        max_tokens=config.turns * config.sampling.max_tokens,
        seed=config.seed,
        reference=reference,
        teacher=teacher,
        critic=critic,
        steady=job.steady,
        max_gap=config.max_logprob_gap,
    )


def refuse(config: Rlvr, inputs: Inputs, job: Job, context: int) -> None:
    """Check the inputs before any model is loaded."""
    kernels.refuse(only(inputs, "policy").payload, job.numerics)
    routers_of(only(inputs, "policy").payload, config.router_aux_loss_coef)
    if isinstance(config.algorithm, Ppo):
        refuse_without_scores((only_or_none(inputs, "value") or only(inputs, "policy")).payload)
    for port in ("reference", "teacher", "value"):
        if given := only_or_none(inputs, port):
            refuse_unlike_tokens(port, given, only(inputs, "policy"))
    if config.max_prompt_length + config.longest_answer > context:
        turns = f"max_turns {config.turns} x " if config.turns > 1 else ""
        between = f" + {config.turns - 1} x max_observation {config.environment.max_observation}" if config.environment and turns else ""
        raise StageError(
            f"max_prompt_length {config.max_prompt_length} + {turns}max_tokens {config.sampling.max_tokens}{between} exceed the policy's "
            f"context of {context}: lower one of them"
        )
    if job.placement.sampler_process == "inline":
        for name, number in (("world_size", job.numerics.world_size), ("engines", job.placement.engines)):
            if number > 1:
                raise StageError(f"sampler_process inline requires {name} 1, not {number}: set `sampler_process: own`")
        if config.asynchronous:
            raise StageError("asynchronous requires a sampler beside the trainer, not sampler_process inline: set `sampler_process: own`")


def totals(state: dict[str, Any], config: Rlvr) -> dict[str, Any]:
    """Metrics of the whole run."""
    edge = max(1, config.steps // 10)
    return {
        "steps": config.steps,
        "updates": state["updates"],
        **state["counted"],
        "first_reward": mean(state["rewards"][:edge]),
        "last_reward": mean(state["rewards"][-edge:]),
        "largest_logprob_gap": max(state["gaps"]),
    }


def refuse_no_signal(state: dict[str, Any], config: Rlvr) -> None:
    """Raise StageError if no group ever had unequal rewards: any update came from KL or momentum alone."""
    if not state["counted"]["informative_groups"]:
        raise StageError(
            f"none of {config.steps} steps had a group with unequal rewards (mean reward {mean(state['rewards']):.3f}): the prompts "
            "are all too easy or too hard for this policy; use other prompts, more samples_per_prompt, or a higher temperature"
        )


def usable_prompts(rows: list[dict[str, Any]], chat: Chat, config: Rlvr, job: Job) -> tuple[list[Prompt], dict[str, int]]:
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


def refuse_unrewarded(rollouts: Sequence[Rollout], step: int) -> None:
    """Raise StageError if no answer has a reward."""
    if all(math.isnan(rollout.reward) for rollout in rollouts):
        cause = next((rollout.cause for rollout in rollouts if rollout.cause), "see the log for the reasons")
        raise StageError(f"no answer of step {step + 1} has a reward: {cause}")


def tokens_of(rollouts: list[Rollout], config: Rlvr, job: Job) -> int:
    """Tokens of prompts and answers, counting a shared prompt once."""
    answers = config.samples_per_prompt if job.numerics.shares_prompts else 1
    return sum(len(one.answer.response_ids) for one in rollouts) + sum(len(one.prompt_ids) for one in rollouts[::answers])


def show(rollouts: list[Rollout], step: int, config: Rlvr) -> list[dict[str, Any]]:
    """A few prompts of a step with some of their answers, for human readers."""
    shown = []
    for start in range(0, min(len(rollouts), SHOWN_PROMPTS * config.samples_per_prompt), config.samples_per_prompt):
        group = rollouts[start : start + config.samples_per_prompt][:SHOWN_ANSWERS]
        texts, prompt = [rollout.text for rollout in group], group[0].prompt
        rewards = finite([rollout.reward for rollout in group])
        row = {"step": step + 1, "id": prompt["id"], "messages": prompt["messages"], "answers": texts, "rewards": rewards}
        terms = {name: finite([rollout.terms[name] for rollout in group]) for name in group[0].terms}
        turns = [rollout.turns.messages for rollout in group if rollout.turns]
        shown.append(row | ({"terms": terms} if terms else {}) | ({"conversations": turns} if turns else {}))
    return shown
