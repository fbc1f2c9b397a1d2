"""Preference optimization: policy + preferences (+ reference) → policy, by any loss of `configs/methods/preference.py`.

The reference is fixed: the `reference` input, or the initial policy. Computed during training, it runs on the same micro-batches as
the policy, so that rounding cancels in the first step; as cached log-probabilities (`reference_logprobs`) it takes no memory.
Not implemented: updating the reference within a stage (use rounds to update it between stages).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pedigree.configs.methods.preference import Kto, PreferenceLoss, SppoSoft
from pedigree.configs.methods.training import PreferenceTrain
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Documents, Pairs, SingleAnswers
from pedigree.data.records.sequences import Mapped
from pedigree.stages.core.batches import Unit, step_rows, total_steps, unit_tokens
from pedigree.stages.core.preference_losses import Answers, Sums, kto, means, mismatched, pair_loss
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.training.checkpoints import Checkpoints
from pedigree.stages.training.feed import Feed, GlobalBatch, PreparedMicroBatch
from pedigree.stages.training.held_out import HeldOut
from pedigree.stages.training.models import load_policy, same_weights
from pedigree.stages.training.probe import probe
from pedigree.stages.training.reference import Cached, Reference, fixed_policy, online, refuse_unlike_tokens
from pedigree.stages.training.router_loss import RouterLoss, routers_of
from pedigree.stages.training.token_cache import units_of
from pedigree.stages.training.trainer import MetricSums, StepStats, Trainer
from pedigree.stages.training.training_rows import Row, fitting, gather, hashed, pairs, report_rows, single_answers, split

FIRST_LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 0.05}
"""Maximum |L_0 - L(policy = reference)| / max(1, L) if policy and reference are the same model; a larger difference means that their
log-probs are computed differently."""


@dataclass(frozen=True)
class PreferenceExample:
    """One term of the loss: (chosen, rejected), or a single answer for KTO."""

    unit: Unit
    label: float
    """P(chosen is better) of a pair; 1 or 0 for a good or bad single answer."""
    win_rates: tuple[float, float] | None = None
    """Win rates of chosen and rejected, for losses that use them."""


@dataclass(frozen=True)
class PreferenceObjective:
    """A loss with its policy and reference."""

    loss: PreferenceLoss
    policy: Callable[..., tuple[Tensor, Tensor]]
    reference: Reference | None
    max_length: int
    device: torch.device

    def answers(self, micro_batch: PreparedMicroBatch, entropy: bool = False) -> Answers:
        """One forward pass (two with a frozen reference); D answers in the order of the units."""
        reference_D = self.reference(micro_batch) if self.reference else None
        logps_N, entropies_N = self.policy(micro_batch.batch, entropy=entropy)
        logps_D, lengths_D, entropies_D = map(micro_batch.batch.sum_by_document, (logps_N, torch.ones_like(logps_N), entropies_N))
        return Answers(logps_D, reference_D, lengths_D, entropies_D if entropy else None)

    def measure(self, answers: Answers, micro_batch: PreparedMicroBatch, z0: Tensor | float) -> tuple[Tensor, Sums]:
        """Σ of the loss and of its metrics over the micro-batch."""
        if isinstance(self.loss, Kto):
            return kto(self.loss, answers, micro_batch.extras["labels"] > 0.5, z0)
        strength_P, win_rates_P2 = (micro_batch.extras.get(name) for name in ("strengths", "win_rates"))
        return pair_loss(self.loss, answers.select(slice(0, None, 2)), answers.select(slice(1, None, 2)), strength_P, win_rates_P2)

    def held_out(self, micro_batch: PreparedMicroBatch) -> Sums:
        """Σ of the loss and of its metrics over held-out pairs."""
        loss, sums = self.measure(self.answers(micro_batch, entropy=True), micro_batch, 0.0)
        return {"loss": loss, **sums}

    @torch.no_grad()
    def sum_of_ratios(self, micro_batches: Iterable[PreparedMicroBatch]) -> Tensor:
        """Σ of the log-ratios of this rank's mismatched answers, for KTO's z₀."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro_batch in micro_batches:
            total = total + self.answers(micro_batch).ratios.double().sum() * micro_batch.weight
        return total

    def global_batches(self, batch: Sequence[PreferenceExample]) -> list[GlobalBatch]:
        """The forward passes of a step: for KTO the mismatched answers, then the training examples."""
        return [*([self.mismatched(batch)] if isinstance(self.loss, Kto) else []), self.trained(batch)]

    def mismatched(self, batch: Sequence[PreferenceExample]) -> GlobalBatch:
        documents = [doc for example in batch for doc in example.unit]
        return GlobalBatch([(doc,) for doc in mismatched(documents, self.max_length)])

    def trained(self, batch: Sequence[PreferenceExample]) -> GlobalBatch:
        def extras(units: Sequence[int]) -> dict[str, Tensor]:
            documents = [doc for unit in units for doc in batch[unit].unit]
            labels = [batch[unit].label for unit in units]
            tensors = self.reference.tensors(documents) if isinstance(self.reference, Cached) else {}
            if isinstance(self.loss, Kto):
                tensors["labels"] = torch.tensor(labels)
            elif isinstance(self.loss, SppoSoft):
                tensors["win_rates"] = torch.tensor([batch[unit].win_rates for unit in units])
            elif any(label != 1 for label in labels):
                tensors["strengths"] = torch.tensor(labels)
            return tensors

        return GlobalBatch([example.unit for example in batch], extras)


