"""Config of rewards: the verifier's score, functions of the project, models, votes, and terms that shape them."""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from pedigree.configs.base.frozen import Arrived, Dtype, Frozen, Many, added
from pedigree.configs.base.python_files import FunctionName, PythonFile, keyword_arguments
from pedigree.configs.methods.language_model import Served
from pedigree.configs.methods.rubrics import Rating

COLUMNS = ("prompts", "completions", "completion_ids", "id", "source", "verifier", "verifier_score", "finish_reason", "template_arguments")
"""Keyword arguments of a reward function in TRL's form, before those of the rows' verifiers."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class Term(Frozen):
    """A term of the reward."""

    needs_score: ClassVar[bool] = False
    """Whether it is a function of the verifier's score."""
    compares: ClassVar[bool] = False
    """Whether it compares the answers to a prompt."""
    weight: float = 1.0
    """Factor in the sum, possibly negative; with 0 the term is only measured."""
    name: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]*$")
    """Its column `reward_NAME` in the curve of `rlvr`; by default its type; for a program the name of its function, or of its file if the
    function is called `reward`."""

    @property
    def called(self) -> str:
        return self.name or vars(self)["type"]


class RewardProgram(Term):
    """The number that a Python function of the project returns for an answer. The file is a dependency of the stage.

    It runs in a sandbox with Python's standard library and numpy: no network, no files except a small `/tmp`, 1 GiB of memory per process.
    What it returns as None is no term of that answer's reward; an exception, a time limit, or anything but a finite number makes the
    rewards of the answers concerned unknown.
    """

    formula: ClassVar[str] = "function(prompts, completions, **columns)_i"
    source: ClassVar[str] = "TRL, GRPOTrainer, reward_funcs; verl, custom_reward_function"
    type: Literal["program"]
    path: PythonFile
    """A `.py` file, relative to the project root."""
    function: FunctionName = "reward"
    """Name of the function, possibly `async`. It receives those keyword arguments that it declares."""
    form: Literal["trl", "verl"] = "trl"
    """`trl`: the answers to one prompt per call, as lists, and a list of numbers back; `verl`: one answer per call, as
    `compute_score(data_source, solution_str, ground_truth, extra_info)`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments, as JSON values."""
    seconds: float = Field(default=60.0, gt=0)
    """Time limit of the answers to one prompt; for an `async` function of a trusted file, of all answers of a step of `rlvr`, and
    elsewhere of the answers to 64 prompts."""
    trusted: bool = False
    """Run the function outside the sandbox, with the network, the files and the packages of this environment."""

    @property
    def called(self) -> str:
        return self.name or (PurePosixPath(self.path).stem if self.function == "reward" else self.function)

    @model_validator(mode="after")
    def _check_arguments(self) -> "RewardProgram":
        keyword_arguments(self.arguments, VERL_ARGUMENTS if self.form == "verl" else COLUMNS)
        return self


