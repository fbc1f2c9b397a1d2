"""Sampling plan of a stage: answer length, requests per chunk, and answers per prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.base.frozen import Dtype, Frozen
from configs.judging.answers import Evaluate, Sample, Scorers
from configs.judging.asking import ByPolicy
from configs.judging.rephrasing import FindRephrased
from configs.judging.synthesis import Synthesize
from configs.methods.training import Rlvr
from configs.rows.suite_forms import Form
from pipelines.estimate.work import MAX_RUNNING

CHOICES = 4
"""Assumed choices of a multiple-choice question; most benchmarks have four."""
RUBRIC_TOKENS = 400
"""Tokens that a rubric adds to the rated text (rubrics in `configs/rubrics` have 300 to 500)."""

WRITING_TOKENS = 250
"""Tokens that a writing request adds to its material (requests in `configs/writing` have 180 to 250)."""
COMPARING_TOKENS = 450
"""Tokens that a same-task question adds to a turn, including an item of 100 tokens."""


@dataclass(frozen=True)
class Drawing:
    """Sampling plan of a stage."""

    dtype: Dtype
    """Dtype of the engine's weights and cache."""
    together: int
    """Requests submitted together."""
    answer: int
    """Maximum tokens per answer; 0 if only given texts are scored."""
    queues: bool = False
    """Whether requests wait for space in the KV cache; otherwise a whole chunk must fit."""
    samples: int = 1
    """Answers per prompt, which share its prefix."""


def drawing_of(config: Frozen, suites: Sequence[Form | None] = ()) -> Drawing | None:
    """Sampling plan of a stage; None if it uses no engine. `suites` are the forms of suites in `evaluate`."""
    match config:
        case Sample(chunk_size=int() as together):
            return Drawing(config.dtype, together, config.sampling.max_tokens, samples=config.samples_per_prompt)
        case Sample():
            return Drawing(config.dtype, MAX_RUNNING, config.sampling.max_tokens, queues=True, samples=config.samples_per_prompt)
        case Rlvr():
            together = config.prompts_per_step * config.samples_per_prompt
            return Drawing(config.dtype, together, config.sampling.max_tokens, samples=config.samples_per_prompt)
        case Evaluate():
            drawn = [config.sampling_of(form) for form in suites] if suites else [config.sampling]
            return Drawing(config.dtype, config.chunk_size, max((sampling.max_tokens for sampling in drawn if sampling), default=0))
        case Scorers(rating=rating) if rating is not None and isinstance(rating.by, ByPolicy):
            return Drawing(rating.by.dtype, rating.by.chunk_size, rating.sampling.max_tokens)
        case Synthesize(by=ByPolicy() as by) | FindRephrased(by=ByPolicy() as by):
            return Drawing(by.dtype, by.chunk_size, config.sampling.max_tokens)
    return None


def opens_engines(config: Frozen) -> bool:
    """Whether a stage starts as many engines as its placement specifies; `rlvr` always has one."""
    return drawing_of(config) is not None and not isinstance(config, Rlvr)


def engines_of(config: Frozen, placed: int) -> int:
    """Parallel engines of a stage whose placement specifies `placed`."""
    return placed if opens_engines(config) else 1


def requests_of_item(form: Form | None) -> int:
    """Requests to one policy for one item of a suite."""
    if form is None:
        return 1
    return form.draw.samples if form.draw else CHOICES


def answers_of_prompt(config: Sample, policies: int) -> int:
    """Answers per prompt from all policies drawn for it."""
    return config.samples_per_prompt * (config.policies_per_prompt or policies)