def run(config: PreferenceTrain, inputs: Inputs, job: Job) -> dict[str, Any]:
    policy, numerics = only(inputs, "policy"), job.numerics
    given = None if config.loss.reference_free else only_or_none(inputs, "reference") or policy
    routers = routers_of(policy.payload, config.router_aux_loss_coef)
    chat = Chat(policy.payload)
    with job.busy("reading rows"):
        rows = comparisons(config, gather(inputs["preferences"].values()))
    every = units_of(rows, documents_of(config), chat, job, policy, inputs["preferences"].values())
    kept, units = fitting(rows, every, config.max_length, job, config.too_long, labelled=isinstance(config.loss, Kto))
    labels = [(row["label"], row.get("win_rates")) for row in kept]
    examples, held = (
        Mapped(side, lambda place: PreferenceExample(units[place], *labels[place])) for side in split(kept, config.holdout, config.seed)
    )
    report_rows(rows, len(examples), len(held), every, config, job, "answers" if isinstance(config.loss, Kto) else "pairs")
    cached = None
    if given and given.type == "logprobs":
        with job.busy("reading the reference"):
            cached = Cached(given)
            cached.refuse_missing(kept, units, config.max_length)
    elif given and given is not policy:
        refuse_unlike_tokens("reference", given, policy)
    total = total_steps(len(examples), config.global_batch, config.epochs, config.max_steps)
    of_kto = {"steps_without_kl": steps_without_kl(config, examples, total)} if isinstance(config.loss, Kto) else {}
    with job.busy("loading the model"):
        module = load_policy(policy, numerics, config.lora, config.seed, config.head)
    trainer = Trainer(module, optimizer=config.optimizer, total_steps=total, dtype=config.dtype, numerics=numerics, seed=config.seed)
    probe(trainer.module, numerics, trainer.device)
    reference = cached
    if given and not cached:
        with job.busy("loading the reference"):
            reference = online(fixed_policy(given, policy, trainer, numerics))
    objective = PreferenceObjective(config.loss, trainer.module, reference, config.max_length, trainer.device)
    router_loss = RouterLoss(trainer, routers, job.steady)
    held_out, measured = HeldOut(objective.trained(held), config, total), {}
    checkpoints = Checkpoints(job, trainer)
    state = checkpoints.resume() or {"step": 0, "first_loss": None, "trained_tokens": 0, "last": None}

    def batch_of(step: int) -> list[PreferenceExample]:
        return [examples[i] for i in step_rows(step, len(examples), config.global_batch, config.shuffled_by)]

    batches = (one for step in range(state["step"], total) for one in objective.global_batches(batch_of(step)))
    with trainer.feed(batches, chat.pad_id) as feed:
        for step in range(state["step"], total):
            started = time.monotonic()
            batch = batch_of(step)
            check = step == 0 and given is not None and is_reference(given, policy)
            numbers, stats = train_step(trainer, objective, router_loss, feed, batch, check, job)
            grad_norm = numbers.pop("grad_norm")

            trainer.refuse_not_finite(step + 1, numbers["loss"], grad_norm)
            if check:
                check_first_loss(numbers["loss"], numbers.pop("loss_at_reference"), config)
            speed = sum(len(doc) for example in batch for doc in example.unit) / (time.monotonic() - started)
            tokens = sum(unit_tokens(example.unit, numerics) for example in batch)
            rate = stats.learning_rate
            sums_of_held = held_out.measure(step + 1, trainer, chat.pad_id, job, objective.held_out)
            measured = {f"held_out_{name}": value for name, value in means(sums_of_held, len(held), {}).items()}
            others = {"grad_norm": grad_norm, "learning_rate": rate, "tokens": tokens, "tokens_per_second": speed}
            job.log(step + 1, **numbers, **others, **trainer.paces.slowest(), **measured)
            job.progress(step + 1, total, loss=numbers["loss"], accuracy=numbers["accuracy"], tokens_per_second=speed)
            first_loss = numbers["loss"] if state["first_loss"] is None else state["first_loss"]
            trained = state["trained_tokens"] + sum(doc.num_trained for example in batch for doc in example.unit)
            state = {"step": step + 1, "first_loss": first_loss, "trained_tokens": trained, "last": numbers}
            if step + 1 < total:
                checkpoints.after_step(step + 1, state)

    with job.busy("writing the model"):
        trainer.export(job.out / "payload", chat)
    trainer.close()
    counted = "answers" if isinstance(config.loss, Kto) else "pairs"
    counts = {counted: len(examples), **({"held_out_pairs": len(held)} if config.holdout else {}), "steps": total}
    counts |= {"trained_tokens": state["trained_tokens"], **of_kto}
    return {**counts, "first_loss": state["first_loss"], **state["last"], **measured}