def distinct(terms: Iterable[Term], field: str) -> None:
    """Raise ValueError if two terms of a field have the same name."""
    names = [term.called for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{field} has two terms called {name}: give one of them another `name`")


class Mean(Frozen):
    """The mean of the members; for a single reward model, its own reward."""

    formula: ClassVar[str] = "R̄ = (1/k) Σ_i R_i, with R_i = (s_i - mean_i) / std_i over member i's held-out answers"
    source: ClassVar[str] = "Lakshminarayanan et al. 2017, arXiv 1612.01474; for rewards: Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["mean"]


class WorstCase(Frozen):
    """The minimum over the members (WCO)."""

    formula: ClassVar[str] = "min_i R_i"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["worst_case"]


class UncertaintyWeighted(Frozen):
    """The mean, minus a penalty for disagreement between members (UWO)."""

    formula: ClassVar[str] = "R̄ - weight · (1/k) Σ_i (R_i - R̄)²"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, eq. 5"

    type: Literal["uncertainty_weighted"]
    weight: float = Field(default=0.5, gt=0)
    """λ: penalty per unit of variance between members; the paper uses 0.5 for best-of-n and 0.1 for PPO."""


Ensemble = Annotated[Mean | WorstCase | UncertaintyWeighted, Field(discriminator="type")]
"""How the rewards of several models become one."""


class ModelReward(Term):
    """The reward of the models at the input `reward_models`, as in `judge`: normalized, and combined if there are several.

    On GPUs the models are loaded next to the engines while they score, one after the other, and leave the memory to the trainer
    afterwards. An answer that one of them cannot read has no reward.
    """

    formula: ClassVar[str] = "ensemble(R_1, ..., R_k), R_i = (s_i - mean_i) / std_i over model i's held-out answers; one model: R_1"
    source: ClassVar[str] = "Ouyang et al. 2022, arXiv 2203.02155, §3.5; ensembles: Coste et al. 2024, arXiv 2310.02743, §3"
    type: Literal["reward_model"]
    models: Many[str] | None = None
    """Labels of the input's models that this term uses; `null`: all."""
    ensemble: Ensemble = Mean(type="mean")
    """How the rewards of several models become one."""
    dtype: Dtype = "bf16"
    """Compute dtype of the models."""


class RatedReward(Term, Rating):
    """The mean rating of an answer by a language model, as in `judge`: 1 to 5, one question for each rubric.

    Replies are stored, so that an interrupted run asks nothing twice. If the model is down, the attempt ends.
    """

    formula: ClassVar[str] = "mean over the rubrics of the rating; unknown if one has none"
    source: ClassVar[str] = "Cui et al. 2023, arXiv 2310.01377 (UltraFeedback), app. G.1; Tülu 3, arXiv 2411.15124, §5.2.1"
    type: Literal["rating"]
    by: Served  # pyright: ignore[reportIncompatibleVariableOverride]
    """The model that rates: a policy at the input `judge`, or a server."""
    max_unanswered_share: float = Field(default=0.1, ge=0, lt=1)
    """The attempt ends if the model leaves more than this share of a batch's answers without a rating."""


class Majority(Term):
    """Agreement with the most frequent answer to the prompt, which needs no ground truth.

    Among equally frequent answers, the one that occurs first is taken. An answer without a result has no vote and agrees with none. One
    that can be neither proved equal nor different has an unknown reward.
    """

    compares: ClassVar[bool] = True
    formula: ClassVar[str] = "1 if a_i = a*, else 0; a* = argmax_a |{j : a_j = a}| over the answers to the prompt"
    source: ClassVar[str] = "Zuo et al. 2025, arXiv 2504.16084 (TTRL), §2"
    type: Literal["majority"]
    compared_by: Literal["math", "strict_math", "arithmetic", "gsm"] = "math"
    """The verifier whose rules find the results of answers and compare them."""


class Overlong(Term):
    """Soft overlong punishment: nothing up to a buffer before `max_tokens`, then linearly down to −1."""

    formula: ClassVar[str] = "0 if n ≤ L - buffer, else (L - buffer - n) / buffer; n tokens of the answer, L = max_tokens"
    source: ClassVar[str] = "Yu et al. 2025, arXiv 2503.14476 (DAPO), eq. 13"
    type: Literal["overlong"]
    buffer: int = Field(ge=1)
    """Tokens before `max_tokens` in which the penalty grows; DAPO: 4,096 of 20,480."""


class Length(Term):
    """Length reward: the shortest answers to a prompt gain up to ½, the longest lose up to ½; wrong answers gain nothing."""

    needs_score: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "λ if right, else min(0, λ); λ = ½ - (n - min n) / (max n - min n) over the answers to the prompt; 0 if all are equally long"
    )
    source: ClassVar[str] = "Kimi Team 2025, arXiv 2501.12599 (Kimi k1.5), §2.3.3"
    type: Literal["length"]


class Cosine(Term):
    """Cosine reward: right answers gain less the longer they are, wrong ones lose less. Use it instead of `right`."""

    needs_score: ClassVar[bool] = True
    formula: ClassVar[str] = "r_L + ½(r_0 - r_L)(1 + cos(π n / L)), with r_0 and r_L of right or wrong answers; `exceeded` if n ≥ L"
    source: ClassVar[str] = "Yeo et al. 2025, arXiv 2502.03373, app. C.1"
    type: Literal["cosine"]
    right_short: float = 2.0
    """r_0 of right answers."""
    right_long: float = 1.0
    """r_L of right answers."""
    wrong_short: float = -10.0
    """r_0 of wrong answers."""
    wrong_long: float = 0.0
    """r_L of wrong answers."""
    exceeded: float | None = -10.0
    """Reward of an answer as long as `max_tokens`; `null`: that of the formula."""


class RepeatedNgrams(Term):
    """Repetition penalty: the share of n-grams of tokens that occur before in the answer."""

    formula: ClassVar[str] = "-(1 - different n-grams / n-grams); 0 for fewer than n tokens"
    source: ClassVar[str] = "Yeo et al. 2025, arXiv 2502.03373, app. C.2, as in TRL's get_repetition_penalty_reward"
    type: Literal["repetition"]
    ngram: int = Field(default=3, ge=1)
    """n."""


