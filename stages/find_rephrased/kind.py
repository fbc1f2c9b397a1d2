"""`find_rephrased` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, port
from pedigree.configs.base.shrink import TOKENS, Cut
from pedigree.configs.base.work import (
    PROMPT_TOKENS,
    Amount,
    Amounts,
    PlannedStage,
    SamplingPlan,
    at_ports,
    generation,
    rows_at,
    rows_written,
    tokens_at,
)
from pedigree.configs.judging.rephrased import FindRephrased
from pedigree.configs.methods.language_model import asking_needs, asking_problem, shrink_asking, speaker_sampling_plan
from pedigree.configs.rows.overlap_criteria import shrink_comparison


def shrink(cut: Cut) -> None:
    shrink_comparison(cut)
    cut.most("sampling.max_tokens", TOKENS, "lengths")
    shrink_asking(cut, "judge")


QUESTION_TOKENS = 450
"""Tokens that a question adds to a turn: its own words and an item of a hundred tokens."""


def sampling_plan(config: FindRephrased) -> SamplingPlan | None:
    return speaker_sampling_plan(config.by, "judge", config.sampling.max_tokens)


def work(stage: PlannedStage) -> Amounts:
    plan = sampling_plan(stage.config)
    if plan is None:
        return rows_written(stage)
    rows, document = at_ports(stage, ("data",))
    pairs = Amount(rows.value * stage.config.neighbours * (2 if stage.config.waivers else 1), "at most") if rows else None
    return generation(pairs, Amount((document.value if document else PROMPT_TOKENS) + QUESTION_TOKENS, "estimated"), plan)


KIND = Kind(
    name="find_rephrased",
    version=1,
    config=FindRephrased,
    inputs={
        "data": port("conversation", "prompt", "preference"),
        "benchmarks": port("item", many=True),
        "judge": port("policy", optional=True),
    },
    output=lambda config, inputs: inputs["data"][0],
    engine="vllm",
    decided_by=lambda config: ("data/contamination",),
    needs=asking_needs("judge"),
    problem=asking_problem("judge"),
    work=work,
    rows=lambda stage: rows_at(stage, "data"),
    row_tokens=tokens_at("data"),
    sampling_plan=sampling_plan,
    shrink=shrink,
    family="judging",
    subset_of="data",
    removes_overlaps=True,
)
