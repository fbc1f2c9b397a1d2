"""One batch of rollouts → optimizer updates of the policy (and of PPO's value model), on all ranks, without a sampler.

    rewards → mini-batches of groups → skip groups that cannot have a gradient → micro-batches
    → [no gradient: old log-probs, reference log-probs, values] → advantages per token → per inner epoch and mini-batch: one update

Skipping a group only saves its passes: it still counts in the divisor of its mini-batch (`pg.has_gradient`).

With one update per batch of rollouts the ratio ρ is 1 by construction, and the old log-probs are those of the update's own forward
pass. With several updates the old log-probs are computed first, on the same micro-batches as training: each mini-batch is split
into micro-batches once, and inner epochs shuffle only mini-batches, so that rounding cancels and the first update sees ρ = 1 too.

All ranks get all rollouts, so counts and denominators need no communication. Metrics stay on the device: the host reads them once
per mini-batch, before the policy is updated, and once at the end, for the gradient norms.

Shapes: P prompts, G answers to each (the group), A = P · G answers of the step, D answers of a micro-batch, N trained tokens.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.policy_gradient import Algorithm, Correction, Kl, Ppo, ReinforcePp
from pedigree.stages.core import advantages
from pedigree.stages.core import policy_losses as pg
from pedigree.stages.job.failures import StageError
from pedigree.stages.training.reference import FixedPolicy
from pedigree.stages.training.rollout_batches import MiniBatchPlan, RolloutMicroBatch, TrainingSample, mini_batches
from pedigree.stages.training.router_loss import ROUTER_METRICS, RouterLoss
from pedigree.stages.training.trainer import MetricSums, Trainer

WHITENING_EPSILON = 1e-8
"""Added to the variance when advantages are whitened."""
KL_ESTIMATORS = ("k1", "k2", "k3")
ERRORS = 3.0
"""Standard errors by which the mean gap of log-probs must exceed its bound to be no chance."""
RATIO_MAX = "ratio_max"
"""The only metric of a micro-batch that is a maximum instead of a sum over tokens."""


@dataclass(frozen=True)
class Learner:
    """The models and settings of training, constant over all steps."""

    algorithm: Algorithm
    trainer: Trainer
    router_loss: RouterLoss
    numerics: Numerics
    pad_id: int
    temperature: float
    """Sampling temperature, by which logits are divided."""
    max_tokens: int
    """Maximum answer length, of all turns together."""
    seed: int = 0
    reference: FixedPolicy | None = None
    """The fixed reference policy of the KL."""
    teacher: FixedPolicy | None = None
    critic: Trainer | None = None
    """PPO's value model."""
    steady: Callable[[Iterable[Any]], Iterator[Any]] = iter
    """Iterates over micro-batches, e.g. with heartbeats (`Job.steady`)."""
    max_gap: float = math.inf
    """Maximum accepted mean |log-prob(sampler) - log-prob(trainer)| per token."""


class AlgorithmState(TypedDict):
    """An algorithm's state between steps; JSON, for the checkpoint."""

    coefficient: float | None
    """β of the KL penalty; None without one."""
    prompts: dict[str, list[Any]]
    """DCPO: id of a prompt → reward statistics of all its visits (`advantages.Visits`)."""
    entropy: NotRequired[list[float]]
    """c and α of an adaptive entropy bonus."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one step's updates."""

    metrics: dict[str, float]
    """Metrics for the curve; equal on all ranks."""
    state: AlgorithmState
    """State for the next step and the checkpoint."""
    updates: int
    """Number of optimizer updates of the policy."""


TokenSums = dict[str, Tensor]
"""Metric → its sum over the tokens of one micro-batch, on the device."""
MiniBatchSums = dict[str, float]
"""Metric → its sum over the tokens of one mini-batch, over all ranks."""


def initial_state(algorithm: Algorithm) -> AlgorithmState:
    state = AlgorithmState(coefficient=algorithm.kl.coefficient if algorithm.kl else None, prompts={})
    if algorithm.entropy is not None and algorithm.entropy.adaptive is not None:
        state["entropy"] = [algorithm.entropy.coefficient, 0.0]
    return state


