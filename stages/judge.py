"""Completions to judgments: the scores of a verifier, of reward models and of a language model for each answer.

    payload/rows-*.parquet   judgments, in the order of the completions; a judge that could not score leaves null
    evidence/failures.jsonl  which judge failed on what, and why
    evidence/agreement.json  of several reward models: the share of pairs of answers that each two rank alike
    evidence/questions.jsonl what a language model was asked about the first answers, and what it said

    score = verifier_weight * verifier + reward_weight * ensemble((reward_i - mean_i) / std_i) + rating_weight * mean_aspects(rating)
    win_rate = mean over the scored answers to the prompt of P(this one is better), see `win_rate_scale`

Rewards are normalised by the mean and standard deviation of each reward model's held-out answers (`reward_stats.json`), so that
weights mean the same for every reward model. The row keeps the raw rewards. A term of weight zero is not part of the score, nor is
the verifier where a prompt has none. Where one member could not score, the ensemble has no reward: a mean of the others would be
another ensemble; nor has an answer a rating where one aspect has none. An answer that was cut off is shown to reward models as it is,
without an end-of-turn token: its reward is read at its last token.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from configs.answers import Judge
from data import records
from data.artifacts import write_json, write_rows
from data.chat import Chat, ChatError
from data.records import AspectRating, Judgment
from stages.core.ensembles import agreement, combine, disagreement
from stages.core.rating import mean_rating
from stages.core.verifiers import VerifierError, verify
from stages.core.win_rates import win_rates
from stages.job import Inputs, Job, StageError, only, only_or_none

if TYPE_CHECKING:  # it loads engines, which a verifier does without
    from stages.engines.raters import Ratings

@dataclass(frozen=True)
class Member:
    """The rewards of one reward model for every completion; None where it could not score."""

    raw: list[float | None]
    mean: float
    std: float

    def normalised(self, place: int) -> float | None:
        raw = self.raw[place]
        return None if raw is None else (raw - self.mean) / self.std


def run(config: Judge, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Scores every completion.

    Raises:
        StageError: too many answers have no score, a completion stands there twice, or a reward model's statistics are missing.
        EngineLost: the language model is down; what it has said is kept.
    """
    with job.busy("reading rows"):
        completions = records.load(only(inputs, "completions"))
    records.check_once(completions)
    failures: list[dict[str, Any]] = []
    verified: list[float | None] = []
    for row in completions:
        job.doing("verifying", len(verified), len(completions), "answers")
        verified.append(verifier_score(row, failures))
    members = ask_members(config, inputs, job, completions, failures)
    rated = ask_ratings(config, inputs, job, completions, failures)
    by_answer = rated.by_answer if rated else [{} for _ in completions]
    scored = zip(completions, verified, by_answer, strict=True)
    rows = with_win_rates(
        [judgment(row, verifier, members, number, ratings, config) for number, (row, verifier, ratings) in enumerate(scored)],
        win_rate_scale(config, members),
    )
    write_rows(job.evidence / "failures.jsonl", failures)
    unscored = sum(row["score"] is None for row in rows)
    if not rows or unscored > config.max_unscored_share * len(rows):
        reason = failures[0]["reason"] if failures else "their prompts have no verifier"
        raise StageError(
            f"{unscored} of {len(rows)} answers have no score, more than {config.max_unscored_share:.0%} ({reason}): give "
            "reward_weight and a reward model, rating_weight and a rating, or prompts with verifiers; or raise max_unscored_share"
        )
    agreed = member_agreement(rows)
    if agreed:
        write_json(job.evidence / "agreement.json", agreed)
    with job.busy("writing rows"):
        records.save(job.out, "judgment", rows)
    return {
        "rows": len(rows),
        "unscored": unscored,
        "failures": len(failures),
        **means(rows),
        **({"agreement": fmean(one["agreement"] for one in agreed)} if agreed else {}),
        **({"ratings": rating_metrics(rows), **({"reported": rated.reported} if rated.reported else {})} if rated else {}),
    }


