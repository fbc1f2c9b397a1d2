"""Configs of the stages that select: judged answers worth imitating, prompts worth training on, rows that models score highest."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from pedigree.configs.base.frozen import Arrived, Frozen
from pedigree.configs.judging.pairing import Number, by_name, unjudged
from pedigree.configs.judging.scoring import Scorers


class BestOfN(Frozen):
    """Keeps the best answer to each prompt: best-of-n distillation; over rounds, RAFT (Dong et al. 2023, arXiv 2304.06767, algorithm 1)."""

    type: Literal["best_of_n"]
    min_score: float | None = None
    """Skip prompts whose best answer has a lower score."""


class AllAbove(Frozen):
    """Keeps every distinct answer with a sufficient score: rejection sampling fine-tuning (Yuan et al. 2023, arXiv 2308.01825, §3.3); over
    rounds, expert iteration as in STaR (Zelikman et al. 2022, arXiv 2203.14465) and ReST-EM (Singh et al. 2023, arXiv 2312.06585)."""

    type: Literal["all_above"]
    min_score: float
    """Minimum score; for verifier scores, 1 keeps correct answers."""
    max_per_prompt: int | None = Field(default=None, ge=1)
    """Maximum number of answers per prompt, drawn at random, so that easy prompts do not dominate; ReST-EM uses 10. Unlimited by
    default."""


Keep = Annotated[BestOfN | AllAbove, Field(discriminator="type"), BeforeValidator(by_name)]


class BestAnswers(Frozen):
    """Converts sufficiently good judged answers to conversations for SFT. Prompts without one are skipped and counted."""

    keep: Keep
    """Which answers to keep; `best_of_n` is short for `{type: best_of_n}`."""
    by: Number = "score"
    """The number in the judgments by which answers are compared."""
    truncated: Literal["keep", "drop"] = "drop"
    """Answers truncated by `max_tokens`: `drop` them, because they are incomplete, or `keep` them, to be trained without an end-of-turn
    token. Both are counted."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer conversations."""
    seed: int = Field(default=0, ge=0)
    """Seed for ties and draws, by hash."""


class SelectPrompts(Frozen):
    """Keeps the prompts whose mean answer score is within bounds, i.e. neither solved nor hopeless. If all answers to a prompt score alike,
    a policy gradient with group baselines learns nothing from it (Yu et al. 2025, arXiv 2503.14476, §3.2)."""

    by: Number = "verifier_score"
    """The number in the judgments to average over a prompt's answers; for verifier scores the mean is the pass rate."""
    min_mean: float | None = None
    """Drop prompts with a lower mean."""
    max_mean: float | None = None
    """Drop prompts with a higher mean."""
    min_answers: int = Field(default=1, ge=1)
    """Drop prompts for which fewer answers have the number, because their mean is unreliable."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer prompts."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "SelectPrompts":
        if self.min_mean is None and self.max_mean is None:
            raise ValueError("min_mean and max_mean are both unset, so every prompt is kept: set one")
        if self.min_mean is not None and self.max_mean is not None and self.max_mean < self.min_mean:
            raise ValueError(f"max_mean {self.max_mean} is below min_mean {self.min_mean}: raise it")
        return self


class TopShare(Frozen):
    """Keeps the rows with the highest scores."""

    type: Literal["top_share"]
    share: float = Field(gt=0, lt=1)
    """Share of the rows with a score, rounded up."""
    per_source: bool = False
    """Apply the share to each `source` separately, so that no source is dropped entirely for low scores."""
    seed: int = Field(default=0, ge=0)
    """Seed for ties, by hash of (seed, id)."""


class Above(Frozen):
    """Keeps every row with a sufficient score."""

    type: Literal["above"]
    min_score: float
    """Minimum score: from 1 to 5 for a single rating with `rating_weight: 1`; for reward models, in standard deviations of their held-out
    answers."""


class SelectRows(Scorers):
    """Keeps the rows whose answers score highest, unchanged and in order. The scored answer is the last turn of a conversation, given the
    turns before it, or the best answer of a preference. Scores are computed as in `judge`: reward_weight * reward + rating_weight * rating,
    where rating is the mean over all rubrics, plus weight * program for each of `programs`. Rows without a score are dropped."""

    keep: Annotated[TopShare | Above, Field(discriminator="type")]
    """Which rows to keep."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer rows."""

    @model_validator(mode="after")
    def _check_weights(self) -> "SelectRows":
        if not self.scores:
            raise ValueError("reward_weight, rating_weight and the weights of programs are all 0, so no row gets a score: raise one")
        return self


def keeping_problem(config: BestAnswers | SelectPrompts, arrived: Arrived) -> str | None:
    """Error message if the judgments lack the number that the config compares, else None."""
    return unjudged(config.by, arrived)
