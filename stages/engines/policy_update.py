"""One batch of rollouts → optimizer updates of the policy (and of PPO's value model), on all ranks, without a sampler.

    rewards → what each answer is credited with → groups without signal left out → mini-batches of groups → forward passes
    → [no gradient: old log-probs, reference, values] → advantages of tokens → for each inner epoch and mini-batch: one update

With one update per batch of rollouts ρ is 1 by construction and old log-probs are the update's own. With several they are computed
first, by the very passes that are trained on: each mini-batch is cut into passes once, and inner epochs change the order of
mini-batches alone, so that rounding cancels and the first update sees ρ = 1 too.

All ranks are given all answers: counts, and so denominators, need no communication. What a pass finds stays on the device: it is
looked at once per mini-batch, before the policy may move, and once at the end, for the norms of the gradients.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.execution import Numerics
from configs.policy_gradient import Algorithm, Correction, Kl, Ppo, ReinforcePp
from stages.core import advantages as credits
from stages.core import policy_gradient as pg
from stages.core.batches import Document, MicroBatch, Unit, document, share_prompts
from stages.core.logprobs import PolicyModule
from stages.engines.feed import Prepared, Round
from stages.engines.trainer import Tally, Trainer
from stages.job import StageError

WHITENING_EPSILON = 1e-8
"""Added to the variance that divides whitened advantages."""
ESTIMATORS = ("k1", "k2", "k3")
LARGEST = "ratio_max"
"""What is no sum over tokens."""


@dataclass(frozen=True)
class Answer:
    """One rollout, as an update needs it."""

    prompt: str
    """Id of its prompt."""
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each of `ids`, as the sampler has them."""
    reward: float
    """NaN where it is missing."""


@dataclass(frozen=True)
class Learner:
    """What stays the same from step to step."""

    algorithm: Algorithm
    trainer: Trainer
    numerics: Numerics
    pad_id: int
    temperature: float
    """At which answers were drawn: logits are divided by it."""
    max_tokens: int
    """Most tokens that an answer may have."""
    seed: int = 0
    reference: PolicyModule | None = None
    """What the KL is measured to."""
    critic: Trainer | None = None
    """PPO's value model."""
    max_gap: float = math.inf
    """Largest mean |log-prob(sampler) - log-prob(trainer)| of a token that is trained on."""


@dataclass(frozen=True)
class Pass:
    """One forward pass of this rank, and what is known of its tokens. D answers, N tokens."""

    batch: MicroBatch
    weight: float
    """0 for a pass that only keeps ranks in step."""
    tokens: int
    """Of the whole mini-batch, over all ranks."""
    longest: int
    """Tokens of the longest answer."""
    answers_D: Tensor
    """Which answer each document is."""
    weights_N: Tensor
    """What each token counts in the loss."""
    sampled_N: Tensor
    old_N: Tensor | None = None
    entropy_N: Tensor | None = None
    reference_N: Tensor | None = None
    values_N: Tensor | None = None
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None


@dataclass(frozen=True)
class Updated:
    """What an update leaves."""

    numbers: dict[str, float]
    """For the curve, equal on all ranks."""
    memory: dict[str, Any]
    """For the next update and the checkpoint."""
    updates: int
    """Optimizer updates of the policy."""


Sums = dict[str, Tensor]
"""Name → sum over the tokens of one pass."""
Row = dict[str, float]
"""Name → sum over the tokens of one mini-batch, on all ranks."""


def fresh_memory(algorithm: Algorithm) -> dict[str, Any]:
    """What an algorithm remembers before its first update; JSON."""
    return {"coefficient": algorithm.kl.coefficient if algorithm.kl else None, "prompts": {}}


