"""Turn completions into judgments: score each answer by a verifier, reward models, a language model, and functions of the project.

    payload/rows-*.parquet   judgments, in the order of the completions; null where a judge could not score
    evidence/failures.jsonl  which judge failed on which answer, and why
    evidence/agreement.json  for several reward models: the share of answer pairs that each two rank alike
    evidence/win_rates.json  for several policies: how often each beats each other one, with intervals over prompts
    evidence/questions.jsonl the language model's questions and replies for the first answers

    score = verifier_weight * verifier + reward_weight * ensemble((reward_i - mean_i) / std_i) + rating_weight * mean_aspects(rating)
            + Σ_k weight_k * program_k
    win_rate = mean over the scored answers to the prompt of P(this one is better), see `answers_win_rates`

Rewards are normalized by the mean and standard deviation of each reward model's held-out answers (`reward_stats.json`), so that
weights are comparable across reward models. Rows store the raw rewards. Terms of weight zero are excluded from the score, as is the
verifier for prompts without one. If one member could not score, the ensemble has no reward, because the mean of the others would be a
different ensemble; likewise an answer with an unrated aspect has no rating, and one that a function could not score has no score.
Reward models score a truncated answer at its last token, without an added end-of-turn token. A function gets the answers of all policies
to a prompt together, and its term is omitted for answers for which it returns None.

Answers are read on demand; only ids, scores and the language model's replies stay in memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, tee
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from pedigree.configs.judging.scoring import Judge
from pedigree.data.artifacts.artifacts import Artifact, write_json, write_rows
from pedigree.data.records import records
from pedigree.data.records.records import AspectRating, Completion, Judgment
from pedigree.stages.core.ensembles import Member, agreement, combine, disagreement, model_terms, of_all, program_terms, total
from pedigree.stages.core.rating import mean_rating
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.judge.win_rates import win_rate_table, win_rates
from pedigree.stages.sampling.functions import opened, values_of
from pedigree.stages.verifiers import Verdict, VerifierError, verify_each
from pedigree.stages.verifiers.reward_programs import Answered, RewardFunction, Value

if TYPE_CHECKING:  # loads engines, which a verifier does not need
    from pedigree.stages.sampling.raters import Ratings

RESAMPLES = 1000
"""Bootstrap resamples of prompts behind the interval of a win rate."""
VERIFIED = ("id", "prompt_id", "policy", "text", "verifier")
"""Columns of a completion for verification."""
JUDGED = [name for name in Completion.__annotations__ if name not in ("index", "seed", "prompt_ids", "logprobs", "verifier")]
"""Columns of a completion for its judgment."""


class Verified(NamedTuple):
    """An answer after verification."""

    id: str
    prompt_id: str
    policy: str
    counts: bool
    """Whether its prompt has a verifier that scores answers."""
    score: float | None
    """The verifier's score."""


class Scores(NamedTuple):
    """Scores of an answer."""

    verifier: float | None
    reward: float | None
    disagreement: float | None
    rating: float | None
    score: float | None


@dataclass(frozen=True)
class JudgedAnswers:
    """Scores of all answers by all judges. Sequences are indexed by place."""

    verified: Sequence[Verified]
    members: Mapping[str, Member]
    """Label → rewards of a reward model."""
    rated: "Ratings | None"
    config: Judge
    programs: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """Name → values of a function."""

    @cached_property
    def scores(self) -> list[Scores]:
        return [self._scores(place) for place in range(len(self.verified))]

    def _scores(self, place: int) -> Scores:
        rewards = of_all(self.members.values(), place)
        reward = combine(rewards, self.config.ensemble) if rewards else None
        rating = mean_rating(one["rating"] for one in self.ratings(place).values())
        terms = model_terms(self.config, reward, rating)
        verified = self.verified[place]
        if self.config.verifier_weight > 0 and verified.counts:
            terms.insert(0, None if verified.score is None else self.config.verifier_weight * verified.score)
        terms += program_terms(self.config.programs, self.programs, place)
        apart = disagreement(rewards) if rewards and len(rewards) > 1 else None
        return Scores(verified.score, reward, apart, rating, total(terms))

    def ratings(self, place: int) -> dict[str, AspectRating]:
        """Rubric → rating."""
        return self.rated.by_answer[place] if self.rated else {}

    def numbers(self, place: int) -> dict[str, float | None]:
        """Name → number of a function."""
        return {name: value if isinstance(value := values[place], float) else None for name, values in self.programs.items()}

    @cached_property
    def by_prompt(self) -> dict[str, list[int]]:
        """Prompt id → places of its answers."""
        return by_prompt(self.verified)