def update_policy(
    learner: Learner,
    samples: Sequence[TrainingSample],
    group_size: int,
    step: int,
    state: AlgorithmState,
    greedy_rewards: Sequence[float] | None = None,
) -> UpdateResult:
    """Train on one batch of rollouts; called on all ranks with the same arguments.

    Args:
        samples: answers grouped by prompt, `group_size` for each.
        step: 0-based; determines the shuffle together with the seed.
        state: `initial_state`, or the state of the previous step.
        greedy_rewards: for ReMax, the reward of each prompt's greedy answer.

    Raises:
        StageError: sampler and trainer disagree on log-probs by more than `max_gap`.
        NotFinite: a loss or gradient is NaN or infinite.
    """
    algorithm = learner.algorithm
    policy_frozen = isinstance(algorithm, Ppo) and step < algorithm.critic.warmup_steps
    follow_schedule(learner, step)
    rewards_PG = torch.tensor([sample.reward for sample in samples], dtype=torch.float32).view(-1, group_size)
    if greedy_rewards is not None:  # a prompt without a baseline has no advantages
        rewards_PG = rewards_PG.masked_fill(torch.tensor(greedy_rewards)[:, None].isnan(), math.nan)
    chosen, next_state = choose_answers(algorithm, samples, rewards_PG, state, greedy_rewards)
    if learner.router_loss.trains:  # every token has a gradient
        chosen = replace(chosen, skipped=chosen.masked)
    cut = mini_batches(chosen.groups, algorithm.mini_batches, f"{learner.seed}/{step}")
    grouped = [groups for groups in cut if not all(map(chosen.skipped.issuperset, groups))]
    if grouped and (algorithm.entropy is not None or algorithm.top_entropy is not None):  # means and shares are of all tokens
        chosen = replace(chosen, skipped=chosen.masked)
    num_kept = sum(len(group) for group in chosen.groups) - len(chosen.skipped)
    kept_groups = sum(not chosen.skipped.issuperset(group) for group in chosen.groups)
    kept = {"informative_groups": float(chosen.informative), "kept_groups": float(kept_groups), "kept_answers": float(num_kept)}
    if not grouped:
        metrics = {"updates": 0.0, "trained_tokens": 0.0} | kept | metrics_without_update(learner, samples, group_size)
        return UpdateResult(metrics, adapt_entropy(algorithm, next_state, metrics), 0)
    batches = micro_batches(learner, samples, grouped, old_logprobs=algorithm.looks or policy_frozen, skipped=chosen.skipped)
    batches, next_state = compute_advantages(learner, samples, batches, rewards_PG, state, next_state, greedy_rewards)
    bonus = entropy_coefficient(algorithm, state)
    batches = [weigh_by_entropy(learner, batch, bonus) for batch in batches]
    metrics, first_epoch_sums = run_updates(learner, batches, step, policy_frozen, state["coefficient"])
    metrics |= kept | rollout_metrics(first_epoch_sums)
    if algorithm.kl is not None:
        assert state["coefficient"] is not None
        metrics["kl_coefficient"] = state["coefficient"]
        if algorithm.kl.adaptive is not None:
            mean_kl = sum(sums["k1"] for sums in first_epoch_sums) / num_kept
            coefficient = pg.adapted(state["coefficient"], mean_kl, num_kept, algorithm.kl.adaptive)
            next_state = AlgorithmState(**{**next_state, "coefficient": coefficient})
    if algorithm.entropy is not None:
        metrics["entropy_coefficient"] = bonus
    if not policy_frozen:
        next_state = adapt_entropy(algorithm, next_state, metrics)
    updates = 0 if policy_frozen else len(batches) * algorithm.updates // algorithm.mini_batches
    computed = [index for groups in grouped for group in groups for index in group if index not in chosen.skipped]
    trained = 0 if policy_frozen else sum(samples[index].length for index in computed)
    return UpdateResult(metrics | {"updates": float(updates), "trained_tokens": float(trained)}, next_state, updates)


def follow_schedule(learner: Learner, step: int) -> None:
    """Set the learning rates to those planned for the step, independent of the number of earlier updates: a step without a learning signal
    has none, and a step with fewer prompts than mini-batches has fewer."""
    algorithm = learner.algorithm
    warmup = algorithm.critic.warmup_steps if isinstance(algorithm, Ppo) else 0
    learner.trainer.go_to(max(0, step - warmup) * algorithm.updates)
    if learner.critic is not None:
        learner.critic.go_to(step * algorithm.updates)


@dataclass(frozen=True)
class ChosenAnswers:
    """The answers in a step's loss, and those that need no forward pass."""

    groups: list[list[int]]
    """Indices of samples with a reward, by prompt; all count in the loss's divisor."""
    skipped: frozenset[int]
    """Those among them that cannot have a gradient."""
    masked: frozenset[int]
    """Those among the skipped that are not in the loss."""
    informative: int
    """Number of groups with a learning signal."""


