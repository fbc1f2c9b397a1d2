"""How a stage asks an engine: how long answers may be, how many are asked for together, how many there are of a row."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.answers import Evaluate, Judge, Sample
from configs.frozen import Dtype, Frozen
from configs.rating import PolicyJudge
from configs.suite_forms import Form
from configs.training import Rlvr

CHOICES = 4
"""Of a question whose choices are compared; most benchmarks have so many."""
RUBRIC_TOKENS = 400
"""That a rubric adds to what is rated (those in `configs/rubrics` have 300 to 500)."""


@dataclass(frozen=True)
class Drawing:
    """How the stage's requests are."""

    dtype: Dtype
    """Of the engine's weights and cache."""
    together: int
    """Requests that are submitted together."""
    answer: int
    """Tokens of the longest answer; 0 where given texts are weighed only."""


def drawing_of(config: Frozen, suites: Sequence[Form | None] = ()) -> Drawing | None:
    """Of a stage; None where it asks no engine. `suites` are the forms of what `evaluate` asks."""
    match config:
        case Sample():
            return Drawing(config.dtype, config.chunk_size, config.sampling.max_tokens)
        case Rlvr():
            return Drawing(config.dtype, config.prompts_per_step * config.samples_per_prompt, config.sampling.max_tokens)
        case Evaluate():
            drawn = [config.sampling_of(form) for form in suites] if suites else [config.sampling]
            return Drawing(config.dtype, config.chunk_size, max((sampling.max_tokens for sampling in drawn if sampling), default=0))
        case Judge(rating=rating) if rating is not None and isinstance(rating.by, PolicyJudge):
            return Drawing(rating.by.dtype, rating.by.chunk_size, rating.sampling.max_tokens)
    return None


def requests_of_item(form: Form | None) -> int:
    """Requests to one policy for one item of a suite."""
    if form is None:
        return 1
    return form.draw.samples if form.draw else CHOICES


def answers_of_prompt(config: Sample, policies: int) -> int:
    """Answers to one prompt, of all policies that are drawn for it from so many."""
    return config.samples_per_prompt * (config.policies_per_prompt or policies)
