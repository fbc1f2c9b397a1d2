"""Config of `pair`: answers to compare, preferences to keep, and checks that training can use them."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from pedigree.configs.base.frozen import Arrived, Frozen
from pedigree.configs.judging.pools import Sample
from pedigree.configs.judging.scoring import Judge
from pedigree.configs.methods.preference import SppoSoft
from pedigree.configs.methods.training import PreferenceTrain, RewardModel, reference_problem


class BestVsWorst(Frozen):
    """The best answer against the worst: `max_min` in RLHF Workflow (Dong et al. 2024, arXiv 2405.07863)."""

    type: Literal["best_vs_worst"]


class BestVsRandomLower(Frozen):
    """The best answer against a random one with a lower score (Lambert et al. 2024, arXiv 2411.15124, §5.2.1)."""

    type: Literal["best_vs_random_lower"]


class TopVsBottom(Frozen):
    """One of the k best answers against one of the k worst, drawn among all such pairs. It is less sensitive to errors of a single score
    than the best against the worst."""

    type: Literal["top_vs_bottom"]
    k: int = Field(ge=1)
    """Number of best answers, and of worst answers; 1 is equivalent to `best_vs_worst`."""


class AllPairs(Frozen):
    """All pairs of distinct answers with the better one first, or a random subset of them."""

    type: Literal["all_pairs"]
    per_prompt: int | None = Field(default=None, ge=1)
    """Maximum number of pairs per prompt; n answers make up to n(n - 1)/2. Because pairs share answers, use `ranked` for a reward model
    with held-out pairs: it never splits a list's pairs."""


class Ranked(Frozen):
    """All distinct answers in one list, best first (Ouyang et al. 2022, arXiv 2203.02155, §3.5)."""

    type: Literal["ranked"]


class Delta(Frozen):
    """A stronger policy's answer against a weaker one's, without a judge: delta learning (Geng et al. 2025, arXiv 2507.06187). Reads
    `completions`; scores are null."""

    type: Literal["delta"]
    strong: str
    """Label, at the sampling stage's input `policies`, of the policy whose answers are chosen."""
    weak: str
    """Label of the policy whose answers are rejected."""

    @model_validator(mode="after")
    def _check_labels(self) -> "Delta":
        if self.strong == self.weak:
            raise ValueError(f"strong and weak are both {self.strong}: use different policies")
        return self


class Relaxed(Frozen):
    """An answer to a prompt with constraints (from `constrain`) against an answer to the original prompt, which was generated without them
    (Lambert et al. 2024, arXiv 2411.15124, §5.2.1: the answer to the relaxed prompt is rejected). Reads `completions` and `relaxed`, joined
    by prompt id."""

    type: Literal["relaxed"]
    verified: bool = True
    """Require the prompt's verifier to confirm that the chosen answer follows all constraints and the rejected one does not (easy
    constraints may be met by chance). If false, scores are null."""


def by_name(value: Any) -> Any:
    """`ranked` is short for `{type: ranked}`."""
    return {"type": value} if isinstance(value, str) else value


Strategy = Annotated[
    BestVsWorst | BestVsRandomLower | TopVsBottom | AllPairs | Ranked | Delta | Relaxed,
    Field(discriminator="type"),
    BeforeValidator(by_name),
]
STRATEGIES: tuple[str, ...] = tuple(get_args(one.model_fields["type"].annotation)[0] for one in get_args(get_args(Strategy)[0]))
"""Names of the strategies."""
Choice = Literal["disagreement", "smallest_gap", "largest_gap", "random"]
Number = Literal["score", "win_rate", "verifier_score", "reward", "rating"]


class Budget(Frozen):
    """Limit on the total number of preferences, and the criterion for keeping them; ties are broken by hash of (seed, id)."""

    pairs: int = Field(ge=1)
    """Maximum number of preferences."""
    choose: Choice
    """`disagreement`: highest variance of σ(r_w - r_l) over an ensemble of reward models, r being a member's raw reward (Christiano et al.
    2017, arXiv 1706.03741, §2.2.4); `smallest_gap`: closest scores, where a judge is least certain; `largest_gap`: the clearest
    preferences; `random`. For a list, its first and last answers count."""