def ask_ratings(
    config: Judge, inputs: Inputs, job: Job, completions: list[dict[str, Any]], failures: list[dict[str, Any]]
) -> "Ratings | None":
    """The ratings of a language model; None where none is asked."""
    if config.rating is None:
        return None
    from stages.engines.raters import rate

    judge = only_or_none(inputs, "judge")
    found = rate(config.rating, judge, completions, job, max_unanswered_share=config.max_unscored_share)
    failures += found.failures
    models = found.reported.get("model", {})
    if len(models) > 1:
        job.marks.append(f"rated by {len(models)} models: {', '.join(models)}")
    return found


def ask_members(
    config: Judge, inputs: Inputs, job: Job, completions: list[dict[str, Any]], failures: list[dict[str, Any]]
) -> dict[str, Member]:
    """Label → the rewards of each reward model, one model after the other; empty where rewards have no weight."""
    if config.reward_weight == 0:
        return {}
    given = inputs["reward_models"]
    statistics = {label: reward_statistics(artifact.payload) for label, artifact in given.items()}
    members, total = {}, len(given) * len(completions)
    for number, (label, artifact) in enumerate(given.items()):
        progress = partial(_progress, job, number * len(completions), total)
        raw, problems = score_by_model(artifact.payload, completions, config, job, progress)
        failures += [{"id": completions[place]["id"], "judge": label, "reason": reason} for place, reason in sorted(problems.items())]
        members[label] = Member(raw, *statistics[label])
    return members


def _progress(job: Job, before: int, total: int, done: int) -> None:
    job.progress(before + done, total)


def judgment(
    row: dict[str, Any], verifier: float | None, members: dict[str, Member], place: int, ratings: dict[str, AspectRating], config: Judge
) -> Judgment:
    """One answer with its scores."""
    rating = mean_rating(one["rating"] for one in ratings.values())
    rewards = [member.normalised(place) for member in members.values()]
    known = [reward for reward in rewards if reward is not None]
    whole = bool(known) and len(known) == len(rewards)
    reward = combine(known, config.ensemble) if whole else None
    terms: list[float | None] = []
    if config.verifier_weight > 0 and row["verifier"] is not None:
        terms.append(None if verifier is None else config.verifier_weight * verifier)
    if config.reward_weight > 0:
        terms.append(None if reward is None else config.reward_weight * reward)
    if config.rating_weight > 0:
        terms.append(None if rating is None else config.rating_weight * rating)
    return {
        "id": row["id"],
        "prompt_id": row["prompt_id"],
        "source": row["source"],
        "messages": row["messages"],
        "policy": row["policy"],
        "policy_content": row["policy_content"],
        "on_policy": row["on_policy"],
        "text": row["text"],
        "finish_reason": row["finish_reason"],
        "response_length": len(row["response_ids"]),
        "verifier_score": verifier,
        "rewards": {label: member.raw[place] for label, member in members.items()},
        "reward": reward,
        "disagreement": disagreement(known) if whole and len(known) > 1 else None,
        "ratings": ratings,
        "rating": rating,
        "score": total(terms),
        "win_rate": None,
        **records.context_of(row),
    }


def win_rate_scale(config: Judge, members: dict[str, Member]) -> float | None:
    """Logits per unit of score. A reward model's raw scores are logits of Bradley-Terry, and the score holds them divided by their
    standard deviation (of several models, on average) and times `reward_weight`. None where no reward model is asked: the higher
    score wins for certain."""
    if not members:
        return None
    return fmean(member.std for member in members.values()) / config.reward_weight


def with_win_rates(rows: list[Judgment], scale: float | None) -> list[Judgment]:
    """Judgments with the win rate of every scored answer among those to its prompt."""
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["score"] is not None:
            scores[row["prompt_id"]][row["id"]] = row["score"]
    found: dict[str, float] = {}
    for group in scores.values():
        found |= zip(group, win_rates(list(group.values()), scale), strict=True)
    return [{**row, "win_rate": found.get(row["id"])} for row in rows]