def by_prompt(verified: Sequence[Verified]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(verified):
        groups[one.prompt_id].append(place)
    return groups


def run(config: Judge, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Score every completion.

    Raises:
        StageError: too many answers have no score, a completion is there twice, or a reward model's statistics are missing.
        EngineLost: the language model is down; its replies are kept.
        PedigreeError: a function cannot be used.
    """
    given = only(inputs, "completions")
    with job.busy("reading rows"):
        records.check_ids(row["id"] for row in records.stream(given.payload, ("id",)))
        completions = records.opened(given)
    failures: list[dict[str, Any]] = []
    with opened(config.programs, (row["verifier"] for row in records.stream(given.payload, ("verifier",))), job) as functions:
        verified = verify_all(given, len(completions), failures, job)
        values = {name: ask_function(name, one, completions, verified, failures) for name, one in functions.items()}
    members = ask_members(config, inputs, job, completions, verified, failures)
    found = JudgedAnswers(verified, members, ask_ratings(config, inputs, job, completions, failures), config, values)
    write_rows(job.evidence / "failures.jsonl", failures)
    unscored = sum(one.score is None for one in found.scores)
    if not verified or unscored > config.max_unscored_share * len(verified):
        reason = failures[0]["reason"] if failures else "their prompts have no verifier"
        raise StageError(
            f"{unscored} of {len(verified)} answers have no score, more than {config.max_unscored_share:.0%} ({reason}): add "
            "reward_weight and a reward model, rating_weight and a rating, programs, or prompts with verifiers; or raise max_unscored_share"
        )
    agreed = member_agreement(found)
    if agreed:
        write_json(job.evidence / "agreement.json", agreed)
    with job.busy("comparing policies"):
        table = policy_win_rates(found)
        if table:
            write_json(job.evidence / "win_rates.json", table)
    records.save(job.out, "judgment", judgments(given, found, job))
    return {
        "rows": len(verified),
        "unscored": unscored,
        "failures": len(failures),
        **means(found),
        **({"agreement": fmean(one["agreement"] for one in agreed)} if agreed else {}),
        **(found.rated.metrics() if found.rated else {}),
    }


def verify_all(given: Artifact, answers: int, failures: list[dict[str, Any]], job: Job) -> list[Verified]:
    """The verifier's score of every answer; failures are appended to `failures`. The verifier `facts` scores none."""
    same: dict[str, str] = {}  # interns the names
    found: list[Verified] = []
    rows, asked = tee(records.stream(given.payload, VERIFIED))

    def beat() -> None:
        job.doing("verifying", len(found), answers, "answers")

    for row, verdict in zip(rows, verify_each(((scoring_verifier(one), one["text"]) for one in asked), beat), strict=True):
        beat()
        score = verdict.score if isinstance(verdict, Verdict) else None
        if isinstance(verdict, VerifierError):
            failures.append({"id": row["id"], "judge": "verifier", "reason": str(verdict)})
        prompt_id, policy = (same.setdefault(row[name], row[name]) for name in ("prompt_id", "policy"))
        found.append(Verified(row["id"], prompt_id, policy, scoring_verifier(row) is not None, score))
    return found


def scoring_verifier(row: Mapping[str, Any]) -> dict[str, Any] | None:
    return None if row["verifier"] and row["verifier"].get("name") == "facts" else row["verifier"]


def ask_function(
    name: str, function: RewardFunction, completions: Sequence[dict[str, Any]], verified: Sequence[Verified], failures: list[dict[str, Any]]
) -> list[Value]:
    """The values of a function for all answers."""

    def group(places: Sequence[int]) -> list[Answered]:
        rows = ((verified[place].score, completions[place]) for place in places)
        return [
            Answered(row | {"id": row["prompt_id"]}, row["text"], row["response_ids"], row["finish_reason"], score) for score, row in rows
        ]

    found: list[Value] = [None] * len(verified)
    groups = by_prompt(verified).values()
    for places, values in zip(groups, values_of(function, map(group, groups)), strict=True):
        for place, value in zip(places, values, strict=True):
            found[place] = value
            if isinstance(value, str):
                failures.append({"id": verified[place].id, "judge": name, "reason": value})
    return found


def ask_members(
    config: Judge,
    inputs: Inputs,
    job: Job,
    completions: Sequence[dict[str, Any]],
    verified: Sequence[Verified],
    failures: list[dict[str, Any]],
) -> dict[str, Member]:
    """Label → rewards of each reward model, run one after the other; empty if `reward_weight` is 0."""
    if config.reward_weight == 0:
        return {}
    from pedigree.stages.sampling.rewards import ask_all

    def note(label: str, reasons: dict[int, str]) -> None:
        failures.extend({"id": verified[place].id, "judge": label, "reason": reason} for place, reason in reasons.items())

    return ask_all(inputs["reward_models"], completions, config.dtype, job, note)


def ask_ratings(
    config: Judge, inputs: Inputs, job: Job, completions: Sequence[dict[str, Any]], failures: list[dict[str, Any]]
) -> "Ratings | None":
    """The ratings of a language model; None if none is configured."""
    if config.rating is None:
        return None
    from pedigree.stages.sampling.raters import rate

    found = rate(config.rating, only_or_none(inputs, "judge"), completions, job, max_unanswered_share=config.max_unscored_share)
    failures += found.failures
    return found


def judgments(given: Artifact, found: JudgedAnswers, job: Job) -> Iterator[Judgment]:
    """All answers with their scores."""
    rates = answers_win_rates(found)
    for place, row in enumerate(records.stream(given.payload, JUDGED)):
        job.doing("writing rows", place, len(rates), "rows")
        scores = found.scores[place]
        judged: Judgment = {
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
            "verifier_score": scores.verifier,
            "rewards": {label: member.raw[place] for label, member in found.members.items()},
            "reward": scores.reward,
            "disagreement": scores.disagreement,
            "ratings": found.ratings(place),
            "rating": scores.rating,
            "score": scores.score,
            "win_rate": rates[place],
            **records.context_of(row),
        }
        if found.programs:
            judged["programs"] = found.numbers(place)
        if "temperature" in row:
            judged["temperature"] = row["temperature"]
        yield judged


def answers_win_rates(found: JudgedAnswers) -> list[float | None]:
    """The win rate of every answer among those to its prompt; None if it has no score.

    The scale is in logits per unit of score. A reward model's raw scores are Bradley-Terry logits; the score has them divided by their
    standard deviation (averaged over models) and multiplied by `reward_weight`. Without reward models the higher score always wins.
    """
    deviations = [member.std for member in found.members.values()]
    scale = fmean(deviations) / found.config.reward_weight if deviations else None
    rates: list[float | None] = [None] * len(found.verified)
    for places in found.by_prompt.values():
        scored = {place: score for place in places if (score := found.scores[place].score) is not None}
        for place, rate in zip(scored, win_rates(list(scored.values()), scale), strict=True):
            rates[place] = rate
    return rates


def policy_win_rates(found: JudgedAnswers) -> list[dict[str, Any]]:
    """The matrix of how often each policy beats each other one by score; empty for a single policy."""
    policies = list(dict.fromkeys(one.policy for one in found.verified))
    prompts = (by_policy(found, found.by_prompt[prompt_id]) for prompt_id in sorted(found.by_prompt))
    table = win_rate_table(prompts, policies, resamples=RESAMPLES, seed=0)
    return [one._asdict() for one in table]


def by_policy(found: JudgedAnswers, places: Iterable[int]) -> dict[str, list[float]]:
    """Policy → scores of its answers among `places`."""
    scores: dict[str, list[float]] = defaultdict(list)
    for place in places:
        score = found.scores[place].score
        if score is not None:
            scores[found.verified[place].policy].append(score)
    return scores


def member_agreement(found: JudgedAnswers) -> list[dict[str, Any]]:
    """For each two reward models, the share of answer pairs to the same prompt that they rank alike."""
    agreed = []
    for one, other in combinations(found.members, 2):
        first, second = found.members[one].raw, found.members[other].raw
        both = [[(first[place], second[place]) for place in places] for places in found.by_prompt.values()]
        share = agreement([[(a, b) for a, b in group if a is not None and b is not None] for group in both])
        if share is not None:
            agreed.append({"members": [one, other], "agreement": share})
    return agreed


def means(found: JudgedAnswers) -> dict[str, float]:
    """Mean of each kind of score over the answers that have it; for the total also by policy."""
    values: dict[str, list[float]] = defaultdict(list)
    for one, scores in zip(found.verified, found.scores, strict=True):
        for name, value in scores._asdict().items():
            if value is not None:
                values[f"mean_{name}"].append(value)
        if scores.score is not None:
            values[f"mean_score/{one.policy}"].append(scores.score)
    for name, given in found.programs.items():
        values[f"mean_program/{name}"] += [value for value in given if isinstance(value, float)]
    return {name: sum(given) / len(given) for name, given in sorted(values.items()) if given}
