"""Completions to judgments: what a verifier and a reward model say of each answer, all of it kept.

    payload/rows.jsonl       judgments, in the order of the completions; a judge that could not score leaves null
    evidence/failures.jsonl  which judge failed on what, and why

    score = verifier_weight * verifier + reward_weight * (reward - mean) / std

Rewards are normalised by the mean and standard deviation of the reward model's held-out answers (`reward_stats.json`), so that
weights mean the same for every reward model. The row keeps the raw reward. A term of weight zero is no part of the score, nor is
the verifier of a prompt that has none.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.datasets import Judge
from data import records
from data.artifacts import write_rows
from data.chat import Chat, ChatError
from data.records import Judgment
from stages.core.verifiers import verify
from stages.job import Inputs, Job, StageError, only

MAX_UNSCORED_SHARE = 0.1
"""More answers without a score than this: the judges do not fit the prompts, and pairs would come from a remainder."""


def run(config: Judge, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Scores every completion.

    Raises:
        StageError: too many answers have no score, or the reward model's statistics are missing.
    """
    completions = records.load(only(inputs, "completions"))
    failures: list[dict[str, Any]] = []
    verified = [verifier_score(row, failures) for row in completions]
    rewards: list[float | None] = [None] * len(completions)
    mean, std = 0.0, 1.0
    if config.reward_weight > 0:
        payload = only(inputs, "reward_model").payload
        mean, std = reward_statistics(payload)
        rewards = score_by_model(payload, completions, config, job, failures)

    rows: list[Judgment] = []
    for row, verifier, reward in zip(completions, verified, rewards, strict=True):
        terms: list[float | None] = []
        if config.verifier_weight > 0 and row["verifier"] is not None:
            terms.append(None if verifier is None else config.verifier_weight * verifier)
        if config.reward_weight > 0:
            terms.append(None if reward is None else config.reward_weight * (reward - mean) / std)
        rows.append(
            {
                "id": row["id"],
                "prompt_id": row["prompt_id"],
                "source": row["source"],
                "messages": row["messages"],
                "policy": row["policy"],
                "text": row["text"],
                "finish_reason": row["finish_reason"],
                "response_length": len(row["response_ids"]),
                "verifier_score": verifier,
                "reward": reward,
                "score": total(terms),
            }
        )
    write_rows(job.evidence / "failures.jsonl", failures)
    unscored = sum(row["score"] is None for row in rows)
    if not rows or unscored > MAX_UNSCORED_SHARE * len(rows):
        reason = failures[0]["reason"] if failures else "their prompts have no verifier"
        raise StageError(
            f"{unscored} of {len(rows)} answers have no score, more than {MAX_UNSCORED_SHARE:.0%} ({reason}): "
            "give reward_weight and a reward model, or prompts with verifiers"
        )
    records.save(job.out, rows)
    return {
        "rows": len(rows),
        "unscored": unscored,
        "failures": len(failures),
        **means(rows),
    }


def verifier_score(row: dict[str, Any], failures: list[dict[str, Any]]) -> float | None:
    """The verifier's score; None where the prompt has no verifier, or it cannot be run (which is a failure)."""
    if row["verifier"] is None:
        return None
    try:
        return verify(row["verifier"], row["text"]).score
    except ValueError as error:
        failures.append({"id": row["id"], "judge": "verifier", "reason": str(error)})
        return None


def total(terms: list[float | None]) -> float | None:
    """The sum; None where a part is missing, or there is no part."""
    known = [term for term in terms if term is not None]
    return sum(known) if known and len(known) == len(terms) else None


def reward_statistics(payload: Path) -> tuple[float, float]:
    """(mean, standard deviation) of the reward model on its held-out answers."""
    try:
        found = json.loads((payload / "reward_stats.json").read_text())
        mean, std = float(found["mean"]), float(found["std"])
    except (OSError, ValueError, KeyError) as error:
        raise StageError(f"the reward model has no usable reward_stats.json ({error}): make it by a `reward_model` stage") from error
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise StageError(f"reward_stats.json has mean {mean} and std {std}: finite ones and std > 0 are due; train the reward model again")
    return mean, std


def score_by_model(
    payload: Path, completions: list[dict[str, Any]], config: Judge, job: Job, failures: list[dict[str, Any]]
) -> list[float | None]:
    """Raw rewards, read at each answer's end-of-turn token; batches follow from the rows alone, so equal rows give equal bits."""
    import torch

    from stages.core.batches import Unit, collate, document, plan_step
    from stages.engines.models import frozen, load_reward_model

    chat = Chat(payload)
    longest = json.loads((payload / "config.json").read_text())["max_position_embeddings"]
    rewards: list[float | None] = [None] * len(completions)
    places: list[int] = []
    units: list[Unit] = []
    for place, row in enumerate(completions):
        try:
            unit = document(*chat.answer(row["messages"], row["text"]))
            if len(unit) > longest:
                raise ChatError(f"prompt and answer have {len(unit)} tokens, the reward model's context is {longest}")
        except ChatError as error:
            failures.append({"id": row["id"], "judge": "reward", "reason": str(error)})
        else:
            places.append(place)
            units.append((unit,))
    if not units:
        return rewards
    device = torch.device(job.numerics.device)
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    module = frozen(load_reward_model(payload, job.numerics), device, dtype)
    done = 0
    with torch.no_grad():
        for micro in plan_step(units, 0, 1, job.numerics):
            batch = collate([units[index] for index in micro.units], job.numerics, chat.pad_id).to(device)
            for index, reward in zip(micro.units, module(batch).tolist(), strict=True):
                if math.isfinite(reward):
                    rewards[places[index]] = reward
                else:
                    failures.append({"id": completions[places[index]]["id"], "judge": "reward", "reason": f"the reward is {reward}"})
            done += len(micro.units)
            job.progress(done, len(units))
    return rewards


def means(rows: list[Judgment]) -> dict[str, Any]:
    """Mean of each kind of score, over the rows that have it; by policy for the total."""

    def entries() -> Iterator[tuple[str, float]]:
        for row in rows:
            for name, value in (("verifier", row["verifier_score"]), ("reward", row["reward"]), ("score", row["score"])):
                if value is not None:
                    yield f"mean_{name}", value
                    if name == "score":
                        yield f"mean_score/{row['policy']}", value

    values: dict[str, list[float]] = {}
    for name, value in entries():
        values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}
