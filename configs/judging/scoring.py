"""Configs of the stages that score answers by verifiers, reward models and language models."""

from collections.abc import Iterator
from typing import Self

from pydantic import Field, model_validator

from pedigree.configs.base import kind
from pedigree.configs.base.frozen import Arrived, Dtype, Frozen, Many, added
from pedigree.configs.base.shrink import MAX_UNKNOWN, TOKENS, Cut
from pedigree.configs.base.work import PROMPT_TOKENS, Amount, Amounts, PlannedStage, SamplingPlan, ScoringPlan, at_ports, generation, only
from pedigree.configs.judging.pools import Sample
from pedigree.configs.methods.language_model import ByEndpoint, speaker_sampling_plan
from pedigree.configs.methods.reward_terms import Ensemble, Mean, RewardProgram, distinct
from pedigree.configs.methods.rubrics import Rating


class Scorers(Frozen):
    """Scorers of answers: reward_weight * reward(prompt, answer) + rating_weight * rating, where rating is the mean over all rubrics, plus
    weight * program for each of `programs`."""

    reward_weight: float = Field(default=0.0, ge=0)
    """If above zero, the input `reward_models` is required."""
    ensemble: Ensemble = Mean(type="mean")
    """How to combine the normalized rewards of several reward models."""
    dtype: Dtype = "fp32"
    """Compute dtype of the reward models."""
    rating: Rating | None = None
    """Ratings by a language model, which enter the score with `rating_weight`."""
    rating_weight: float = Field(default=0.0, ge=0)
    """If above zero, `rating` is required. Ratings are 1 to 5, without normalization."""
    programs: Many[RewardProgram] = added(())
    """Functions of the project, as in the reward of `rlvr`: each enters the score with its `weight`."""
    max_unscored_share: float = Field(default=0.1, ge=0, lt=1)
    """The stage fails if more than this share of the answers has no score, e.g. because a judge is down or unsuited to the prompts."""

    @model_validator(mode="after")
    def _check_used(self) -> Self:
        if self.reward_weight == 0 and self.ensemble.type != "mean":
            raise ValueError(f"ensemble {self.ensemble.type} has no effect, because reward_weight is 0: raise it, or remove ensemble")
        if self.rating is not None and self.rating_weight == 0:
            raise ValueError("rating has no effect, because rating_weight is 0: raise it, or remove rating")
        if self.rating is None and self.rating_weight > 0:
            raise ValueError(f"rating_weight is {self.rating_weight}, but rating is not set: set it, or remove rating_weight")
        distinct(self.programs, "programs")
        return self

    @property
    def rated_by_policy(self) -> bool:
        """Whether the policy at the input `judge` gives ratings."""
        return self.rating is not None and self.rating.by.type == "policy"

    @property
    def scores(self) -> bool:
        """Whether anything scores answers, apart from verifiers."""
        return bool(self.reward_weight or self.rating_weight or any(program.weight for program in self.programs))


def scorers_need(config: Scorers) -> frozenset[str]:
    """Inputs that the config requires for scoring."""
    return frozenset({"reward_models"} if config.reward_weight else ()) | frozenset({"judge"} if config.rated_by_policy else ())


def scorers_problem(config: Scorers, arrived: Arrived) -> str | None:
    """Error message if these models cannot score under the config, else None."""
    given = list(arrived.get("reward_models", {}))
    if given and config.reward_weight == 0:
        return f"reward_models is {', '.join(given)}, but reward_weight is 0: raise it, or remove the input"
    if given and len(given) < 2 and config.ensemble.type != "mean":
        return f"ensemble {config.ensemble.type} needs at least 2 reward models, not 1 ({given[0]}): add some, or remove ensemble"
    if arrived.get("judge") and not config.rated_by_policy:
        return f"judge is {', '.join(arrived['judge'])}, but is not used: set rating with `by: {{type: policy}}`, or remove the input"
    return None


class Judge(Scorers):
    """Scores completions: score = verifier_weight * verifier(answer) + reward_weight * reward(prompt, answer) + rating_weight * rating,
    where rating is the mean over all rubrics, plus weight * program for each of `programs`."""

    verifier_weight: float = Field(default=1.0, ge=0)
    """For prompts with a verifier other than `facts`; otherwise this term is omitted."""

    @model_validator(mode="after")
    def _check_weights(self) -> "Judge":
        if self.verifier_weight == 0 and not self.scores:
            raise ValueError(
                "verifier_weight, reward_weight, rating_weight and the weights of programs are all 0, so no answer gets a score: raise one"
            )
        return self


