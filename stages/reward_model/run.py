"""Reward model: policy + preferences → a scalar head on the policy's body, trained by Bradley–Terry.

    payload/                      the model, and reward_stats.json, with which `judge` normalizes rewards
    evidence/calibration.json     held-out pairs: is σ(s_w - s_l) a calibrated probability?
    evidence/held_out.json        accuracy by label margin and by length, agreement with ranked lists
    evidence/held_out.jsonl       every held-out pair with its scores

The score is read in fp32 at the last token of the rendered conversation, where transformers and vLLM read it. Preferences held out (by
hash of their id) provide the diagnostics, and the mean and standard deviation for normalizing rewards. Each member of an ensemble is a
separate stage: `seed` determines the head, the data order and the held-out preferences.
"""

import hashlib
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor, nn

from pedigree.configs.methods.training import BradleyTerry, RewardModel
from pedigree.data.artifacts.artifacts import write_json, write_rows
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import PROBE, TODAY
from pedigree.data.chat.documents import Pairs
from pedigree.data.chat.reward_stats import FILE, READ_AT
from pedigree.data.records.sequences import Mapped
from pedigree.stages.core.batches import MicroBatch, Unit, step_rows, total_steps, unit_tokens
from pedigree.stages.core.preference_losses import bradley_terry
from pedigree.stages.core.statistics import wilson
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.reward_model import calibration
from pedigree.stages.training.checkpoints import Checkpoints
from pedigree.stages.training.feed import GlobalBatch, PreparedMicroBatch
from pedigree.stages.training.models import load_reward_model, refuse_without_scores
from pedigree.stages.training.probe import probe
from pedigree.stages.training.token_cache import units_of
from pedigree.stages.training.trainer import MetricSums, Trainer
from pedigree.stages.training.training_rows import Row, fitting, gather, is_held_out, pairs, report_rows, split

CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
Example = tuple[Row, Unit]
"""The facts of a pair (see `facts_of`) and its documents."""


def run(config: RewardModel, inputs: Inputs, job: Job) -> dict[str, Any]:
    base, numerics = only(inputs, "policy"), job.numerics
    refuse_without_scores(base.payload)
    chat = Chat(base.payload)
    settle(chat)
    examples, held = examples_of(config, inputs, job, chat)
    total = total_steps(len(examples), config.global_batch, config.epochs, config.max_steps)
    with job.busy("loading the model"):
        module = load_reward_model(base.payload, numerics, config.lora, config.seed, pad_token_id=chat.pad_id)
    init_head(module.model.score, config.seed)
    trainer = Trainer(module, optimizer=config.optimizer, total_steps=total, dtype=config.dtype, numerics=numerics, seed=config.seed)
    probe(trainer.module, numerics, trainer.device)
    checkpoints = Checkpoints(job, trainer)
    state = checkpoints.resume() or {"step": 0, "last": {"loss": float("nan")}}

    def batch_of(step: int) -> list[Example]:
        return [examples[i] for i in step_rows(step, len(examples), config.global_batch, config.shuffled_by)]

    batches = (labelled_batch(batch_of(step), config.loss.margin_weight) for step in range(state["step"], total))
    with trainer.feed(batches, chat.pad_id) as feed:
        for step in range(state["step"], total):
            started = time.monotonic()
            batch = batch_of(step)
            sums = add_gradient(config.loss, trainer.module, job.steady(feed.micro_batches()), len(batch), trainer.backward)
            stats = trainer.step()
            found = trainer.totals(sums.sums(), {"grad_norm": stats.grad_norm})
            grad_norm = found.pop("grad_norm")
            means = {name: value / len(batch) for name, value in sorted(found.items())}

            trainer.refuse_not_finite(step + 1, means["loss"], grad_norm)
            speed = sum(len(doc) for _, unit in batch for doc in unit) / (time.monotonic() - started)
            tokens = sum(unit_tokens(unit, job.numerics) for _, unit in batch)
            others = {"grad_norm": grad_norm, "learning_rate": stats.learning_rate, "tokens": tokens, "tokens_per_second": speed}
            job.log(step + 1, **means, **others, **trainer.paces.slowest())
            job.progress(step + 1, total, loss=means["loss"], accuracy=means["accuracy"], tokens_per_second=speed)
            state = {"step": step + 1, "last": means}
            checkpoints.after_step(step + 1, state)  # after the last one too, because scoring may take long

    measured = held or examples  # without held-out pairs, rewards are normalized on the training pairs
    scores = score_all(trainer, Mapped(measured, lambda example: example[1]), chat, job)
    with job.busy("writing the model"):
        trainer.export(job.out / "payload", chat)
    every = [score for pair in scores for score in pair]
    spread = {"mean": statistics.fmean(every), "std": max(statistics.pstdev(every), 1e-6)}
    if trainer.rank == 0:
        write_json(job.out / "payload" / FILE, spread | READ_AT)
    trainer.close()
    report = held_out_report(held, scores, job) | {"reward_mean": spread["mean"], "reward_std": spread["std"]} if held else {}
    counts = {"pairs": len(examples), "held_out_pairs": len(held), "steps": total}
    return {**counts, "loss": state["last"]["loss"], **{f"held_out_{name}": value for name, value in report.items()}}


