"""Identity of `pair`: which answers to a prompt are compared, which of the preferences are kept, and what training cannot take of them."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from configs.base.frozen import Arrived, Frozen
from configs.judging.answers import Judge
from configs.methods.preference import SppoSoft
from configs.methods.training import PreferenceTrain, RewardModel, reference_problem


class BestVsWorst(Frozen):
    """The best answer against the worst: `max_min` of RLHF Workflow (Dong et al. 2024, arXiv 2405.07863)."""

    type: Literal["best_vs_worst"]


class BestVsRandomLower(Frozen):
    """The best answer against one that is drawn among those with a lower score (Lambert et al. 2024, arXiv 2411.15124, §5.2.1)."""

    type: Literal["best_vs_random_lower"]


class TopVsBottom(Frozen):
    """One of the best answers against one of the worst, drawn among all such pairs: less is chosen by the errors of one score than where
    the very best meets the very worst."""

    type: Literal["top_vs_bottom"]
    k: int = Field(ge=1)
    """So many of the best, and as many of the worst; with 1 it is `best_vs_worst`."""


class AllPairs(Frozen):
    """Every two different texts, the better one first, or some of these pairs, drawn."""

    type: Literal["all_pairs"]
    per_prompt: int | None = Field(default=None, ge=1)
    """At most so many pairs of one prompt; n answers make up to n(n - 1)/2. They share answers: a reward model that is measured on pairs
    held out takes `ranked`, whose pairs it keeps on one side."""


class Ranked(Frozen):
    """All different texts in one list, best first (Ouyang et al. 2022, arXiv 2203.02155, §3.5)."""

    type: Literal["ranked"]


class Delta(Frozen):
    """A stronger policy's answer against a weaker one's, without a judge: delta learning (Geng et al. 2025, arXiv 2507.06187). Reads
    `completions`; scores are null."""

    type: Literal["delta"]
    strong: str
    """Label of the policy whose answers are chosen, at the input `policies` of the stage that sampled;"""
    weak: str
    """of the one whose answers are rejected."""

    @model_validator(mode="after")
    def they_differ(self) -> "Delta":
        if self.strong == self.weak:
            raise ValueError(f"strong and weak are both {self.strong}: name two policies")
        return self


class Relaxed(Frozen):
    """An answer to a prompt with constraints, as `constrain` makes it, against an answer to the prompt that it was made of, which was given
    without knowing of them (Lambert et al. 2024, arXiv 2411.15124, §5.2.1: the answer to the relaxed prompt is rejected). Reads
    `completions` and `relaxed`, and joins them by the ids of their prompts."""

    type: Literal["relaxed"]
    verified: bool = True
    """Whether the prompt's verifier decides: the chosen answer follows all constraints, the rejected one does not, which is no matter of
    course where constraints are easily met by chance. Without, scores are null."""


def by_name(value: Any) -> Any:
    """`ranked` is short for `{type: ranked}`."""
    return {"type": value} if isinstance(value, str) else value


Strategy = Annotated[
    BestVsWorst | BestVsRandomLower | TopVsBottom | AllPairs | Ranked | Delta | Relaxed,
    Field(discriminator="type"),
    BeforeValidator(by_name),
]
STRATEGIES: tuple[str, ...] = tuple(get_args(one.model_fields["type"].annotation)[0] for one in get_args(get_args(Strategy)[0]))
"""Their names."""
Choice = Literal["disagreement", "smallest_gap", "largest_gap", "random"]
Number = Literal["score", "win_rate", "verifier_score", "reward", "rating"]


class Budget(Frozen):
    """How many preferences are kept, of all prompts together, and which; a hash of (seed, id) decides between equal ones."""

    pairs: int = Field(ge=1)
    """At most so many."""
    choose: Choice
    """`disagreement`: those with the highest variance of σ(r_w - r_l) over the members of an ensemble of reward models, r being a member's
    raw reward (Christiano et al. 2017, arXiv 1706.03741, §2.2.4); `smallest_gap`: those whose answers are closest by score, where a judge
    is least certain; `largest_gap`: those that are clearest; `random`: no matter which. Of a list its first and last answer count."""


class Pair(Frozen):
    """Answers to each prompt as preferences; those that say nothing (ties), or are out of the bounds, are dropped and counted by reason."""

    strategy: Strategy = BestVsWorst(type="best_vs_worst")
    """Which answers to a prompt are compared. One without arguments may be written as its name alone: `strategy: ranked`."""
    by: Number = "score"
    """What answers are compared by, and what is written as their score: a number of the judgments. Within a prompt `win_rate` ranks as
    `score` does, and its gaps are differences of probabilities, whatever the judge's scale. The `win_rate` that goes with an answer is
    that of `score` always, whatever this is, and `sppo_soft` trains on it."""
    length_penalty: float = Field(default=0.0, ge=0)
    """λ: what a character of an answer costs: compared by s - λ·length, as `max_min_p` of RLHF Workflow does with λ = 0.001 (Dong et al.
    2024, arXiv 2405.07863). A policy that is trained on it becomes briefer."""
    min_gap: float = Field(default=0.0, ge=0)
    """Least difference between the scores of the two answers of a pair, or of the best and the worst of a list."""
    max_gap: float | None = Field(default=None, gt=0)
    """Largest such difference: near misses instead of what any model can tell apart."""
    min_best: float | None = None
    """Least score of the first answer, what `length_penalty` takes off taken off: without one, with a verifier's scores and 1, nothing
    wrong is ever chosen."""
    ties: Literal["drop", "keep"] = "drop"
    """Prompts whose answers are all equally good: `keep` makes a pair of `strength` 0.5 of them, which losses that take uncertain pairs
    read as "neither", and which holds a policy where it is."""
    truncated: Literal["keep", "drop"] = "keep"
    """Answers that were cut off by `max_tokens`, which stay without an end-of-turn token: `keep`, since one that loses to an answer that
    ended is what teaches a policy to come to an end (so do TRL and open-instruct, which may punish them by a penalty); `drop` for judges
    that see no difference. Both are counted."""
    budget: Budget | None = None
    """Keeps the most informative preferences only; the others are counted as `over budget`."""
    min_pairs: int = Field(default=1, ge=1)
    """The stage fails with fewer preferences."""
    label_noise: float = Field(default=0.0, ge=0, le=0.5)
    """Probability that the two answers of a pair are exchanged, by hash of (seed, id): a judge that errs, made on purpose."""
    seed: int = Field(default=0, ge=0)
    """Decides the order of equally good answers, which are drawn, and which pairs `label_noise` exchanges, by hash."""

    @model_validator(mode="after")
    def noise_is_of_pairs(self) -> "Pair":
        if self.label_noise and self.strategy.type == "ranked":
            raise ValueError(f"label_noise {self.label_noise} exchanges the answers of pairs, and strategy is ranked: take one of pairs")
        return self

    @model_validator(mode="after")
    def bounds_have_room(self) -> "Pair":
        if self.max_gap is not None and self.max_gap < self.min_gap:
            raise ValueError(f"max_gap {self.max_gap} is below min_gap {self.min_gap}, and no pair is between: raise it, or lower min_gap")
        if self.budget is not None and self.budget.pairs < self.min_pairs:
            raise ValueError(f"budget.pairs {self.budget.pairs} is below min_pairs {self.min_pairs}: raise it, or lower min_pairs")
        return self

    @model_validator(mode="after")
    def ties_are_of_pairs(self) -> "Pair":
        if self.ties == "keep" and self.strategy.type == "ranked":
            raise ValueError("ties: keep makes pairs of strength 0.5, and strategy is ranked: take one of pairs")
        if self.ties == "keep" and self.min_gap:
            raise ValueError(f"min_gap {self.min_gap} drops what is close, and ties: keep keeps what is closest: leave one out")
        return self

    @model_validator(mode="after")
    def without_a_judge_nothing_is_compared(self) -> "Pair":
        if self.judged:
            return self
        kind = self.strategy.type
        compared = [name for name in COMPARING if getattr(self, name) != Pair.model_fields[name].default]
        if compared:
            raise ValueError(f"strategy {kind} compares no scores, and {compared[0]} is about them: leave it out")
        if self.budget is not None and self.budget.choose != "random":
            raise ValueError(f"strategy {kind} has no scores to choose by {self.budget.choose}: write choose: random")
        return self

    @property
    def judged(self) -> bool:
        """Whether scores decide which of two answers is the better one, rather than who gave it, and to what."""
        return not isinstance(self.strategy, Delta | Relaxed)

    @property
    def scored(self) -> bool:
        """Whether its answers have scores."""
        return self.judged or (isinstance(self.strategy, Relaxed) and self.strategy.verified)


COMPARING = ("by", "length_penalty", "min_gap", "max_gap", "min_best", "ties")
"""Fields of `Pair` that are about scores."""


def pair_needs(config: Pair) -> frozenset[str]:
    match config.strategy:
        case Delta():
            return frozenset({"completions"})
        case Relaxed():
            return frozenset({"completions", "relaxed"})
    return frozenset({"judgments"})


def pair_problem(config: Pair, arrived: Arrived) -> str | None:
    """Why no preferences can be made of what arrived as the config says, or None."""
    needed = pair_needs(config)
    other = next((port for port in arrived if port not in needed), None)
    if other is not None:
        reads = " and ".join(sorted(needed))
        return f"strategy {config.strategy.type} reads {reads}: leave the input {other} ({', '.join(arrived[other])}) out"
    missing = unjudged(config.by, arrived)
    if missing or config.budget is None or config.budget.choose != "disagreement":
        return missing
    for label, given in arrived.get("judgments", {}).items():
        if isinstance(given.config, Judge) and given.config.reward_weight == 0:
            return f"budget.choose disagreement is that of reward models, and judgments {label} asks none: give it two or more"
    return None


def unjudged(by: Number, arrived: Arrived) -> str | None:
    """Why the judgments that arrived lack the number that answers are compared by, or None."""
    for label, given in arrived.get("judgments", {}).items():
        if not isinstance(given.config, Judge):
            continue
        if by == "reward" and given.config.reward_weight == 0:
            return f"by reward: judgments {label} holds none, its reward_weight is 0: raise it there, or compare by something else"
        if by == "rating" and given.config.rating is None:
            return f"by rating: judgments {label} holds none: give it a rating, or compare by something else"
    return None


def preference_problem(config: PreferenceTrain, arrived: Arrived) -> str | None:
    """Why the loss cannot take what arrived, or None."""
    for label, made in made_pairs(arrived).items():
        if made.ties == "keep" and not config.loss.takes_strength:
            return (
                f"preferences {label} keeps ties as pairs of strength 0.5, and {config.loss.type} takes certain pairs only: write "
                "ties: drop there, or take a loss for uncertain pairs (dpo, ...)"
            )
        if not made.judged and isinstance(config.loss, SppoSoft):
            kind = made.strategy.type
            return f"preferences {label} is of strategy {kind}, without win rates, of which sppo_soft is made: take another loss"
    return reference_problem(config, arrived)


def reward_model_problem(config: RewardModel, arrived: Arrived) -> str | None:
    """Why the loss cannot take these preferences, or None."""
    made = made_pairs(arrived)
    bare = {label: pair.strategy.type for label, pair in made.items() if not pair.scored}
    if config.loss.margin_weight and bare and len(bare) == len(arrived["preferences"]):
        return (
            f"margin_weight {config.loss.margin_weight} weights the gap between two answers' scores, and preferences "
            f"{', '.join(bare)} is of strategy {' and '.join(sorted(set(bare.values())))}, which has none: leave margin_weight out"
        )
    return None


def made_pairs(arrived: Arrived) -> dict[str, Pair]:
    """Label → config of the preferences that a `pair` stage gives directly."""
    return {label: given.config for label, given in arrived.get("preferences", {}).items() if isinstance(given.config, Pair)}