def choose_answers(
    algorithm: Algorithm,
    samples: Sequence[TrainingSample],
    rewards_PG: Tensor,
    state: AlgorithmState,
    greedy_rewards: Sequence[float] | None,
) -> tuple[ChosenAnswers, AlgorithmState]:
    """(answers of the step, next state), by the rules `pg.has_gradient` and `pg.informative`."""
    present_PG, next_state, advantages_PG = ~rewards_PG.isnan(), state, None
    if not algorithm.per_token:
        advantages_PGT, after = answer_advantages(algorithm, samples, rewards_PG, state, greedy_rewards)
        advantages_PG = advantages_PGT.abs().amax(2)
        next_state = state if _kl_in_reward(algorithm) is not None else after  # with a KL in the reward, rewards are still incomplete
    gradient_PG = pg.has_gradient(algorithm, advantages_PG, present_PG, entropy_coefficient(algorithm, state) > 0)
    group_size = rewards_PG.shape[1]
    groups = [[p * group_size + g for g in range(group_size) if present_PG[p, g]] for p in range(len(present_PG))]
    masked_PG = torch.tensor([sample.masked for sample in samples]).view_as(present_PG)
    skipped, masked = (
        frozenset((present_PG & without_PG).flatten().nonzero().flatten().tolist()) for without_PG in (masked_PG | ~gradient_PG, masked_PG)
    )
    informative = int(pg.informative(rewards_PG, advantages_PG, algorithm.teacher is not None).sum())
    return ChosenAnswers([group for group in groups if group], skipped, masked, informative), next_state


def answer_advantages(
    algorithm: Algorithm,
    samples: Sequence[TrainingSample],
    rewards_PG: Tensor,
    state: AlgorithmState,
    greedy_rewards: Sequence[float] | None,
) -> tuple[Tensor, AlgorithmState]:
    """(advantages (P, G, T), one per answer, or per turn if samples have rewards per turn; next state)."""
    if samples[0].turn_rewards is not None:
        return advantages.turns_normalised(_turn_rewards(samples, rewards_PG)), state
    match algorithm.advantage:
        case "normalised":
            advantages_PG = advantages.normalised(rewards_PG)
        case "centred":
            advantages_PG = advantages.centred(rewards_PG)
        case "leave_one_out":
            advantages_PG = advantages.leave_one_out(rewards_PG)
        case "greedy":
            advantages_PG = advantages.over_greedy(rewards_PG, torch.tensor(greedy_rewards))
        case "smoothed":
            prompts = [samples[p * rewards_PG.shape[1]].prompt for p in range(len(rewards_PG))]
            history_P = [advantages.Visits(*state["prompts"].get(prompt, ())) for prompt in prompts]
            advantages_PG, history_P = advantages.smoothed(rewards_PG, history_P)
            visited = {prompt: list(visits) for prompt, visits in zip(prompts, history_P, strict=True)}
            state = AlgorithmState(**{**state, "prompts": state["prompts"] | visited})
        case _:
            raise StageError(f"{algorithm.type} has advantages per token, not per answer")
    return advantages_PG[..., None], state


def _turn_rewards(samples: Sequence[TrainingSample], rewards_PG: Tensor) -> Tensor:
    """Rewards of turns, (P, G, T); NaN where there is none."""
    given = [sample.turn_rewards or () for sample in samples]
    longest = max(map(len, given))
    rewards = torch.tensor([[*own, *[math.nan] * (longest - len(own))] for own in given], dtype=torch.float32)
    return rewards.view(*rewards_PG.shape, longest).masked_fill(rewards_PG.isnan()[..., None], math.nan)


def micro_batches(
    learner: Learner,
    samples: Sequence[TrainingSample],
    grouped: list[list[list[int]]],
    *,
    old_logprobs: bool,
    skipped: frozenset[int] = frozenset(),
) -> list[list[RolloutMicroBatch]]:
    """This rank's micro-batches of each mini-batch, with all quantities computed before the first update.

    `grouped` has, for each mini-batch, the indices of the answers to each of its prompts; those in `skipped` only count in the divisors.
    """
    settings = (learner.algorithm.aggregation, learner.max_tokens, learner.trainer.world_size, learner.numerics)
    plans = [MiniBatchPlan.of(samples, groups, skipped, *settings) for groups in grouped]
    with learner.trainer.feed((plan.global_batch() for plan in plans), learner.pad_id) as feed:
        return [
            [compute_old_quantities(learner, plan.micro_batch(one), old_logprobs) for one in learner.steady(feed.micro_batches())]
            for plan in plans
        ]