class Format(Term):
    """Format reward: the answer matches a regular expression from its beginning."""

    formula: ClassVar[str] = "1 if the pattern matches, else 0"
    source: ClassVar[str] = "DeepSeek-AI 2025, arXiv 2501.12948 (DeepSeek-R1), §2.2.2; TRL's think_format_reward"
    type: Literal["format"]
    pattern: str = Field(min_length=1)
    """Regular expression in which `.` matches line ends, and `^` and `$` match at lines; R1's is
    `^<think>(?!.*<think>)(.*?)</think>.*$`."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        import regex  # slow to load, and few recipes need it

        try:
            regex.compile(value)
        except regex.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value


class EnvironmentReward(Term):
    """What the conversation's environment gave for its turns; no term of a conversation in which it gave None for each."""

    formula: ClassVar[str] = "Σ_t r_t over the turns of the conversation"
    source: ClassVar[str] = "verl, BaseInteraction.generate_response"
    type: Literal["environment"]


RewardTerm = Annotated[
    RewardProgram | EnvironmentReward | ModelReward | RatedReward | Majority | Overlong | Length | Cosine | RepeatedNgrams | Format,
    Field(discriminator="type"),
]


class Reward(Frozen):
    """Reward of an answer: its verifier's score, and terms with weights. It is unknown if a part of it is."""

    formula: ClassVar[str] = "R = right · score + Σ_k weight_k · term_k, within `clip`; R = truncated for a truncated answer, if set"
    source: ClassVar[str] = "Lambert et al. 2024, arXiv 2411.15124 (Tülu 3), §6.2: right 10; open-instruct, non_stop_penalty: truncated −10"

    right: float = Field(default=1.0, ge=0)
    """Reward for a score of 1. It scales rewards relative to a KL penalty and to other terms, and has no effect on normalized advantages
    otherwise. With 0, prompts need no verifier unless a term does."""
    truncated: float | None = None
    """Reward of an answer truncated by `max_tokens`, regardless of its score and of all terms; `null`: according to them."""
    terms: Many[RewardTerm] = added(())
    """Terms to add, e.g. functions of the project."""
    clip: Many[float] | None = added(None)
    """Bounds `[low, high]` of the sum."""

    @property
    def verifies(self) -> bool:
        """Whether answers need a verifier's score."""
        return self.right > 0 or any(term.needs_score for term in self.terms)

    @property
    def programs(self) -> list[RewardProgram]:
        return [term for term in self.terms if isinstance(term, RewardProgram)]

    @property
    def ratings(self) -> list[RatedReward]:
        return [term for term in self.terms if isinstance(term, RatedReward)]

    @property
    def by_models(self) -> list[ModelReward]:
        return [term for term in self.terms if isinstance(term, ModelReward)]

    @model_validator(mode="after")
    def _check_terms(self) -> "Reward":
        if not self.right and not any(term.weight for term in self.terms):
            raise ValueError("right is 0 and no term has a weight, so all rewards would be 0: raise right, or add terms")
        distinct(self.terms, "terms")
        return self

    @field_validator("clip")
    @classmethod
    def _check_clip(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and not (len(value) == 2 and value[0] < value[1]):
            raise ValueError(f"clip is {[*value]}, but must be two bounds, the lower one first: e.g. [-1.0, 1.0]")
        return value


def reward_problem(reward: Reward, max_tokens: int, samples: int, greedy: bool) -> str | None:
    """Error message if the terms do not fit the sampling, else None."""
    for term in reward.terms:
        if isinstance(term, Overlong) and term.buffer > max_tokens:
            return f"the buffer of overlong is {term.buffer}, more than max_tokens {max_tokens}: lower it"
        if term.compares and (greedy or samples < 2):
            what = "remax rewards greedy answers alone" if greedy else f"samples_per_prompt is {samples}"
            return f"the term {term.called} compares the answers to a prompt, but {what}: use another term, e.g. overlong"
    return None


def model_problem(reward: Reward, arrived: Arrived) -> str | None:
    """Error message if the reward models do not fit the terms, else None."""
    given, used = arrived.get("reward_models", {}), set[str]()
    for term in reward.by_models:
        labels = given if term.models is None else term.models
        if not labels:
            return f"models of {term.called} is empty: name some of {', '.join(given)}, or remove models"
        for name in labels:
            if name not in given:
                return f"{term.called} uses the reward model {name}, but reward_models has {', '.join(given)}: use one of these"
        if len(labels) < 2 and term.ensemble.type != "mean":
            return f"ensemble {term.ensemble.type} of {term.called} needs at least 2 reward models, not 1: add some, or remove ensemble"
        used.update(labels)
    if unused := sorted(given.keys() - used):
        return f"reward_models has {', '.join(unused)}, which no term of reward uses: add {{type: reward_model}}, or remove the input"
    return None