def update(
    learner: Learner,
    answers: Sequence[Answer],
    group: int,
    step: int,
    memory: dict[str, Any],
    greedy: Sequence[float] | None = None,
) -> Updated:
    """Trains on one batch of rollouts; called on all ranks with the same arguments.

    Args:
        learner: what is trained, and how.
        answers: the answers to the first prompt, then those to the second, and so on.
        group: answers per prompt.
        step: 0-based; with the seed it decides the shuffle.
        memory: `fresh_memory`, or that of the update before.
        greedy: ReMax: the reward of each prompt's greedy answer.

    Raises:
        StageError: sampler and trainer disagree on log-probs by more than `max_gap`.
        NotFinite: a loss or gradient is no number.
    """
    algorithm, kl = learner.algorithm, learner.algorithm.kl
    frozen = isinstance(algorithm, Ppo) and step < algorithm.critic.warmup_steps
    rewards_PG = torch.tensor([answer.reward for answer in answers], dtype=torch.float32).view(-1, group)
    if greedy is not None:  # a prompt without a baseline has no advantages
        rewards_PG = rewards_PG.masked_fill(torch.tensor(greedy)[:, None].isnan(), math.nan)
    groups, remembered = with_signal(algorithm, answers, rewards_PG, memory, greedy)
    kept = {"kept_groups": float(len(groups)), "kept_answers": float(sum(len(members) for members in groups))}
    if not groups:
        everything = [list(range(start, start + group)) for start in range(0, len(answers), group)]
        (passes,) = cut(learner, answers, [everything], old=True)
        return Updated(
            {"updates": 0.0} | kept | seen_numbers([_reduced(learner, [(made, sight(learner, made)) for made in passes])]), remembered, 0
        )
    first = algorithm.updates > 1 or _in_reward(algorithm) is not None or frozen
    batches = cut(learner, answers, mini_batches(groups, algorithm.mini_batches, f"{learner.seed}/{step}"), old=first)
    batches, remembered = credited(learner, answers, batches, rewards_PG, memory, remembered, greedy)
    numbers, seen = train(learner, batches, step, frozen, memory["coefficient"])
    numbers |= kept | seen_numbers(seen)
    if kl is not None:
        numbers["kl_coefficient"] = memory["coefficient"]
        if kl.adaptive is not None:
            whole = sum(row["k1"] for row in seen) / kept["kept_answers"]
            remembered = remembered | {"coefficient": pg.adapted(memory["coefficient"], whole, int(kept["kept_answers"]), kl.adaptive)}
    updates = 0 if frozen else len(batches) * algorithm.updates // algorithm.mini_batches
    return Updated(numbers | {"updates": float(updates)}, remembered, updates)


def with_signal(
    algorithm: Algorithm, answers: Sequence[Answer], rewards_PG: Tensor, memory: dict[str, Any], greedy: Sequence[float] | None
) -> tuple[list[list[int]], dict[str, Any]]:
    """(the answers to be trained on, by prompt; what is remembered); see `configs.policy_gradient` for the rule."""
    present_PG = ~rewards_PG.isnan()
    if algorithm.per_token or _in_reward(algorithm) is not None:
        kept_PG = present_PG & (present_PG.sum(1, keepdim=True) > (1 if algorithm.compares else 0))
        remembered = dict(memory)
    else:
        advantages_PG, remembered = credit(algorithm, answers, rewards_PG, memory, greedy)
        kept_PG = present_PG & (advantages_PG != 0).any(1, keepdim=True)
    group = rewards_PG.shape[1]
    found = [[p * group + g for g in range(group) if kept_PG[p, g]] for p in range(len(kept_PG))]
    return [members for members in found if members], remembered


def credit(
    algorithm: Algorithm, answers: Sequence[Answer], rewards_PG: Tensor, memory: dict[str, Any], greedy: Sequence[float] | None
) -> tuple[Tensor, dict[str, Any]]:
    """(advantages of answers, what is remembered)."""
    match algorithm.advantage:
        case "normalised":
            return credits.normalised(rewards_PG), dict(memory)
        case "centred":
            return credits.centred(rewards_PG), dict(memory)
        case "leave_one_out":
            return credits.leave_one_out(rewards_PG), dict(memory)
        case "greedy":
            if greedy is None:
                raise StageError(f"{algorithm.type} needs the rewards of greedy answers: give `greedy`")
            return credits.over_greedy(rewards_PG, torch.tensor(greedy)), dict(memory)
        case "smoothed":
            prompts = [answers[p * rewards_PG.shape[1]].prompt for p in range(len(rewards_PG))]
            before = [credits.Visits(*memory["prompts"].get(prompt, ())) for prompt in prompts]
            advantages_PG, after = credits.smoothed(rewards_PG, before)
            visited = {prompt: list(visits) for prompt, visits in zip(prompts, after, strict=True)}
            return advantages_PG, {**memory, "prompts": memory["prompts"] | visited}
    raise StageError(f"{algorithm.type} credits single tokens, not answers")