class Pair(Frozen):
    """Builds preferences from the answers to each prompt. Ties and preferences outside the bounds are dropped, and counted by reason."""

    strategy: Strategy = BestVsWorst(type="best_vs_worst")
    """Which answers to compare. A strategy without arguments can be written as its name: `strategy: ranked`."""
    by: Number = "score"
    """The number in the judgments by which answers are compared, which becomes their score. Within a prompt `win_rate` ranks like `score`,
    but its gaps are differences of probabilities, whatever the judge's scale. An answer's own `win_rate` field, on which `sppo_soft`
    trains, is always that of `score`."""
    length_penalty: float = Field(default=0.0, ge=0)
    """λ: penalty per character; answers are compared by s - λ·length, as in `max_min_p` of RLHF Workflow with λ = 0.001 (Dong et al. 2024,
    arXiv 2405.07863). Policies trained on such pairs become briefer."""
    min_gap: float = Field(default=0.0, ge=0)
    """Minimum score difference between the two answers of a pair, or the best and the worst of a list."""
    max_gap: float | None = Field(default=None, gt=0)
    """Maximum score difference: keeps near misses rather than obvious pairs."""
    min_best: float | None = None
    """Minimum score of the first answer, after `length_penalty`: without a penalty and with verifier scores, 1 ensures that the chosen
    answer is correct."""
    ties: Literal["drop", "keep"] = "drop"
    """Prompts whose answers all have equal scores: `keep` makes them a pair of `strength` 0.5. Losses that support uncertain pairs treat it
    as "neither", which holds the policy in place."""
    truncated: Literal["keep", "drop"] = "keep"
    """Answers truncated by `max_tokens`, which have no end-of-turn token: `keep` them, because pairs in which they lose to a finished
    answer teach a policy to finish (TRL and open-instruct also keep them, optionally with a penalty), or `drop` them, for judges that do
    not notice. Both are counted."""
    budget: Budget | None = None
    """Keep only the most informative preferences; the others are counted as `over budget`."""
    min_pairs: int = Field(default=1, ge=1)
    """The stage fails with fewer preferences."""
    label_noise: float = Field(default=0.0, ge=0, le=0.5)
    """Probability of swapping the two answers of a pair, by hash of (seed, id), to simulate an erring judge."""
    seed: int = Field(default=0, ge=0)
    """Seed, by hash, for the order of ties, random draws and `label_noise`."""

    @model_validator(mode="after")
    def _check_scores_and_pairs(self) -> "Pair":
        if self.label_noise and self.strategy.type == "ranked":
            raise ValueError(
                f"label_noise {self.label_noise} swaps the answers of pairs, but strategy is ranked: use a strategy that makes pairs"
            )
        if self.max_gap is not None and self.max_gap < self.min_gap:
            raise ValueError(f"max_gap {self.max_gap} is below min_gap {self.min_gap}: raise it, or lower min_gap")
        if self.budget is not None and self.budget.pairs < self.min_pairs:
            raise ValueError(f"budget.pairs {self.budget.pairs} is below min_pairs {self.min_pairs}: raise it, or lower min_pairs")
        if self.ties == "keep" and self.strategy.type == "ranked":
            raise ValueError("ties: keep makes pairs of strength 0.5, but strategy is ranked: use a strategy that makes pairs")
        if self.ties == "keep" and self.min_gap:
            raise ValueError(f"min_gap {self.min_gap} drops close pairs, but ties: keep keeps the closest: remove one of them")
        return self

    @model_validator(mode="after")
    def _check_unjudged(self) -> "Pair":
        if self.judged:
            return self
        kind = self.strategy.type
        compared = [name for name in COMPARING if getattr(self, name) != Pair.model_fields[name].default]
        if compared:
            raise ValueError(f"strategy {kind} compares no scores, so {compared[0]} has no effect: remove it")
        if self.budget is not None and self.budget.choose != "random":
            raise ValueError(f"strategy {kind} has no scores for choose: {self.budget.choose}: set choose: random")
        return self

    @property
    def judged(self) -> bool:
        """Whether scores decide which answer is better, rather than which policy or prompt it belongs to."""
        return not isinstance(self.strategy, Delta | Relaxed)

    @property
    def scored(self) -> bool:
        """Whether its answers have scores."""
        return self.judged or (isinstance(self.strategy, Relaxed) and self.strategy.verified)