@torch.no_grad()
def compute_old_quantities(learner: Learner, micro_batch: RolloutMicroBatch, old_logprobs: bool) -> RolloutMicroBatch:
    """Add quantities that stay fixed during the updates: old log-probs and entropy if requested, reference log-probs, values."""
    found: dict[str, Tensor] = {}
    batch, temperature = micro_batch.batch, learner.temperature
    if old_logprobs:
        found["old_logps_N"], found["entropy_N"] = learner.trainer.module(batch, temperature=temperature, entropy=True)
    if learner.reference is not None:
        found["reference_logps_N"], _ = learner.reference(batch, temperature=temperature)
    if learner.teacher is not None:
        found["teacher_logps_N"], _ = learner.teacher(batch, temperature=temperature)
    if learner.critic is not None:
        found["values_N"] = learner.critic.module(batch)
    return replace(micro_batch, **found)


def metrics_without_update(learner: Learner, samples: Sequence[TrainingSample], group_size: int) -> dict[str, float]:
    """Metrics of the rollouts of a step in which no group has a learning signal."""
    groups = [list(range(start, start + group_size)) for start in range(0, len(samples), group_size)]
    (all_samples,) = micro_batches(learner, samples, [groups], old_logprobs=True)
    all_samples = weigh_by_entropy(learner, all_samples, 0.0)
    sums = [(micro_batch, rollout_sums(learner, micro_batch)) for micro_batch in all_samples]
    return rollout_metrics([_sum_over_ranks(learner, sums)])


def compute_advantages(
    learner: Learner,
    samples: Sequence[TrainingSample],
    batches: list[list[RolloutMicroBatch]],
    rewards_PG: Tensor,
    state: AlgorithmState,
    next_state: AlgorithmState,
    greedy_rewards: Sequence[float] | None,
) -> tuple[list[list[RolloutMicroBatch]], AlgorithmState]:
    """(micro-batches with the advantages of their tokens, next state)."""
    algorithm, device = learner.algorithm, learner.trainer.device
    kl, coefficient = _kl_in_reward(algorithm), state["coefficient"]
    if algorithm.teacher is not None and algorithm.teacher.alone:
        rewards_PG = torch.where(rewards_PG.isnan(), rewards_PG, 0.0)
        greedy_rewards = greedy_rewards and [0.0] * len(greedy_rewards)
    if algorithm.per_token:
        rewards_A = rewards_PG.flatten().to(device)
        batches = [[_with_token_advantages(learner, one, rewards_A, coefficient) for one in batch] for batch in batches]
    else:
        if kl is not None:
            assert coefficient is not None
            rewards_PG = rewards_PG - coefficient * _answer_kl(learner, batches, kl, len(samples)).view_as(rewards_PG)
        advantages_PGT, after = answer_advantages(algorithm, samples, rewards_PG, state, greedy_rewards)
        next_state = after if kl is not None else next_state
        advantages_AT = advantages_PGT.flatten(0, 1).to(device)
        batches = [[_with_answer_advantages(algorithm, one, advantages_AT) for one in batch] for batch in batches]
    return (_whiten_advantages(learner, batches) if algorithm.whitened else batches), next_state


def _kl_in_reward(algorithm: Algorithm) -> Kl | None:
    return algorithm.kl if algorithm.kl is not None and algorithm.kl.where == "reward" else None


def _answer_kl(learner: Learner, batches: list[list[RolloutMicroBatch]], kl: Kl, num_samples: int) -> Tensor:
    """Σ_t k_t of every answer of the step, shape (A,), summed over the ranks' micro-batches."""
    sums_A = torch.zeros(num_samples, dtype=torch.float64, device=learner.trainer.device)
    for one in (micro_batch for batch in batches for micro_batch in batch if micro_batch.weight):
        assert one.old_logps_N is not None and one.reference_logps_N is not None
        kl_D = one.batch.sum_by_document(pg.kl(kl.estimator, one.old_logps_N, one.reference_logps_N))
        sums_A = sums_A.index_add(0, one.sample_D, kl_D.double())
    return learner.trainer.summed(sums_A).float().cpu()


def teacher_rewards(algorithm: Algorithm, micro_batch: RolloutMicroBatch) -> Tensor | None:
    """w (log π_T - log π_b) of each token; None without a teacher."""
    if algorithm.teacher is None or micro_batch.teacher_logps_N is None:
        return None
    other_N = micro_batch.reference_logps_N if algorithm.teacher.against == "reference" else micro_batch.old_logps_N
    assert other_N is not None
    return algorithm.teacher.weight * pg.kl("k1", micro_batch.teacher_logps_N, other_N)


