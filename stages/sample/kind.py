"""`sample` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.base.shrink import TOKENS, Cut
from configs.judging.answers import Sample, sample_problem

WINDOW = 3
"""Prompts."""


def shrink(cut: Cut) -> None:
    assert isinstance(cut.config, Sample)
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    cut.most("samples_per_prompt", max(2, len(cut.config.sampling.temperatures)), "samples")
    cut.most("prompts.count", WINDOW, "data")


KIND = Kind(
    name="sample",
    version=3,
    config=Sample,
    inputs={"policies": port("policy", many=True), "prompts": port("prompt")},
    output=gives("completion"),
    engine="vllm",
    problem=sample_problem,
    shrink=shrink,
    family="sampling",
)