def settle(chat: Chat) -> None:
    """Change the tokenizer so that others read what is read here: transformers reads a score at the last token that is not padding, may put
    BOS before a text that has one from its template, and gives templates today's date.

    Raises:
        StageError: conversations end with the padding token, so another token would be read.
    """
    tokenizer, (_, answer) = chat.tokenizer, chat.answer(PROBE[:-1], PROBE[-1]["content"], scored=True)
    padding = tokenizer.convert_ids_to_tokens(chat.pad_id)
    if answer[-1] == chat.pad_id:
        raise StageError(
            f"conversations end with {padding!r}, which is also the only token for padding, so transformers would read scores at another "
            "token than is trained: import the model again with `pedigree run RECIPE --force STAGE`, which adds a token"
        )
    tokenizer.pad_token = padding
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"  # absolute positions would begin within the padding
    if hasattr(tokenizer, "backend_tokenizer"):
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    tokenizer.chat_template = CLOCK.sub(lambda call: repr(TODAY.strftime(call[2])), chat.template)


def examples_of(config: RewardModel, inputs: Inputs, job: Job, chat: Chat) -> tuple[Sequence[Example], Sequence[Example]]:
    """(pairs to train on, pairs held out), each with the facts of its row.

    Raises:
        StageError: there is nothing to train on, or no pair has the margin that the loss requires.
    """
    with job.busy("reading rows"):
        given = pairs(gather(inputs["preferences"].values()), config.lists)
    every = units_of(given, Pairs(config.lists, scored=True), chat, job, only(inputs, "policy"), inputs["preferences"].values())
    rows, units = fitting(given, every, config.max_length, job, config.too_long)
    facts = [facts_of(row, is_held_out(row["list"], config.holdout, config.seed)) for row in rows]
    if config.loss.margin_weight and all(fact["margin"] is None for fact in facts):
        raise StageError(
            f"margin_weight is {config.loss.margin_weight}, but none of {len(rows)} pairs has scores: use preferences with scores, or "
            "remove margin_weight"
        )
    trained, held = (Mapped(side, lambda place: (facts[place], units[place])) for side in split(facts, config.holdout, config.seed))
    report_rows(given, len(trained), len(held), every, config, job, "pairs")
    return trained, held


def facts_of(row: Row, held: bool) -> Row:
    """The part of a row to keep in memory: what training needs and, for held-out rows, what the report needs; texts are hashed."""
    facts = {name: row[name] for name in ("list", "strength", "margin")}
    if not held:
        return facts
    texts = {side: hashlib.sha256(row[side].encode()).hexdigest() for side in ("chosen", "rejected")}
    return facts | {name: row[name] for name in ("id", "source")} | texts


@torch.no_grad()
def init_head(head: nn.Linear, seed: int) -> None:
    """N(0, 1/(d + 1))  (Stiennon et al. 2020, arXiv 2009.01325, appendix B.1)."""
    draw = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
    head.weight.copy_(draw / math.sqrt(head.in_features + 1))


def labelled_batch(examples: Sequence[Example], margin_weight: float) -> GlobalBatch:
    """A global batch of pairs with the margins and strengths of their labels."""

    def labels(units: Sequence[int]) -> dict[str, Tensor]:
        margins, strengths = targets([examples[unit][0] for unit in units], margin_weight)
        return {"margins": margins, "strengths": strengths}

    return GlobalBatch([unit for _, unit in examples], labels)


def targets(rows: Sequence[Row], margin_weight: float) -> tuple[Tensor, Tensor]:
    """(m, p) of each pair, of shape (P,): 0 and 1 where a pair has no margin or strength."""
    margins = [margin_weight * (row["margin"] or 0.0) for row in rows]
    strengths = [1.0 if row["strength"] is None else row["strength"] for row in rows]
    return torch.tensor(margins), torch.tensor(strengths)


def add_gradient(
    loss: BradleyTerry,
    score: Callable[[MicroBatch], Tensor],
    micro_batches: Iterable[PreparedMicroBatch],
    batch_size: int,
    backward: Callable[[Tensor], None],
) -> MetricSums:
    """Accumulate this rank's part of the gradient of the mean over the global batch; return its part of the metric sums.

    `score` maps a micro-batch to scores of shape (D,), alternating chosen and rejected answers.
    """
    sums = MetricSums()
    for micro_batch in micro_batches:
        scores_D = score(micro_batch.batch)
        given = micro_batch.extras["margins"], micro_batch.extras["strengths"], loss.centering
        value, parts = bradley_terry(scores_D[0::2], scores_D[1::2], *given)
        backward(value * micro_batch.weight / batch_size)
        sums.add({"loss": value, **parts}, micro_batch.weight)
    return sums