def _with_answer_advantages(algorithm: Algorithm, micro_batch: RolloutMicroBatch, advantages_AT: Tensor) -> RolloutMicroBatch:
    """Give every token its answer's or turn's advantage, and what a teacher adds."""
    samples_N, turns_N = micro_batch.sample_D[micro_batch.batch.documents_N], micro_batch.turns_N
    advantages_N = advantages_AT[samples_N, 0 if turns_N is None else turns_N]
    taught_N = teacher_rewards(algorithm, micro_batch)
    return replace(micro_batch, advantages_N=advantages_N if taught_N is None else advantages_N + taught_N)


def _with_token_advantages(
    learner: Learner, micro_batch: RolloutMicroBatch, rewards_A: Tensor, coefficient: float | None
) -> RolloutMicroBatch:
    """Add returns to go (REINFORCE++), or GAE and the value model's target returns (PPO)."""
    algorithm, documents_N = learner.algorithm, micro_batch.batch.documents_N
    penalties_N = torch.zeros_like(micro_batch.token_weights_N)
    kl = _kl_in_reward(algorithm)
    if kl is not None and coefficient is not None:
        assert micro_batch.old_logps_N is not None and micro_batch.reference_logps_N is not None
        penalties_N = coefficient * pg.kl(kl.estimator, micro_batch.old_logps_N, micro_batch.reference_logps_N)
    taught_N = teacher_rewards(algorithm, micro_batch)
    if taught_N is not None:
        penalties_N = penalties_N - taught_N
    max_length = micro_batch.max_length
    rewards_DT = advantages.token_rewards(rewards_A[micro_batch.sample_D], penalties_N, documents_N, max_length)
    if isinstance(algorithm, ReinforcePp):
        return replace(micro_batch, advantages_N=advantages.flat(advantages.returns_to_go(rewards_DT, algorithm.gamma), documents_N))
    assert isinstance(algorithm, Ppo) and micro_batch.values_N is not None
    values_DT = advantages.rows(micro_batch.values_N, documents_N, micro_batch.batch.num_documents, max_length)
    advantages_N = advantages.flat(advantages.gae(rewards_DT, values_DT, algorithm.gamma, algorithm.gae_lambda), documents_N)
    return replace(micro_batch, advantages_N=advantages_N, returns_N=advantages_N + micro_batch.values_N)


def _whiten_advantages(learner: Learner, batches: list[list[RolloutMicroBatch]]) -> list[list[RolloutMicroBatch]]:
    """Whiten advantages over the N tokens of all mini-batches and ranks: (A - mean) / √(Σ (A - mean)² / (N - 1) + ε), the unbiased variance
    of PPO in TRL and open-instruct (`masked_whiten`)."""
    counted = [one for batch in batches for one in batch if one.weight]
    all_N = [one.advantages_N.double() for one in counted if one.advantages_N is not None]
    zero = torch.zeros((), dtype=torch.float64, device=learner.trainer.device)
    local_count = torch.full_like(zero, sum(len(advantages_N) for advantages_N in all_N))
    local_sum = sum((advantages_N.sum() for advantages_N in all_N), zero)
    total, count = learner.trainer.summed(torch.stack([local_sum, local_count]))
    mean = total / count
    local_squares = sum((((advantages_N - mean) ** 2).sum() for advantages_N in all_N), zero)
    variance = learner.trainer.summed(local_squares[None])[0] / (count - 1).clamp(min=1)
    scale = 1 / (variance + WHITENING_EPSILON).sqrt()

    def whitened(micro_batch: RolloutMicroBatch) -> RolloutMicroBatch:
        assert micro_batch.advantages_N is not None
        return replace(micro_batch, advantages_N=(micro_batch.advantages_N - mean) * scale)

    return [[whitened(one) for one in batch] for batch in batches]


def entropy_coefficient(algorithm: Algorithm, state: AlgorithmState) -> float:
    """α of the entropy bonus in this step."""
    if algorithm.entropy is None:
        return 0.0
    return state["entropy"][1] if "entropy" in state else algorithm.entropy.coefficient


def adapt_entropy(algorithm: Algorithm, state: AlgorithmState, metrics: dict[str, float]) -> AlgorithmState:
    """The state after a step with these metrics."""
    if algorithm.entropy is None or algorithm.entropy.adaptive is None or "entropy" not in state:
        return state
    return {**state, "entropy": [*pg.adapted_entropy(state["entropy"][0], metrics["bonus_entropy"], algorithm.entropy.adaptive)]}


