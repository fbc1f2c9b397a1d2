"""Identity of the stages whose data models make or measure: sampling, judging, evaluation, selection. What is made of judged answers:
`configs/judging/pairing.py`, `configs/judging/keeping.py`."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.base.frozen import Arrived, Dtype, Frozen, Many
from configs.judging.rating import Rating
from configs.methods.training import Sampling
from configs.rows.datasets import PrepareData
from configs.rows.suite_forms import Form


class Window(Frozen):
    """A slice of a prompt pool: rows [index * count, (index + 1) * count). Rounds use fresh prompts by other indices."""

    count: int = Field(ge=1)
    index: int = Field(default=0, ge=0)


class OnPolicy(Frozen):
    """Which policies of a pool are the one that is to be trained, and how many prompts they answer."""

    policies: Many[str] = Field(min_length=1)
    """Labels at the input `policies`."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Share of the prompts that one of them answers, beside `policies_per_prompt` - 1 others; the other prompts get answers of others only.
    A hash of (seed, prompt id) decides. When absent, they are drawn like the others."""


Temperature = Annotated[float, Field(ge=0)]


class PoolSampling(Frozen):
    """How a policy's answers to a prompt are drawn."""

    temperature: Temperature | Many[Temperature] = 1.0
    """0 is greedy. Of a list, a policy's answers to a prompt take one after the other by their index, and each row says its own."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(ge=1)
    """Longest answer, in tokens."""

    @field_validator("temperature")
    @classmethod
    def several_differ(cls, value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if isinstance(value, tuple) and (len(value) < 2 or len(set(value)) < len(value)):
            raise ValueError(f"a list of temperatures has several different ones, and {list(value)} has not: [0.6, 1.0], or 1.0 alone")
        return value

    @property
    def temperatures(self) -> tuple[float, ...]:
        """In the order in which answers take them."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @property
    def first(self) -> Sampling:
        """How a policy's first answer to a prompt is drawn."""
        return Sampling(temperature=self.temperatures[0], top_p=self.top_p, max_tokens=self.max_tokens)


class Sample(Frozen):
    """Answers of one or several policies to prompts: of all of them, or of some that are drawn for each prompt."""

    sampling: PoolSampling
    samples_per_prompt: int = Field(ge=1)
    """Per policy; a multiple of the number of temperatures."""
    prompts: Window
    policies_per_prompt: int | None = Field(default=None, ge=1)
    """How many of the policies answer a prompt, drawn by hash of (seed, prompt id); all when absent. Tülu 3 draws 4 of 22."""
    on_policy: OnPolicy | None = None
    """Their answers are marked, through `judge`, up to the preferences that `pair` makes of them; shares are in the metrics."""
    chunk_size: Annotated[int, Field(ge=1)] | Literal["continuous"] = 64
    """Requests submitted together: the unit of generation and resume, which gives the same bits whatever was interrupted. `continuous`: all
    at once, each kept as it ends; nobody waits for the longest answer of a chunk, and a run that was interrupted may draw other tokens than
    one that was not, which its marks say."""
    dtype: Dtype = "bf16"
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def temperatures_have_equally_many(self) -> "Sample":
        temperatures = self.sampling.temperatures
        if self.samples_per_prompt % len(temperatures):
            raise ValueError(
                f"samples_per_prompt {self.samples_per_prompt} cannot be shared out evenly to the {len(temperatures)} temperatures "
                f"{', '.join(map(str, temperatures))}: make it a multiple of {len(temperatures)}, or name others"
            )
        return self

    @model_validator(mode="after")
    def a_share_is_of_draws(self) -> "Sample":
        if self.on_policy is not None and self.on_policy.share is not None and self.policies_per_prompt is None:
            raise ValueError(
                f"on_policy.share {self.on_policy.share} says how often the policy is drawn, and without policies_per_prompt all policies "
                "answer every prompt: set policies_per_prompt, or leave the share out"
            )
        return self