@torch.no_grad()
def score_all(trainer: Trainer, units: Sequence[Unit], chat: Chat, job: Job) -> list[tuple[float, float]]:
    """(score of chosen, score of rejected) of every pair; the same on every rank."""
    done = 0  # on all ranks, which have about as many
    scores_U2 = torch.zeros(len(units), 2, dtype=torch.float64, device=trainer.device)
    with trainer.feed([GlobalBatch(units, lambda indices: {"indices": torch.tensor(indices)})], chat.pad_id) as feed:
        for micro_batch in feed.micro_batches():
            job.doing("scoring pairs", min(done, len(units)), len(units), "pairs")
            done += len(micro_batch.units) * trainer.world_size // trainer.numerics.sequence_parallel
            if micro_batch.weight:
                scores_U2[micro_batch.extras["indices"]] = trainer.module(micro_batch.batch).double().view(-1, 2)
            else:
                trainer.module(micro_batch.batch)  # padding: keeps ranks in step
    return [(chosen, rejected) for chosen, rejected in trainer.summed(scores_U2.flatten()).view(-1, 2).tolist()]


def held_out_report(held: Sequence[Example], scores: list[tuple[float, float]], job: Job) -> dict[str, float]:
    """Diagnostics on held-out pairs: numbers for the record, details as evidence."""
    gaps = [chosen - rejected for chosen, rejected in scores]
    strengths = [1.0 if row["strength"] is None else row["strength"] for row, _ in held]
    lengths = [(chosen.num_trained, rejected.num_trained) for _, (chosen, rejected) in held]
    bins = calibration.reliability(gaps, strengths)
    calibrated = {
        "calibration_error": calibration.expected_calibration_error(bins),
        "brier": calibration.brier(gaps, strengths),
        "log_loss": calibration.log_loss(gaps, strengths),
    }
    by_length = {
        "longer": [gap for gap, (chosen, rejected) in zip(gaps, lengths, strict=True) if chosen > rejected],
        "shorter": [gap for gap, (chosen, rejected) in zip(gaps, lengths, strict=True) if chosen < rejected],
    }
    labelled = [(gap, row["margin"]) for gap, (row, _) in zip(gaps, held, strict=True) if row["margin"] is not None]
    in_order, triples = list_agreement(held, scores)
    # Pairs of one ranked list share answers, so only lists are independent.
    accuracy = wilson(statistics.fmean(gap > 0 for gap in gaps), len({row["list"] for row, _ in held}))
    numbers = {
        "accuracy": accuracy.mean,
        "accuracy_low": accuracy.low,
        "accuracy_high": accuracy.high,
        "margin": statistics.fmean(gaps),
        **calibrated,
        "length_correlation": calibration.spearman([one for pair in scores for one in pair], [one for pair in lengths for one in pair]),
        **{f"accuracy_chosen_{side}": calibration.accuracy(some) for side, some in by_length.items()},
        "ordered_triples": in_order / triples if triples else None,
    }
    found = {name: value for name, value in numbers.items() if value is not None}
    if job.rank == 0:
        by_margin = calibration.accuracy_by_margin([gap for gap, _ in labelled], [margin for _, margin in labelled])
        pair_counts = {f"chosen_{side}": len(some) for side, some in by_length.items()} | {"with_margin": len(labelled)}
        details = {"pairs": {"all": len(held), **pair_counts}, "triples": triples, "by_margin": [asdict(one) for one in by_margin]}
        write_json(job.evidence / "calibration.json", {"pairs": len(held), **calibrated, "bins": [asdict(one) for one in bins]})
        write_json(job.evidence / "held_out.json", {**found, **details})
        scored = zip(held, scores, lengths, strict=True)
        write_rows(job.evidence / "held_out.jsonl", [line(row, pair, pair_lengths) for (row, _), pair, pair_lengths in scored])
    return found


def list_agreement(held: Sequence[Example], scores: list[tuple[float, float]]) -> tuple[int, int]:
    """(triples of ranked lists in the labels' order, all triples)."""
    lists: dict[str, list[tuple[str, str]]] = defaultdict(list)
    by_answer: dict[tuple[str, str], float] = {}
    for (row, _), (chosen, rejected) in zip(held, scores, strict=True):
        lists[row["list"]].append((row["chosen"], row["rejected"]))
        by_answer |= {(row["list"], row["chosen"]): chosen, (row["list"], row["rejected"]): rejected}
    return calibration.ordered_triples(lists, by_answer)


def line(row: Row, scores: tuple[float, float], lengths: tuple[int, int]) -> dict[str, Any]:
    label = {"id": row["id"], "source": row["source"], "strength": row["strength"], "label_margin": row["margin"]}
    return label | {"chosen": scores[0], "rejected": scores[1], "chosen_length": lengths[0], "rejected_length": lengths[1]}