def weigh_by_entropy(learner: Learner, batch: list[RolloutMicroBatch], bonus: float) -> list[RolloutMicroBatch]:
    """The micro-batches of a mini-batch with the weights of their entropies; without advantages for all but the top tokens."""
    algorithm = learner.algorithm
    if algorithm.top_entropy is None:
        if algorithm.entropy is None:
            return batch
        even = [torch.full_like(one.sampler_logps_N, 1 / one.mini_batch_tokens) for one in batch]
        return [_with_entropy_weights(one, weights_N, bonus) for one, weights_N in zip(batch, even, strict=True)]
    own = [one.entropy_N for one in batch if one.weight and one.entropy_N is not None]
    all_N = learner.trainer.gathered(torch.cat([torch.empty(0, device=learner.trainer.device), *own]))
    threshold = pg.entropy_threshold(all_N, algorithm.top_entropy)
    number = (all_N >= threshold).sum()

    def weighed(one: RolloutMicroBatch) -> RolloutMicroBatch:
        assert one.entropy_N is not None
        kept_N = (one.entropy_N >= threshold).float()
        advantages_N = None if one.advantages_N is None else one.advantages_N * kept_N
        return _with_entropy_weights(replace(one, advantages_N=advantages_N), kept_N / number, bonus)

    return [weighed(one) for one in batch]


def _with_entropy_weights(micro_batch: RolloutMicroBatch, weights_N: Tensor, bonus: float) -> RolloutMicroBatch:
    return replace(micro_batch, entropy_weights_N=weights_N, bonus_N=bonus * weights_N if bonus else None)


