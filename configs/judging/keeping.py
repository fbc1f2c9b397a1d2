"""Identity of the stages that keep what is good: of judged answers those worth imitating, of prompts those worth training on, of rows those
that models score best."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from configs.base.frozen import Arrived, Frozen
from configs.judging.answers import Scorers
from configs.judging.pairing import Number, by_name, unjudged


class BestOfN(Frozen):
    """Of each prompt the best answer: best-of-n distillation, and round by round RAFT (Dong et al. 2023, arXiv 2304.06767, algorithm 1)."""

    type: Literal["best_of_n"]
    min_score: float | None = None
    """Prompts whose best answer is lower give nothing."""


class AllAbove(Frozen):
    """Every different answer that is good enough: rejection sampling fine-tuning (Yuan et al. 2023, arXiv 2308.01825, §3.3), and round by
    round expert iteration, as STaR (Zelikman et al. 2022, arXiv 2203.14465) and ReST-EM (Singh et al. 2023, arXiv 2312.06585) do it."""

    type: Literal["all_above"]
    min_score: float
    """Least score; with a verifier's scores 1 keeps right answers."""
    max_per_prompt: int | None = Field(default=None, ge=1)
    """At most so many of one prompt, drawn, so that easy prompts do not crowd out hard ones; ReST-EM takes 10. All when absent."""


Keep = Annotated[BestOfN | AllAbove, Field(discriminator="type"), BeforeValidator(by_name)]


class BestAnswers(Frozen):
    """Judged answers that are good enough, as conversations that SFT reads. A prompt without one gives nothing, and is counted."""

    keep: Keep
    """Which answers of a prompt; `best_of_n` is short for `{type: best_of_n}`."""
    by: Number = "score"
    """What answers are compared by: a number of the judgments."""
    truncated: Literal["keep", "drop"] = "drop"
    """Answers that were cut off by `max_tokens`: `drop`, since they are no whole answers to imitate; those that are kept are trained
    without an end. Both are counted."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer conversations."""
    seed: int = Field(default=0, ge=0)
    """Decides between equally good answers, and which are drawn, by hash."""


class SelectPrompts(Frozen):
    """The prompts whose answers have a mean score within bounds, unchanged: neither solved nor hopeless. Where all answers to a prompt
    score alike, a policy gradient with group baselines learns nothing from it (Yu et al. 2025, arXiv 2503.14476, §3.2)."""

    by: Number = "verifier_score"
    """Of which number of the judgments the mean over a prompt's answers is taken; of a verifier's scores it is the pass rate."""
    min_mean: float | None = None
    """Prompts with a lower mean are dropped."""
    max_mean: float | None = None
    """Prompts with a higher mean are dropped."""
    min_answers: int = Field(default=1, ge=1)
    """Prompts with fewer answers that have the number are dropped: a rate of few is none."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer prompts."""

    @model_validator(mode="after")
    def bounds_have_room(self) -> "SelectPrompts":
        if self.min_mean is None and self.max_mean is None:
            raise ValueError("min_mean and max_mean are both absent, so that every prompt is kept: give one")
        if self.min_mean is not None and self.max_mean is not None and self.max_mean < self.min_mean:
            raise ValueError(f"max_mean {self.max_mean} is below min_mean {self.min_mean}, so that no prompt is between: raise it")
        return self


class TopShare(Frozen):
    """The rows with the highest scores."""

    type: Literal["top_share"]
    share: float = Field(gt=0, lt=1)
    """Of the rows that have a score; a part of a row counts as one."""
    per_source: bool = False
    """Whether it is this share of each `source` by itself: what is scored low as a whole is not left out as a whole."""
    seed: int = Field(default=0, ge=0)
    """Decides between equally good rows, by hash of (seed, id)."""


class Above(Frozen):
    """Every row that is good enough."""

    type: Literal["above"]
    min_score: float
    """Least score: with one rating and `rating_weight: 1` a number from 1 to 5; with reward models in standard deviations of the answers
    that they were held out on."""


class SelectRows(Scorers):
    """The rows whose answer models score best, unchanged and in their order: the last turn of a conversation, after the turns before it,
    and of a preference the best answer. Scored as `judge` does it: reward_weight * reward + rating_weight * rating, the rating being the
    mean over all rubrics. A row without a score is dropped."""

    keep: Annotated[TopShare | Above, Field(discriminator="type")]
    """Which rows."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer rows."""

    @model_validator(mode="after")
    def something_is_asked(self) -> "SelectRows":
        if self.reward_weight == 0 and self.rating_weight == 0:
            raise ValueError("reward_weight and rating_weight are both 0, so that no row gets a score: raise one")
        return self


def keeping_problem(config: BestAnswers | SelectPrompts, arrived: Arrived) -> str | None:
    """Why the judgments cannot be kept by as the config says, or None."""
    return unjudged(config.by, arrived)