def sample_problem(config: Sample, arrived: Arrived) -> str | None:
    """Why so many policies cannot be drawn from this pool, or None."""
    pool = list(arrived.get("policies", {}))
    own = config.on_policy.policies if config.on_policy else ()
    unknown = [label for label in own if label not in pool]
    if unknown:
        return f"on_policy.policies names {', '.join(unknown)}, and the input policies has {', '.join(pool)}"
    count = config.policies_per_prompt
    if count is None:
        return None
    if count > len(pool):
        return f"policies_per_prompt is {count}, and the input policies has {len(pool)}: lower it, or name more policies"
    share = config.on_policy.share if config.on_policy else None
    others, needed = len(pool) - len(set(own)), count if share != 1 else count - 1
    if share is not None and others < needed:
        return (
            f"policies_per_prompt {count} with on_policy.share {share} needs {needed} policies that are not on_policy, and the input "
            f"policies has {others}: name more, or lower policies_per_prompt"
        )
    return None


class Mean(Frozen):
    """The members' mean; of one reward model its own reward."""

    formula: ClassVar[str] = "R̄ = (1/k) Σ_i R_i, with R_i = (s_i - mean_i) / std_i over member i's held-out answers"
    source: ClassVar[str] = "Lakshminarayanan et al. 2017, arXiv 1612.01474; for rewards: Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["mean"]


class WorstCase(Frozen):
    """The least friendly member's opinion (WCO)."""

    formula: ClassVar[str] = "min_i R_i"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["worst_case"]


class UncertaintyWeighted(Frozen):
    """The mean, less what the members disagree by (UWO)."""

    formula: ClassVar[str] = "R̄ - weight · (1/k) Σ_i (R_i - R̄)²"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, eq. 5"

    type: Literal["uncertainty_weighted"]
    weight: float = Field(default=0.5, gt=0)
    """λ: what a variance of 1 among the members costs; the paper takes 0.5 for best-of-n and 0.1 for PPO."""


Ensemble = Annotated[Mean | WorstCase | UncertaintyWeighted, Field(discriminator="type")]


class Scorers(Frozen):
    """Models that score answers: reward_weight * reward(prompt, answer) + rating_weight * rating, the rating being the mean over all
    rubrics."""

    reward_weight: float = Field(default=0.0, ge=0)
    """Needs the input `reward_models` when above zero."""
    ensemble: Ensemble = Mean(type="mean")
    """How the normalised rewards of several reward models become one."""
    dtype: Dtype = "fp32"
    """Compute dtype of the reward models."""
    rating: Rating | None = None
    """Ratings by a language model, which `rating_weight` makes part of the score."""
    rating_weight: float = Field(default=0.0, ge=0)
    """Needs `rating` when above zero. Ratings are 1 to 5, and are not normalised."""
    max_unscored_share: float = Field(default=0.1, ge=0, lt=1)
    """The stage fails when more than this share of the answers has no score: the judges do not fit the prompts, or one is down."""

    @model_validator(mode="after")
    def an_ensemble_has_weight(self) -> Self:
        if self.reward_weight == 0 and self.ensemble.type != "mean":
            raise ValueError(f"ensemble {self.ensemble.type} combines rewards, and reward_weight is 0: raise it, or leave ensemble out")
        return self

    @model_validator(mode="after")
    def a_rating_has_weight(self) -> Self:
        if self.rating is not None and self.rating_weight == 0:
            raise ValueError("rating says how answers are rated, and rating_weight is 0: raise it, or leave rating out")
        if self.rating is None and self.rating_weight > 0:
            raise ValueError(f"rating_weight is {self.rating_weight}, and nobody rates: say who does, and on what, under rating")
        return self

    @property
    def rated_by_policy(self) -> bool:
        """Whether the input `judge` is asked for ratings."""
        return self.rating is not None and self.rating.by.type == "policy"


def scorers_need(config: Scorers) -> frozenset[str]:
    """Inputs without which nobody could score as the config says."""
    return frozenset({"reward_models"} if config.reward_weight else ()) | frozenset({"judge"} if config.rated_by_policy else ())


def scorers_problem(config: Scorers, arrived: Arrived) -> str | None:
    """Why these models cannot score as the config says, or None."""
    given = list(arrived.get("reward_models", {}))
    if given and config.reward_weight == 0:
        return f"reward_models is {', '.join(given)}, and reward_weight is 0, so that nobody asks them: raise it, or leave the input out"
    if given and len(given) < 2 and config.ensemble.type != "mean":
        return f"ensemble {config.ensemble.type} needs 2 reward models or more, not 1 ({given[0]}): name others, or leave ensemble out"
    if arrived.get("judge") and not config.rated_by_policy:
        return f"judge is {', '.join(arrived['judge'])}, and nobody asks it: give a rating with `by: {{type: policy}}`, or leave it out"
    return None