def run_updates(
    learner: Learner, batches: list[list[RolloutMicroBatch]], step: int, policy_frozen: bool, coefficient: float | None
) -> tuple[dict[str, float], list[MiniBatchSums]]:
    """Run all optimizer updates of one batch of rollouts.

    Returns:
        (metrics of the updates; for each mini-batch the sums of the first epoch, which measure the old policy).
    """
    metrics: dict[str, float] = {}
    first_epoch: list[MiniBatchSums] = []
    every_epoch: list[MiniBatchSums] = []
    applied: list[tuple[Trainer, MiniBatchSums, str, Tensor | float]] = []
    models = [(trainer, prefix) for trainer, prefix in ((None if policy_frozen else learner.trainer, ""), (learner.critic, "value_"))]
    for epoch in range(learner.algorithm.updates // learner.algorithm.mini_batches):
        order = list(range(len(batches)))
        if epoch:
            random.Random(f"{learner.seed}/{step}/{epoch}").shuffle(order)
        for number in order:
            sums = _sum_over_ranks(learner, accumulate_gradients(learner, batches[number], coefficient, policy_frozen, epoch == 0))
            every_epoch.append(sums)
            if epoch == 0:
                first_epoch.append(sums)
                check_logprob_gap(sums, step, learner.max_gap)
            for trainer, prefix in models:
                if trainer is not None:
                    trainer.refuse_not_finite(step + 1, sums[f"{prefix}loss"])
                    stats = trainer.step()
                    metrics[f"{prefix}learning_rate"] = stats.learning_rate
                    applied.append((trainer, sums, prefix, stats.grad_norm))
    norms = learner.trainer.totals({}, {str(number): norm for number, (*_, norm) in enumerate(applied)})
    for (trainer, sums, prefix, _), norm in zip(applied, norms.values(), strict=True):
        sums[f"{prefix}grad_norm"] = norm
        trainer.refuse_not_finite(step + 1, sums[f"{prefix}loss"], norm)
    return metrics | update_metrics(every_epoch, policy_frozen), first_epoch


def accumulate_gradients(
    learner: Learner, batch: list[RolloutMicroBatch], coefficient: float | None, policy_frozen: bool, first_epoch: bool
) -> list[tuple[RolloutMicroBatch, TokenSums]]:
    """Forward and backward over the micro-batches of a mini-batch; returns each with the sums of its metrics."""
    done: list[tuple[RolloutMicroBatch, TokenSums]] = [(micro_batch, {}) for micro_batch in batch]
    if not policy_frozen:
        done = [accumulate_policy_gradient(learner, micro_batch, coefficient) for micro_batch in learner.router_loss.over(batch)]
    if learner.critic is not None:
        critic = learner.critic
        done = [(one, sums | accumulate_value_gradient(critic, learner.algorithm, one)) for one, sums in learner.steady(done)]
    if first_epoch:
        done = [(one, sums | rollout_sums(learner, one)) for one, sums in done]
    return done


def accumulate_policy_gradient(
    learner: Learner, micro_batch: RolloutMicroBatch, coefficient: float | None
) -> tuple[RolloutMicroBatch, TokenSums]:
    """Forward and backward of the policy: (micro-batch with its old log-probs, sums over its tokens and the largest ratio)."""
    algorithm, batch, kl = learner.algorithm, micro_batch.batch, learner.algorithm.kl
    entropy, bonus_N = micro_batch.old_logps_N is None, micro_batch.bonus_N
    wanted = {"entropy": entropy, "entropy_gradient": bonus_N is not None}
    logps_N, entropy_N = learner.trainer.module(batch, temperature=learner.temperature, **wanted)
    if micro_batch.old_logps_N is None:  # one update per batch of rollouts: the current policy is the old policy
        micro_batch = replace(micro_batch, old_logps_N=logps_N.detach(), entropy_N=entropy_N.detach())
    old_logps_N, advantages_N = micro_batch.old_logps_N, micro_batch.advantages_N
    assert old_logps_N is not None and advantages_N is not None
    log_ratios_N = logps_N - old_logps_N
    ratios_N = pg.ratios(log_ratios_N, batch.documents_N, batch.num_documents, algorithm.ratio)
    objective = pg.objective(algorithm, ratios_N, logps_N, old_logps_N, advantages_N)
    loss_N = objective.loss_N
    if algorithm.correction is not None:
        loss_N = loss_N * _correction_weights(algorithm.correction, micro_batch)[0]
    if kl is not None and kl.where == "loss":
        assert micro_batch.reference_logps_N is not None and coefficient is not None
        loss_N = loss_N + coefficient * pg.kl_loss(kl, logps_N, micro_batch.reference_logps_N, log_ratios_N.exp())
    loss = (micro_batch.token_weights_N * loss_N).sum()
    if bonus_N is not None:
        loss = loss - (bonus_N * entropy_N).sum()
    learner.router_loss.backward(loss, micro_batch)
    ratios_N = ratios_N.detach()
    sums = {"clip_low": objective.low_N.sum(), "clip_high": objective.high_N.sum(), "ratio_mean": ratios_N.sum()}
    return micro_batch, {"loss": loss.detach(), **sums, RATIO_MAX: ratios_N.max()}


def accumulate_value_gradient(critic: Trainer, algorithm: Algorithm, micro_batch: RolloutMicroBatch) -> TokenSums:
    """Forward and backward of the value model; its loss is the mean over all tokens of the mini-batch."""
    assert isinstance(algorithm, Ppo) and micro_batch.values_N is not None and micro_batch.returns_N is not None
    values_N = critic.module(micro_batch.batch)
    loss_N, clipped_N = pg.value_loss(values_N, micro_batch.values_N, micro_batch.returns_N, algorithm.critic.clip)
    loss = loss_N.sum() / micro_batch.mini_batch_tokens
    critic.backward(loss * micro_batch.weight)
    return {"value_loss": loss.detach(), "value_clip": clipped_N.sum()}


def rollout_sums(learner: Learner, micro_batch: RolloutMicroBatch) -> TokenSums:
    """Sums over the tokens of the rollouts' metrics under the old policy, before any update."""
    old_logps_N, returns_N = micro_batch.old_logps_N, micro_batch.returns_N
    assert old_logps_N is not None and micro_batch.entropy_N is not None
    gaps_N = (old_logps_N - micro_batch.sampler_logps_N).abs()
    sums = {"entropy": micro_batch.entropy_N.sum(), "gap": gaps_N.sum(), "gap_squares": (gaps_N.double() ** 2).sum()}
    if micro_batch.entropy_weights_N is not None:
        sums["bonus_entropy"] = (micro_batch.entropy_weights_N * micro_batch.entropy_N).sum()
    if micro_batch.reference_logps_N is not None:
        sums |= {name: pg.kl(name, old_logps_N, micro_batch.reference_logps_N).sum() for name in KL_ESTIMATORS}
    taught_N = teacher_rewards(learner.algorithm, micro_batch)
    if taught_N is not None:
        sums["teacher_reward"] = taught_N.sum()
    if micro_batch.advantages_N is not None:
        sums["advantage"] = micro_batch.advantages_N.abs().sum()
        if learner.algorithm.correction is not None:
            weights_N, bounded_N = _correction_weights(learner.algorithm.correction, micro_batch)
            sums |= {"correction": weights_N.sum(), "correction_cut": bounded_N.sum()}
    if returns_N is not None and micro_batch.values_N is not None:
        for name, values_N in (("return", returns_N.double()), ("error", returns_N.double() - micro_batch.values_N)):
            sums |= {name: values_N.sum(), f"{name}_squares": (values_N**2).sum()}
    return sums


def _correction_weights(settings: Correction, micro_batch: RolloutMicroBatch) -> tuple[Tensor, Tensor]:
    batch, old_logps_N = micro_batch.batch, micro_batch.old_logps_N
    assert old_logps_N is not None
    return pg.correction_weights(settings, old_logps_N, micro_batch.sampler_logps_N, batch.documents_N, batch.num_documents)


def _sum_over_ranks(learner: Learner, done: list[tuple[RolloutMicroBatch, TokenSums]]) -> MiniBatchSums:
    """Sums over the micro-batches of all ranks, and their number of tokens; one exchange, one wait for the device."""
    metric_sums, largest = MetricSums(), []
    for micro_batch, sums in done:
        if RATIO_MAX in sums:
            largest.append(sums[RATIO_MAX] * micro_batch.weight)
        metric_sums.add({name: value for name, value in sums.items() if name != RATIO_MAX}, micro_batch.weight)
    tokens = sum(len(micro_batch.sampler_logps_N) * micro_batch.weight for micro_batch, _ in done)
    maxima = ({RATIO_MAX: torch.stack(largest).amax()} if largest else {}) | learner.router_loss.metrics()
    return learner.trainer.totals({**metric_sums.sums(), "tokens": tokens}, maxima)


def rollout_metrics(mini_batch_sums: list[MiniBatchSums]) -> dict[str, float]:
    """Means per token of the metrics of `rollout_sums`, over all mini-batches."""
    total = {name: sum(sums[name] for sums in mini_batch_sums) for name in mini_batch_sums[0]}
    tokens = total["tokens"]
    metric_names = {"entropy": "entropy", "gap": "logprob_gap", "advantage": "advantage_size", "teacher_reward": "teacher_reward"}
    metric_names |= {"correction": "correction_mean", "correction_cut": "correction_cut"}
    metric_names |= {name: f"kl_{name}" for name in KL_ESTIMATORS}
    metrics = {metric: total[name] / tokens for name, metric in metric_names.items() if name in total}
    if "bonus_entropy" in total:
        metrics["bonus_entropy"] = total["bonus_entropy"] / len(mini_batch_sums)
    if "return" in total:
        return_variance, error_variance = (total[f"{name}_squares"] / tokens - (total[name] / tokens) ** 2 for name in ("return", "error"))
        metrics["explained_variance"] = 1 - error_variance / return_variance if return_variance > 0 else 0.0
    return metrics


def update_metrics(updates: list[MiniBatchSums], policy_frozen: bool) -> dict[str, float]:
    """Means over all updates of one batch of rollouts."""
    tokens = sum(sums["tokens"] for sums in updates)
    per_token = [name for name in ("clip_low", "clip_high", "ratio_mean", "value_clip") if name in updates[0]]
    per_update = [name for name in ("loss", "grad_norm", "value_loss", "value_grad_norm", *ROUTER_METRICS) if name in updates[0]]
    metrics = {name: sum(sums[name] for sums in updates) / tokens for name in per_token}
    metrics |= {name: sum(sums[name] for sums in updates) / len(updates) for name in per_update}
    return metrics if policy_frozen else metrics | {RATIO_MAX: max(sums[RATIO_MAX] for sums in updates)}


def check_logprob_gap(sums: MiniBatchSums, step: int, bound: float) -> None:
    """Check that the sampler used the trainer's weights: the mean gap exceeds the bound by at most `ERRORS` standard errors.

    Rounding to bf16 moves a few tokens by far more than the mean, and a mini-batch may have less than a hundred tokens.

    Raises:
        StageError: it did not.
    """
    gap = sums["gap"] / sums["tokens"]
    error = math.sqrt(max(sums["gap_squares"] / sums["tokens"] - gap**2, 0.0) / sums["tokens"])
    if not gap - ERRORS * error <= bound:
        raise StageError(
            f"in step {step + 1} the log-probs of sampler and trainer differ by {gap:.4g} per token on average (bound "
            f"max_logprob_gap {bound}): the sampler has the wrong weights, or the dtype requires a higher bound"
        )
