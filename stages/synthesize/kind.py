"""`synthesize` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.base.shrink import Cut
from configs.judging.asking import shrink_asking
from configs.judging.synthesis import Synthesize, synthesize_needs, synthesize_problem

REQUESTS, SHOTS = 8, 2
"""Requests, and examples that each shows."""


def shrink(cut: Cut) -> None:
    cut.most("method.requests", REQUESTS, "data")
    cut.most("method.shots", SHOTS, "data")
    cut.most("min_rows", 1, "thresholds")
    shrink_asking(cut, "writer")


KIND = Kind(
    name="synthesize",
    version=1,
    config=Synthesize,
    inputs={"prompts": port("prompt"), "writer": port("policy", optional=True)},
    output=gives("prompt"),
    engine="vllm",
    unchecked=True,
    needs=synthesize_needs,
    problem=synthesize_problem,
    shrink=shrink,
    family="sampling",
    reports_drops=True,
)