def steps_without_kl(config: PreferenceTrain, examples: Sequence[PreferenceExample], total: int) -> int:
    """Number of steps whose answers all have the same prompt, so that KTO has nothing to estimate z₀ on and takes 0.

    Raises:
        StageError: all steps are such.
    """
    prompts = [hashed(doc.ids[: doc.prompt_length]) for example in examples for doc in example.unit]
    steps = (step_rows(step, len(prompts), config.global_batch, config.shuffled_by) for step in range(total))
    found = sum(len({prompts[i] for i in rows}) == 1 for rows in steps)
    if found == total:
        raise StageError(
            f"each of {total} steps has answers to 1 prompt only, but kto estimates its KL on answers to other prompts of the same step: "
            f"raise global_batch ({config.global_batch}), shuffle the rows (order: {config.order}), or add prompts ({len(set(prompts))})"
        )
    return found


def train_step(
    trainer: Trainer,
    objective: PreferenceObjective,
    router_loss: RouterLoss,
    feed: Feed,
    batch: Sequence[PreferenceExample],
    check: bool,
    job: Job,
) -> tuple[dict[str, float], StepStats]:
    """One optimizer step; returns means over the global batch, with `loss_at_reference` if `check`."""
    z0: Tensor | float = 0.0
    extra, sides = {}, {}
    if isinstance(objective.loss, Kto):
        units = objective.mismatched(batch).units
        z0 = reference_point(objective.sum_of_ratios(job.steady(feed.micro_batches())), len(units), trainer.summed)
        good = sum(example.label == 1 for example in batch)
        extra, sides = {"desirable": good / len(batch)}, {"chosen": good, "rejected": len(batch) - good}
    passes = router_loss.over(feed.micro_batches())
    metric_sums = add_gradient(objective, passes, len(batch), z0, router_loss.backward, check)
    stats = trainer.step()
    equal = {"grad_norm": stats.grad_norm, **router_loss.metrics()} | ({"kl": z0} if isinstance(objective.loss, Kto) else {})
    found = trainer.totals(metric_sums.sums(), equal)
    same = {name: found.pop(name) for name in equal}
    return means(found, len(batch), sides) | extra | same, stats


