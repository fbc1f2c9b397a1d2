"""`sample` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Iterator

from pedigree.configs.base.kind import CONVERSATIONS, RENDERING, Kind, port
from pedigree.configs.base.shrink import TOKENS, Cut
from pedigree.configs.base.work import (
    MAX_RUNNING,
    SHARE_OF_A_BOUND,
    TURN,
    Amount,
    Amounts,
    PlannedStage,
    SamplingPlan,
    at_ports,
    fewer_at,
    generation,
    only,
)
from pedigree.configs.judging.pools import Sample, sample_problem
from pedigree.configs.judging.scoring import answers_of_prompt
from pedigree.configs.methods.environment_programs import served_user, shrink_environment
from pedigree.configs.methods.language_model import unserved_problem

WINDOW = 3
"""Prompts."""


def shrink(cut: Cut) -> None:
    assert isinstance(cut.config, Sample)
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    cut.most("samples_per_prompt", max(2, len(cut.config.sampling.temperatures)), "samples")
    cut.most("prompts.count", WINDOW, "data")
    shrink_environment(cut)


def sampling_plan(config: Sample) -> SamplingPlan:
    answer, samples = longest_answer(config), config.samples_per_prompt
    if config.chunk_size == "continuous":
        return SamplingPlan("policies", config.dtype, MAX_RUNNING, answer, samples, chunk=1)
    return SamplingPlan("policies", config.dtype, config.chunk_size, answer, samples, chunk_field="chunk_size")


def longest_answer(config: Sample) -> int:
    most = config.sampling.max_tokens
    return config.environment.longest_answer(most, lengthens=True) if config.environment else most


def verified(config: Sample) -> frozenset[str]:
    return frozenset({"prompts"} if config.environment and config.environment.scored_by == "verifier" else ())


def preflight(stage: PlannedStage) -> Iterator[str]:
    window = stage.config.prompts
    first, end = window.index * window.count, (window.index + 1) * window.count
    if there := fewer_at(stage, "prompts", end):
        yield (
            f"prompts {first} to {end} are configured (count {window.count}, index {window.index}), but the pool has {there}: lower "
            "prompts.count or prompts.index, or add prompts"
        )


def warnings(stage: PlannedStage) -> Iterator[str]:
    window, readers = stage.config.prompts, only(stage, "prompts").readers
    begins = [reader.config.prompts.index for reader in readers if isinstance(reader.config, Sample)]
    if len(begins) == len(readers) and min(begins) == window.index > 0:
        unused = window.index * window.count
        yield f"no stage uses the first {unused} prompts: windows count from 0, so that rounds begin with `index: $round-1`"


def rows(stage: PlannedStage) -> Amount:
    return Amount(stage.config.prompts.count * answers_of_prompt(stage), "counted")


def row_tokens(stage: PlannedStage) -> float | None:
    prompt = only(stage, "prompts").row_tokens
    return None if prompt is None else prompt + SHARE_OF_A_BOUND * longest_answer(stage.config) + TURN


def work(stage: PlannedStage) -> Amounts:
    config: Sample = stage.config
    _, prompt = at_ports(stage, ("prompts",))
    found = generation(rows(stage), prompt, sampling_plan(config))
    return found.in_turns(config.environment.max_turns, config.sampling.max_tokens) if config.environment else found


KIND = Kind(
    name="sample",
    version=3,
    config=Sample,
    inputs={"policies": port("policy", many=True), "prompts": port("prompt"), "user": port("policy", optional=True)},
    output=lambda config, inputs: "judgment" if config.environment else "completion",
    engine="vllm",
    verified=verified,
    decided_by=lambda config: (*RENDERING, *(CONVERSATIONS if config.environment else ())),
    problem=lambda config, arrived: sample_problem(config, arrived) or unserved_problem(served_user(config), arrived, "user"),
    preflight=preflight,
    warnings=warnings,
    work=work,
    rows=rows,
    row_tokens=row_tokens,
    sampling_plan=sampling_plan,
    served=served_user,
    shrink=shrink,
    family="sampling",
)