class Judge(Scorers):
    """Scores completions: score = verifier_weight * verifier(answer) + reward_weight * reward(prompt, answer) + rating_weight * rating,
    the rating being the mean over all rubrics."""

    verifier_weight: float = Field(default=1.0, ge=0)
    """Of prompts that have a verifier; elsewhere this term is left out."""

    @model_validator(mode="after")
    def something_is_asked(self) -> "Judge":
        if self.verifier_weight == 0 and self.reward_weight == 0 and self.rating_weight == 0:
            raise ValueError("verifier_weight, reward_weight and rating_weight are all 0, so that no answer gets a score: raise one")
        return self


class Overoptimization(Frozen):
    """Best-of-n by the judgments' reward models, measured by a gold reward (Gao et al. 2022, arXiv 2210.10760, §3).

    The gold reward is the verifier's score, or the reward of other judgments of the same answers at `gold`.
    """

    max_n: int | None = Field(default=None, ge=2)
    """Prompts with fewer scored answers are left out and counted; when absent, the number that every prompt has."""
    resamples: int = Field(default=2000, ge=100)
    """Bootstrap resamples of prompts behind each 95 % interval."""
    seed: int = Field(default=0, ge=0)


def overoptimization_problem(config: Overoptimization, arrived: Arrived) -> str | None:
    """Why there is nothing to measure by these judgments, or None."""
    for port in ("judgments", "gold"):
        for label, given in arrived.get(port, {}).items():
            if isinstance(given.config, Judge) and given.config.reward_weight == 0:
                return f"{port} {label} holds no rewards, its reward_weight is 0: raise it there, and give it reward models"
    return None


class Evaluate(Frozen):
    """Scores policies on suites, with one engine, item by item."""

    sampling: Sampling | None = None
    """How answers are drawn for suites without a form, which need it; a form says it itself."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest answer, in tokens, where a form allows for more: for rehearsals and small models. Part of the task's hash."""
    max_unknown: float = Field(default=0.05, ge=0, lt=1)
    """The stage fails when more than this share of a policy's answers on a task has an unknown score."""
    chunk_size: int = Field(default=64, ge=1)
    resamples: int = Field(default=2000, ge=100)
    """Bootstrap resamples of items behind each 95 % interval."""
    dtype: Dtype = "bf16"
    seed: int = Field(default=0, ge=0)

    def sampling_of(self, form: Form | None) -> Sampling | None:
        """How a suite's answers are drawn: as its form says, else as this evaluation does; None where its choices are compared."""
        if form is None:
            return self.sampling
        if form.draw is None:
            return None
        longest = min(form.draw.max_tokens, self.max_tokens or form.draw.max_tokens)
        return Sampling(temperature=form.draw.temperature, top_p=form.draw.top_p, max_tokens=longest)


def evaluate_problem(config: Evaluate, arrived: Arrived) -> str | None:
    """Why these suites cannot be asked as the config says, or None."""
    made = {label: given.config for label, given in arrived.get("suites", {}).items() if isinstance(given.config, PrepareData)}
    without = [label for label, suite in made.items() if suite.form is None]
    if without and config.sampling is None:
        return f"suite {without[0]} has no form, which would say how answers are drawn: set sampling"
    if made and not without and config.sampling is not None:
        return f"all suites have forms ({', '.join(made)}), which say how answers are drawn: leave sampling out"
    if made and len(without) == len(made) and config.max_tokens is not None:
        return "max_tokens bounds what forms say, and no suite has one: set sampling.max_tokens"
    return None


class Select(Frozen):
    """The candidate with the highest development score; the earlier one on equal scores."""

    task: str | Many[str] | None = None
    """One task's score, or the mean over a list of tasks; the mean over all when absent."""

    @field_validator("task")
    @classmethod
    def tasks_are_named_once(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
            raise ValueError(f"task {list(value)} must name one task or several distinct ones: gsm8k, or [minerva_math, ifeval]")
        return value