def reference_point(own: Tensor, count: int, summed: Callable[[Tensor], Tensor]) -> Tensor | float:
    """KTO's z₀: the mean log-ratio of `count` mismatched answers of the whole global batch, at least 0.

    Args:
        own: their sum on this rank.
        count: their number on all ranks.
        summed: sums values of shape (K,) over ranks.
    """
    return (summed(own[None])[0] / count).clamp(min=0) if count else 0.0


def add_gradient(
    objective: PreferenceObjective,
    micro_batches: Iterable[PreparedMicroBatch],
    batch_size: int,
    z0: Tensor | float,
    backward: Callable[[Tensor, PreparedMicroBatch], None],
    check: bool = False,
) -> MetricSums:
    """Accumulate this rank's part of the gradient of the mean over the global batch; return its part of the metric sums."""
    metric_sums = MetricSums()
    for micro_batch in micro_batches:
        answers = objective.answers(micro_batch, entropy=True)
        loss, sums = objective.measure(answers, micro_batch, z0)
        backward(loss / batch_size, micro_batch)
        if check:
            sums["loss_at_reference"] = objective.measure(answers.at_reference(), micro_batch, 0.0)[0]
        metric_sums.add({"loss": loss, **sums}, micro_batch.weight)
    return metric_sums


def comparisons(config: PreferenceTrain, rows: Sequence[Row]) -> Sequence[Row]:
    """Rows with a `label`: pairs {..., chosen, rejected}, or single answers {..., text} for KTO.

    Raises:
        StageError: an uncertain pair for a loss that takes only certain ones, a pair without win rates for a loss that needs them, or a
            single answer without a score.
    """
    loss = config.loss
    unsure = next((row for row in rows if row["strength"] not in (None, 1.0)), None)
    if unsure is not None and not loss.takes_strength:
        raise StageError(
            f"preference {unsure['id']} has strength {unsure['strength']}, but {loss.type} takes only certain pairs: "
            "use a loss that takes uncertain pairs (dpo, sppo_soft, ...), or rows without `strength`"
        )
    if isinstance(loss, Kto):
        return single_answers(rows, loss.threshold)
    found = pairs(rows, config.lists)
    if not isinstance(loss, SppoSoft):
        return Mapped(found, labelled)
    for row in found:
        win_rates_of(row)
    return Mapped(found, lambda row: {**labelled(row), "win_rates": win_rates_of(row)})


def labelled(row: Row) -> Row:
    """A pair with its `label`: P(the chosen answer is better)."""
    return {**row, "label": 1.0 if row["strength"] is None else row["strength"]}


def win_rates_of(row: Row) -> tuple[float, float]:
    """P(better than the policy's answers) of (chosen, rejected). A pair with only a strength is treated as its own opponents.

    Raises:
        StageError: the pair has neither.
    """
    if row["win_rates"] is not None:
        return row["win_rates"]
    if row["strength"] is not None:
        return row["strength"], 1 - row["strength"]
    raise StageError(
        f"preference {row['id']} has neither a win_rate in both answers nor a strength, which sppo_soft requires: use the output of "
        "`judge` and `pair`, or sppo_hard, for which the chosen answer always wins"
    )


def documents_of(config: PreferenceTrain) -> Documents:
    """Conversion of a row to the documents of one loss term."""
    return SingleAnswers(taken="single_answers") if isinstance(config.loss, Kto) else Pairs(config.lists)


def is_reference(given: Artifact, policy: Artifact) -> bool:
    """Whether the initial policy is the reference."""
    if given.type == "logprobs":
        return any(edge.port == "policy" and edge.content == policy.record.content for edge in given.record.inputs)
    return same_weights(given, policy)


def check_first_loss(loss: float, expected: float, config: PreferenceTrain) -> None:
    """Check that the first loss is the one for equal log-probabilities: log 2 for DPO, ½ for KTO."""
    tolerance = FIRST_LOSS_TOLERANCE[config.dtype] * max(1.0, abs(expected))
    if abs(loss - expected) > tolerance:
        raise StageError(
            f"the first loss is {loss:.4f}, but must be {expected:.4f} within {tolerance:.2g}, because policy and reference are the same "
            "model; their log-probabilities are computed differently (cached ones need the same dtype and head)"
        )