def mini_batches(groups: list[list[int]], count: int, seed: str) -> list[list[list[int]]]:
    """Groups shuffled into `count` parts of nearly equal size; fewer where there are fewer groups."""
    if count > 1:
        groups = random.Random(seed).sample(groups, len(groups))
    edges = [len(groups) * i // count for i in range(count + 1)]
    return [groups[start:end] for start, end in pairwise(edges) if end > start]


def cut(learner: Learner, answers: Sequence[Answer], batches: list[list[list[int]]], old: bool) -> list[list[Pass]]:
    """This rank's forward passes of each mini-batch, with all that is to be known before the first update (`look`).

    Args:
        learner: what is trained.
        answers: all of them.
        batches: the answers to each prompt of each mini-batch.
        old: whether old log-probs are to be known.
    """
    planned = [plan(learner, answers, groups) for groups in batches]
    with learner.trainer.feed((one for one, _ in planned), learner.pad_id) as feed:
        return [[look(learner, known(made), old) for made in feed.passes()] for _, known in planned]


def plan(learner: Learner, answers: Sequence[Answer], groups: list[list[int]]) -> tuple[Round, Callable[[Prepared], Pass]]:
    """(what to prepare for one mini-batch, given as the answers to each of its prompts; what is known of a prepared pass)."""
    order = [i for members in groups for i in members]
    lengths = [len(answers[i].ids) for i in order]
    documents = [document(answers[i].prompt_ids, answers[i].ids) for i in order]
    units = together(documents, [len(members) for members in groups], learner.trainer.world_size, learner.numerics)
    starts = [0, *accumulate(len(unit) for unit in units)]
    weights_D = pg.token_weights(learner.algorithm.aggregation, torch.tensor(lengths), len(groups), learner.max_tokens).numpy()

    def inside(places: Sequence[int]) -> list[int]:
        return [place for unit in places for place in range(starts[unit], starts[unit + 1])]

    def beside(places: Sequence[int]) -> dict[str, Tensor]:
        mine = inside(places)
        return {
            "answers_D": torch.tensor([order[place] for place in mine]),
            "weights_N": torch.from_numpy(np.repeat(weights_D[mine], [lengths[place] for place in mine])),
            "sampled_N": torch.tensor([logp for place in mine for logp in answers[order[place]].logprobs]),
        }

    def known(made: Prepared) -> Pass:
        longest = max(lengths[place] for place in inside(made.units))
        return Pass(made.batch, made.weight, sum(lengths), longest, **made.beside)

    return Round(units, beside), known


def together(documents: Sequence[Document], sizes: Sequence[int], ranks: int, numerics: Numerics) -> list[Unit]:
    """Answers to one prompt as units that share a pass over it: as many as fit, and as leave work for every rank.

    Args:
        documents: all answers to the first prompt, then to the second, and so on.
        sizes: answers to each prompt.
        ranks: among which units are dealt.
        numerics: whether prompts are shared, and what a pass holds.
    """
    most = max(1, len(documents) // ranks)
    units: list[Unit] = []
    for start, end in pairwise([0, *accumulate(sizes)]):
        for first in range(start, end, most):
            units += share_prompts(documents[first : min(end, first + most)], numerics)
    return units


@torch.no_grad()
def look(learner: Learner, made: Pass, old: bool) -> Pass:
    """What is to be known before the first update: old log-probs where asked, the reference's, values."""
    found: dict[str, Tensor] = {}
    if old:
        found["old_N"], found["entropy_N"] = learner.trainer.module(made.batch, temperature=learner.temperature, entropy=True)
    if learner.reference is not None:
        found["reference_N"], _ = learner.reference(made.batch, temperature=learner.temperature)
    if learner.critic is not None:
        found["values_N"] = learner.critic.module(made.batch)
    return replace(made, **found)


def credited(
    learner: Learner,
    answers: Sequence[Answer],
    batches: list[list[Pass]],
    rewards_PG: Tensor,
    memory: dict[str, Any],
    remembered: dict[str, Any],
    greedy: Sequence[float] | None,
) -> tuple[list[list[Pass]], dict[str, Any]]:
    """Every pass with the advantages of its tokens, and what is remembered."""
    algorithm, device = learner.algorithm, learner.trainer.device
    kl = _in_reward(algorithm)
    if algorithm.per_token:
        rewards_A = rewards_PG.flatten().to(device)
        batches = [[_token_credit(learner, made, rewards_A, memory["coefficient"]) for made in batch] for batch in batches]
    else:
        if kl is not None:
            penalties_D = _penalties(learner, batches, kl, len(answers)).view_as(rewards_PG)
            rewards_PG = rewards_PG - memory["coefficient"] * penalties_D
        advantages_PG, after = credit(algorithm, answers, rewards_PG, memory, greedy)
        remembered = after if kl is not None else remembered
        advantages_A = advantages_PG.flatten().to(device)
        batches = [[_answer_credit(made, advantages_A) for made in batch] for batch in batches]
    return (_whitened(learner, batches) if algorithm.whitened else batches), remembered


def _in_reward(algorithm: Algorithm) -> Kl | None:
    return algorithm.kl if algorithm.kl is not None and algorithm.kl.where == "reward" else None


def _penalties(learner: Learner, batches: list[list[Pass]], kl: Kl, num_answers: int) -> Tensor:
    """Σ_t k_t of every answer, from whatever rank has it."""
    sums_A = torch.zeros(num_answers, dtype=torch.float64, device=learner.trainer.device)
    for made in (made for batch in batches for made in batch if made.weight):
        assert made.old_N is not None and made.reference_N is not None
        found_D = made.batch.sum_by_document(pg.kl(kl.estimator, made.old_N, made.reference_N))
        sums_A = sums_A.index_add(0, made.answers_D, found_D.double())
    return learner.trainer.summed(sums_A).float().cpu()


def _answer_credit(made: Pass, advantages_A: Tensor) -> Pass:
    return replace(made, advantages_N=advantages_A[made.answers_D][made.batch.documents_N])


def _token_credit(learner: Learner, made: Pass, rewards_A: Tensor, coefficient: float | None) -> Pass:
    """Returns to go, or GAE and the returns that the value model is to learn."""
    algorithm, documents_N = learner.algorithm, made.batch.documents_N
    penalties_N = torch.zeros_like(made.weights_N)
    kl = _in_reward(algorithm)
    if kl is not None and coefficient is not None:
        assert made.old_N is not None and made.reference_N is not None
        penalties_N = coefficient * pg.kl(kl.estimator, made.old_N, made.reference_N)
    rewards_DT = credits.token_rewards(rewards_A[made.answers_D], penalties_N, documents_N, made.longest)
    if isinstance(algorithm, ReinforcePp):
        return replace(made, advantages_N=credits.flat(credits.returns_to_go(rewards_DT, algorithm.gamma), documents_N))
    assert isinstance(algorithm, Ppo) and made.values_N is not None
    values_DT = credits.rows(made.values_N, documents_N, made.batch.num_documents, made.longest)
    advantages_N = credits.flat(credits.gae(rewards_DT, values_DT, algorithm.gamma, algorithm.gae_lambda), documents_N)
    return replace(made, advantages_N=advantages_N, returns_N=advantages_N + made.values_N)


def _whitened(learner: Learner, batches: list[list[Pass]]) -> list[list[Pass]]:
    """Advantages with mean 0 and variance 1 over all tokens of all mini-batches and ranks."""
    all_N = [made.advantages_N.double() for batch in batches for made in batch if made.weight and made.advantages_N is not None]
    none = torch.zeros((), dtype=torch.float64, device=learner.trainer.device)
    counted = torch.full_like(none, sum(len(a_N) for a_N in all_N))
    total, count = learner.trainer.summed(torch.stack([sum((a_N.sum() for a_N in all_N), none), counted]))
    mean = total / count
    squares = learner.trainer.summed(sum((((a_N - mean) ** 2).sum() for a_N in all_N), none)[None])[0]
    scale = 1 / (squares / count + WHITENING_EPSILON).sqrt()

    def white(made: Pass) -> Pass:
        assert made.advantages_N is not None
        return replace(made, advantages_N=(made.advantages_N - mean) * scale)

    return [[white(made) for made in batch] for batch in batches]


def train(
    learner: Learner, batches: list[list[Pass]], step: int, frozen: bool, coefficient: float | None
) -> tuple[dict[str, float], list[Row]]:
    """All updates of one batch of rollouts; (numbers for the curve, what was seen of each mini-batch before its first)."""
    numbers: dict[str, float] = {}
    seen: list[Row] = []
    rows: list[Row] = []
    applied: list[tuple[Trainer, Row, str, Tensor | float]] = []
    for epoch in range(learner.algorithm.updates // learner.algorithm.mini_batches):
        order = list(range(len(batches)))
        if epoch:
            random.Random(f"{learner.seed}/{step}/{epoch}").shuffle(order)
        for number in order:
            done = [policy_pass(learner, made, coefficient) if not frozen else (made, {}) for made in batches[number]]
            if learner.critic is not None:
                done = [(made, sums | value_pass(learner.critic, learner.algorithm, made)) for made, sums in done]
            if epoch == 0:
                done = [(made, sums | sight(learner, made)) for made, sums in done]
            row = _reduced(learner, done)
            if epoch == 0:
                seen.append(row)
                check_gap(row["gap"] / row["tokens"], step, learner.max_gap)
            for engine, of in ((None if frozen else learner.trainer, ""), (learner.critic, "value_")):
                if engine is not None:
                    engine.refuse_not_finite(step + 1, row[f"{of}loss"])
                    stats = engine.step()
                    numbers[f"{of}learning_rate"] = stats.learning_rate
                    applied.append((engine, row, of, stats.grad_norm))
            rows.append(row)
    norms = learner.trainer.totals({}, {str(place): norm for place, (*_, norm) in enumerate(applied)})
    for (engine, row, of, _), norm in zip(applied, norms.values(), strict=True):
        row[f"{of}grad_norm"] = norm
        engine.refuse_not_finite(step + 1, row[f"{of}loss"], norm)
    return numbers | trained_numbers(rows, frozen), seen


def policy_pass(learner: Learner, made: Pass, coefficient: float | None) -> tuple[Pass, Sums]:
    """Adds one pass to the policy's gradient; (the pass with its old log-probs, sums over its tokens and the largest ratio)."""
    algorithm, batch, kl = learner.algorithm, made.batch, learner.algorithm.kl
    logps_N, entropy_N = learner.trainer.module(batch, temperature=learner.temperature, entropy=made.old_N is None)
    if made.old_N is None:  # one update per batch of rollouts: the policy that is updated is the one that answered
        made = replace(made, old_N=logps_N.detach(), entropy_N=entropy_N)
    assert made.old_N is not None and made.advantages_N is not None
    log_ratios_N = logps_N - made.old_N
    ratios_N = pg.ratios(log_ratios_N, batch.documents_N, batch.num_documents, algorithm.ratio)
    objective = pg.objective(algorithm, ratios_N, logps_N, made.old_N, made.advantages_N)
    loss_N = objective.loss_N
    if algorithm.correction is not None:
        loss_N = loss_N * _correction(algorithm.correction, made)[0]
    if kl is not None and kl.where == "loss":
        assert made.reference_N is not None and coefficient is not None
        loss_N = loss_N + coefficient * pg.kl_loss(kl, logps_N, made.reference_N, log_ratios_N.exp())
    loss = (made.weights_N * loss_N).sum()
    learner.trainer.backward(loss * made.weight)
    ratios_N = ratios_N.detach()
    sums = {"clip_low": objective.low_N.sum(), "clip_high": objective.high_N.sum(), "ratio_mean": ratios_N.sum()}
    return made, {"loss": loss.detach(), **sums, LARGEST: ratios_N.max()}


def value_pass(critic: Trainer, algorithm: Algorithm, made: Pass) -> Sums:
    """Adds one pass to the value model's gradient: the mean over all tokens of the mini-batch."""
    assert isinstance(algorithm, Ppo) and made.values_N is not None and made.returns_N is not None
    loss_N, cut_N = pg.value_loss(critic.module(made.batch), made.values_N, made.returns_N, algorithm.critic.clip)
    loss = loss_N.sum() / made.tokens
    critic.backward(loss * made.weight)
    return {"value_loss": loss.detach(), "value_clip": cut_N.sum()}


def sight(learner: Learner, made: Pass) -> Sums:
    """What the policy that answered looks like on these tokens, summed."""
    assert made.old_N is not None and made.entropy_N is not None
    found = {"entropy": made.entropy_N.sum(), "gap": (made.old_N - made.sampled_N).abs().sum()}
    if made.reference_N is not None:
        found |= {name: pg.kl(name, made.old_N, made.reference_N).sum() for name in ESTIMATORS}
    if made.advantages_N is not None:
        found["advantage"] = made.advantages_N.abs().sum()
        if learner.algorithm.correction is not None:
            weights_N, cut_N = _correction(learner.algorithm.correction, made)
            found |= {"correction": weights_N.sum(), "correction_cut": cut_N.sum()}
    if made.returns_N is not None and made.values_N is not None:
        for name, values_N in (("return", made.returns_N.double()), ("error", made.returns_N.double() - made.values_N)):
            found |= {name: values_N.sum(), f"{name}_squares": (values_N**2).sum()}
    return found


def _correction(settings: Correction, made: Pass) -> tuple[Tensor, Tensor]:
    assert made.old_N is not None
    return pg.correction_weights(settings, made.old_N, made.sampled_N, made.batch.documents_N, made.batch.num_documents)


def _reduced(learner: Learner, done: list[tuple[Pass, Sums]]) -> Row:
    """Sums over the passes of all ranks, and their tokens; one exchange, one wait for the device."""
    tally, largest = Tally(), []
    for made, sums in done:
        if LARGEST in sums:
            largest.append(sums[LARGEST] * made.weight)
        tally.add({name: value for name, value in sums.items() if name != LARGEST}, made.weight)
    tokens = sum(len(made.sampled_N) * made.weight for made, _ in done)
    peaks = {LARGEST: torch.stack(largest).amax()} if largest else {}
    return learner.trainer.totals({**tally.sums(), "tokens": tokens}, peaks)


def seen_numbers(seen: list[Row]) -> dict[str, float]:
    """Means per token of the policy that answered."""
    total = {name: sum(row[name] for row in seen) for name in seen[0]}
    tokens = total["tokens"]
    names = {"entropy": "entropy", "gap": "logprob_gap", "advantage": "advantage_size"}
    names |= {"correction": "correction_mean", "correction_cut": "correction_cut"} | {name: f"kl_{name}" for name in ESTIMATORS}
    numbers = {shown: total[name] / tokens for name, shown in names.items() if name in total}
    if "return" in total:
        spread, left = (total[f"{name}_squares"] / tokens - (total[name] / tokens) ** 2 for name in ("return", "error"))
        numbers["explained_variance"] = 1 - left / spread if spread > 0 else 0.0
    return numbers


def trained_numbers(rows: list[Row], frozen: bool) -> dict[str, float]:
    """Means over all updates of one batch of rollouts."""
    tokens = sum(row["tokens"] for row in rows)
    per_token = [name for name in ("clip_low", "clip_high", "ratio_mean", "value_clip") if name in rows[0]]
    per_update = [name for name in ("loss", "grad_norm", "value_loss", "value_grad_norm") if name in rows[0]]
    numbers = {name: sum(row[name] for row in rows) / tokens for name in per_token}
    numbers |= {name: sum(row[name] for row in rows) / len(rows) for name in per_update}
    return numbers if frozen else numbers | {LARGEST: max(row[LARGEST] for row in rows)}


def check_gap(gap: float, step: int, bound: float) -> None:
    """The sampler answers from the trainer's weights.

    Raises:
        StageError: it does not.
    """
    if not gap <= bound:
        raise StageError(
            f"in step {step + 1} sampler and trainer differ by {gap:.4g} in the log-prob of a token, on average (bound "
            f"max_logprob_gap {bound}): the sampler has the wrong weights, or the dtype needs a higher bound"
        )