class Overoptimization(Frozen):
    """Best-of-n under the judgments' reward models, measured by a gold reward (Gao et al. 2022, arXiv 2210.10760, §3).

    The gold reward is the verifier's score, or the reward in other judgments of the same answers at `gold`.
    """

    max_n: int | None = Field(default=None, ge=2)
    """Largest n. Prompts with fewer scored answers are skipped and counted; by default, the number of answers that every prompt has."""
    resamples: int = Field(default=2000, ge=100)
    """Bootstrap resamples of prompts for each 95 % interval."""
    seed: int = Field(default=0, ge=0)
    """Seed of the bootstrap."""


def overoptimization_problem(config: Overoptimization, arrived: Arrived) -> str | None:
    """Error message if these judgments contain nothing to measure, else None."""
    for port in ("judgments", "gold"):
        for label, given in arrived.get(port, {}).items():
            if isinstance(given.config, Sample):
                return f"{port} {label} are conversations, scored without reward models: judge completions"
            if isinstance(given.config, Judge) and given.config.reward_weight == 0:
                return f"{port} {label} contains no rewards, because its reward_weight is 0: raise it there, and add reward_models"
    return None


SCORERS = {
    "reward_models": kind.port("reward_model", many=True, optional=True),
    "judge": kind.port("policy", optional=True),
}
"""Inputs that score answers."""


def shrink_scorers(cut: Cut) -> None:
    """Short ratings, by the rehearsal's own judge."""
    assert isinstance(cut.config, Scorers)
    if (cut.config.rating or cut.config.programs) and cut.get("max_unscored_share") < MAX_UNKNOWN:
        cut.set("max_unscored_share", MAX_UNKNOWN, "thresholds")
    if cut.config.rating is None:
        return
    cut.most("rating.sampling.max_tokens", TOKENS, "lengths")
    if cut.config.rated_by_policy:  # a tiny model has no opinion: its ratings are drawn
        cut.set("rating.sampling.temperature", 1.0, "judges")
    if isinstance(cut.config.rating.by, ByEndpoint):
        cut.set("rating.by.base_url", cut.stand_ins.judge_url, "judges")


RUBRIC_TOKENS = 400
"""That a rubric adds to the rated text (those in `configs/rubrics` have 300 to 500)."""


def scorers_sampling_plan(config: Scorers) -> SamplingPlan | None:
    """How the policy at `judge` rates."""
    rating = config.rating
    return speaker_sampling_plan(rating.by, "judge", rating.sampling.max_tokens, "rating.by") if rating else None


def scorers_scoring_plan(config: Scorers) -> ScoringPlan | None:
    """How reward models score."""
    return ScoringPlan("reward_models", config.dtype, scalar_head=True) if config.reward_weight else None


def scorers_work(stage: PlannedStage) -> Amounts:
    """Every row is rated on each rubric by a language model, or scored by each reward model."""
    config, plan = stage.config, scorers_sampling_plan(stage.config)
    rows, document = at_ports(stage, ("completions", "data"))
    if plan is not None:
        requests = rows.times(len(config.rating.rubrics)) if rows else None
        return generation(requests, Amount((document.value if document else _longest(stage)) + RUBRIC_TOKENS, "estimated"), plan)
    models = max(1, len(stage.inputs.get("reward_models", {})))
    computed = Amount(document.value - _shared(stage), document.how) if document else None
    return Amounts(rows=rows, document=document, tokens=rows.times(computed).times(models) if rows and computed else None)


def _shared(stage: PlannedStage) -> float:
    """Tokens of an answer's prompt that a reward model computes for the answers before it; 0 where the prompts are unknown."""
    sample = sampled(stage)
    prompt = only(sample, "prompts").row_tokens if sample else None
    return prompt * (1 - 1 / answers_of_prompt(sample)) if sample and prompt else 0.0


def _longest(stage: PlannedStage) -> int:
    """Tokens of a question with its answer, at most, before there are any."""
    config = only(stage, "completions", "data").config
    return PROMPT_TOKENS + (config.sampling.max_tokens if isinstance(config, Sample) else PROMPT_TOKENS)


def answers_of_prompt(sample: PlannedStage) -> int:
    """Answers to one prompt, of all policies that are drawn for it."""
    return sample.config.samples_per_prompt * (sample.config.policies_per_prompt or len(sample.inputs["policies"]))


def too_few_answers(stage: PlannedStage, needed: int) -> Iterator[str]:
    """That fewer answers to a prompt are sampled than a stage behind completions or judgments compares."""
    sample = sampled(stage)
    if sample and (answers := answers_of_prompt(sample)) < needed:
        yield f"it compares {needed} answers to a prompt, but there is {answers}: raise samples_per_prompt or add policies there"


def sampled(stage: PlannedStage) -> PlannedStage | None:
    """The `sample` stage behind completions, or behind judgments of them; None where another kind made those."""
    if isinstance(stage.config, Sample):
        return stage
    return next(map(sampled, stage.inputs.get("completions", {}).values()), None)