def member_agreement(rows: list[Judgment]) -> list[dict[str, Any]]:
    """For each two reward models, the share of pairs of answers to one prompt that they rank alike."""
    groups: dict[str, list[Judgment]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_id"]].append(row)
    found = []
    for one, other in combinations(rows[0]["rewards"], 2):
        both = [[(row["rewards"][one], row["rewards"][other]) for row in group] for group in groups.values()]
        share = agreement([[(a, b) for a, b in group if a is not None and b is not None] for group in both])
        if share is not None:
            found.append({"members": [one, other], "agreement": share})
    return found


def verifier_score(row: dict[str, Any], failures: list[dict[str, Any]]) -> float | None:
    """The verifier's score; None where the prompt has no verifier, or it cannot be run (which is a failure)."""
    if row["verifier"] is None:
        return None
    try:
        return verify(row["verifier"], row["text"]).score
    except VerifierError as error:
        failures.append({"id": row["id"], "judge": "verifier", "reason": str(error)})
        return None


def total(terms: list[float | None]) -> float | None:
    """The sum; None where a term is missing, or there is no term."""
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
        raise StageError(f"reward_stats.json has mean {mean} and std {std}: both must be finite and std > 0: train the reward model again")
    return mean, std


def score_by_model(
    payload: Path, completions: list[dict[str, Any]], config: Judge, job: Job, progress: Callable[[int], None]
) -> tuple[list[float | None], dict[int, str]]:
    """(raw rewards, read at each answer's last token, mostly its end-of-turn token; index → why there is none).

    Batches depend on the rows only, so equal rows give equal bits.
    """
    import torch

    from stages.core.batches import Unit, document
    from stages.core.probe import probe
    from stages.engines.feed import GlobalBatch, feed
    from stages.engines.models import frozen, load_reward_model
    from stages.engines.sampler import model_context

    chat = Chat(payload)
    longest = model_context(payload)
    rewards: list[float | None] = [None] * len(completions)
    problems: dict[int, str] = {}
    places: list[int] = []
    units: list[Unit] = []
    for place, row in enumerate(completions):
        job.doing("tokenising", place, len(completions), "answers")
        try:
            arguments = row.get("template_arguments")
            unit = document(*chat.answer(row["messages"], row["text"], ended=records.ended(row), arguments=arguments))
            if not unit.num_trained:
                raise ChatError("the answer was cut off before it had any text")
            if len(unit) > longest:
                raise ChatError(f"prompt and answer have {len(unit)} tokens, the reward model's context is {longest}")
        except ChatError as error:
            problems[place] = str(error)
        else:
            places.append(place)
            units.append((unit,))
    if not units:
        return rewards, problems
    device = torch.device(job.numerics.device)
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    with job.busy("loading the model"):
        module = frozen(load_reward_model(payload, job.numerics), device, dtype)
        probe(module, job.numerics, device)
    done = 0
    with torch.no_grad(), feed([GlobalBatch(units)], 0, 1, job.numerics, chat.pad_id, device) as fed:
        for micro_batch in fed.micro_batches():
            for index, reward in zip(micro_batch.units, module(micro_batch.batch).tolist(), strict=True):
                if math.isfinite(reward):
                    rewards[places[index]] = reward
                else:
                    problems[places[index]] = f"the reward is {reward}"
            done += len(micro_batch.units)
            progress(done)
    return rewards, problems


def rating_metrics(rows: list[Judgment]) -> dict[str, dict[str, Any]]:
    """Rubric → mean of its ratings, how often each was given, and how many answers have none."""
    found = {}
    for name in rows[0]["ratings"]:
        given = [row["ratings"][name]["rating"] for row in rows]
        known = [rating for rating in given if rating is not None]
        counts = {str(rating): count for rating, count in sorted(Counter(known).items())}
        found[name] = {"mean": fmean(known) if known else None, "counts": counts, "unrated": len(given) - len(known)}
    return found


def means(rows: list[Judgment]) -> dict[str, Any]:
    """Mean of each kind of score, over the rows that have it; by policy for the total."""

    def entries() -> Iterator[tuple[str, float]]:
        for row in rows:
            scores = {
                "verifier": row["verifier_score"],
                "reward": row["reward"],
                "disagreement": row["disagreement"],
                "rating": row["rating"],
                "score": row["score"],
            }
            for name, value in scores.items():
                if value is not None:
                    yield f"mean_{name}", value
                    if name == "score":
                        yield f"mean_score/{row['policy']}", value

    values: dict[str, list[float]] = {}
    for name, value in entries():
        values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}
