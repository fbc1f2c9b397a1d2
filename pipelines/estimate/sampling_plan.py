"""How a stage asks an engine: how long answers may be, how many are asked for together, how many there are of a row."""

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
"""Of a question whose choices are compared; most benchmarks have so many."""
RUBRIC_TOKENS = 400
"""That a rubric adds to what is rated (those in `configs/rubrics` have 300 to 500)."""

WRITING_TOKENS = 250
"""That the request for a prompt adds to what is shown (those of `configs/writing` have 180 to 250)."""
COMPARING_TOKENS = 450
"""That the question whether it sets the task of an item adds to a turn: the words, and an item of a hundred tokens."""


@dataclass(frozen=True)
class Drawing:
    """How the stage's requests are."""

    dtype: Dtype
    """Of the engine's weights and cache."""
    together: int
    """Requests that are submitted together."""
    answer: int
    """Tokens of the longest answer; 0 where given texts are weighed only."""
    queues: bool = False
    """Whether requests wait where the KV cache is full; a chunk must fit into it."""
    samples: int = 1
    """Answers to each prompt, whose beginning they share."""


def drawing_of(config: Frozen, suites: Sequence[Form | None] = ()) -> Drawing | None:
    """Of a stage; None where it asks no engine. `suites` are the forms of what `evaluate` asks."""
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
    """Whether a stage opens as many engines as its placement says; `rlvr` has one whatever that says."""
    return drawing_of(config) is not None and not isinstance(config, Rlvr)


def engines_of(config: Frozen, said: int) -> int:
    """Engines that answer side by side in a stage whose placement says so many."""
    return said if opens_engines(config) else 1


def requests_of_item(form: Form | None) -> int:
    """Requests to one policy for one item of a suite."""
    if form is None:
        return 1
    return form.draw.samples if form.draw else CHOICES


def answers_of_prompt(config: Sample, policies: int) -> int:
    """Answers to one prompt, of all policies that are drawn for it from so many."""
    return config.samples_per_prompt * (config.policies_per_prompt or policies)