COMPARING = ("by", "length_penalty", "min_gap", "max_gap", "min_best", "ties")
"""Fields of `Pair` that concern scores."""


def pair_needs(config: Pair) -> frozenset[str]:
    match config.strategy:
        case Delta():
            return frozenset({"completions"})
        case Relaxed():
            return frozenset({"completions", "relaxed"})
    return frozenset({"judgments"})


def pair_problem(config: Pair, arrived: Arrived) -> str | None:
    """Error message if the config cannot build preferences from these inputs, else None."""
    needed = pair_needs(config)
    other = next((port for port in arrived if port not in needed), None)
    if other is not None:
        reads = " and ".join(sorted(needed))
        return f"strategy {config.strategy.type} reads {reads}: remove the input {other} ({', '.join(arrived[other])})"
    for label, given in arrived.get("judgments", {}).items():
        if isinstance(given.config, Sample):
            return f"judgments {label} are conversations of several turns, whose last answers follow different ones: use best_answers"
    missing = unjudged(config.by, arrived)
    if missing or config.budget is None or config.budget.choose != "disagreement":
        return missing
    for label, given in arrived.get("judgments", {}).items():
        if isinstance(given.config, Judge) and given.config.reward_weight == 0:
            return f"budget.choose disagreement requires reward models, but judgments {label} uses none: add two or more there"
    return None


def unjudged(by: Number, arrived: Arrived) -> str | None:
    """Error message if the judgments lack the number by which answers are compared, else None."""
    for label, given in arrived.get("judgments", {}).items():
        if isinstance(given.config, Sample) and (environment := given.config.environment):
            if by != "score" and not (by == "verifier_score" and environment.scored_by == "verifier"):
                return f"by {by}: judgments {label} are conversations scored by {environment.scored_by}: set by to score"
        if not isinstance(given.config, Judge):
            continue
        if by == "reward" and given.config.reward_weight == 0:
            return f"by reward: judgments {label} contains no rewards, because its reward_weight is 0: raise it there, or change by"
        if by == "rating" and given.config.rating is None:
            return f"by rating: judgments {label} contains no ratings: set rating there, or change by"
    return None


def preference_problem(config: PreferenceTrain, arrived: Arrived) -> str | None:
    """Error message if the loss cannot use these inputs, else None."""
    for label, made in direct_pairs(arrived).items():
        if made.ties == "keep" and not config.loss.takes_strength:
            return (
                f"preferences {label} keeps ties as pairs of strength 0.5, but {config.loss.type} does not support uncertain pairs: set "
                "ties: drop there, or use a loss that does (dpo, ...)"
            )
        if not made.judged and isinstance(config.loss, SppoSoft):
            kind = made.strategy.type
            return f"preferences {label} has strategy {kind} and no win rates, which sppo_soft requires: use another loss"
    return reference_problem(config, arrived)


def reward_model_problem(config: RewardModel, arrived: Arrived) -> str | None:
    """Error message if the loss cannot use these preferences, else None."""
    made = direct_pairs(arrived)
    bare = {label: pair.strategy.type for label, pair in made.items() if not pair.scored}
    if config.loss.margin_weight and bare and len(bare) == len(arrived["preferences"]):
        return (
            f"margin_weight {config.loss.margin_weight} weights the gap between two answers' scores, but preferences "
            f"{', '.join(bare)} has strategy {' and '.join(sorted(set(bare.values())))} without scores: remove margin_weight"
        )
    return None


def direct_pairs(arrived: Arrived) -> dict[str, Pair]:
    """Label → config of the preferences that come directly from a `pair` stage."""
    return {label: given.config for label, given in arrived.get("preferences", {}).items() if isinstance(given.config, Pair)}
