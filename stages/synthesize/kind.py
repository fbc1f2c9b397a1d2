"""`synthesize` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Iterator

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import Cut
from pedigree.configs.base.work import PROMPT_TOKENS, Amount, Amounts, PlannedStage, SamplingPlan, fewer_at, generation, only
from pedigree.configs.judging.synthesis import SelfInstruct, Synthesize
from pedigree.configs.methods.language_model import asking_needs, asking_problem, shrink_asking, speaker_sampling_plan

REQUESTS, SHOTS = 8, 2
"""Requests, and examples that each shows."""


def shrink(cut: Cut) -> None:
    cut.most("method.requests", REQUESTS, "data")
    cut.most("method.shots", SHOTS, "data")
    cut.most("min_rows", 1, "thresholds")
    shrink_asking(cut, "writer")


REQUEST_TOKENS = 250
"""That a request adds to the examples that it shows (those of `configs/writing` have 180 to 250)."""


def _requests(stage: PlannedStage) -> tuple[Amount | None, float]:
    """(requests to the writer, tokens of the examples that each shows)."""
    method, material = stage.config.method, only(stage, "prompts")
    tokens = material.row_tokens or PROMPT_TOKENS
    if isinstance(method, SelfInstruct):
        return Amount(method.requests, "counted"), tokens * method.shots
    return material.rows, tokens


def preflight(stage: PlannedStage) -> Iterator[str]:
    method = stage.config.method
    if isinstance(method, SelfInstruct) and (there := fewer_at(stage, "prompts", method.shots)):
        yield f"shots is {method.shots}, but there are {there} prompts: lower it, or add prompts"


def rows(stage: PlannedStage) -> Amount | None:
    requests, _ = _requests(stage)
    return Amount(requests.value * stage.config.method.prompts, "at most") if requests else None


def sampling_plan(config: Synthesize) -> SamplingPlan | None:
    return speaker_sampling_plan(config.by, "writer", config.sampling.max_tokens)


def work(stage: PlannedStage) -> Amounts:
    plan = sampling_plan(stage.config)
    if plan is None:
        return Amounts(rows=stage.rows)
    requests, shown = _requests(stage)
    return generation(requests, Amount(shown + REQUEST_TOKENS, "estimated"), plan)


KIND = Kind(
    name="synthesize",
    version=1,
    config=Synthesize,
    inputs={"prompts": port("prompt"), "writer": port("policy", optional=True)},
    output=gives("prompt"),
    ids="kept",
    engine="vllm",
    unchecked=True,
    needs=asking_needs("writer"),
    problem=asking_problem("writer"),
    preflight=preflight,
    work=work,
    rows=rows,
    sampling_plan=sampling_plan,
    shrink=shrink,
    family="sampling",
    reports_drops=True,
)
