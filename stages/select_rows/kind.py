"""`select_rows` as recipes, plans, rehearsals and reports see it."""

from math import ceil

from pedigree.configs.base.kind import FUNCTIONS, Kind, port
from pedigree.configs.base.shrink import LOWEST, Cut
from pedigree.configs.base.work import Amount, PlannedStage, rows_at, tokens_at
from pedigree.configs.judging.scoring import (
    SCORERS,
    scorers_need,
    scorers_problem,
    scorers_sampling_plan,
    scorers_scoring_plan,
    scorers_work,
    shrink_scorers,
)
from pedigree.configs.judging.selection import SelectRows, TopShare

KEPT_SHARE = 0.75
"""Share of a rehearsal's few rows that is enough to train on."""


def shrink(cut: Cut) -> None:
    shrink_scorers(cut)
    cut.most("min_rows", 1, "thresholds")
    cut.most("keep.min_score", LOWEST, "thresholds")
    if (cut.get("keep.share") or 1) < KEPT_SHARE:
        cut.set("keep.share", KEPT_SHARE, "thresholds")


def rows(stage: PlannedStage) -> Amount | None:
    keep, bound = stage.config.keep, rows_at(stage, "data")
    if bound and isinstance(keep, TopShare) and not keep.per_source:  # the share is rounded up per source, and there may be many sources
        return Amount(ceil(bound.value * keep.share), "at most")
    return bound


KIND = Kind(
    name="select_rows",
    version=1,
    config=SelectRows,
    inputs={"data": port("conversation", "preference"), **SCORERS},
    output=lambda config, inputs: inputs["data"][0],
    engine="torch",
    needs=scorers_need,
    problem=scorers_problem,
    work=scorers_work,
    rows=rows,
    row_tokens=tokens_at("data"),
    scoring_plan=scorers_scoring_plan,
    sampling_plan=scorers_sampling_plan,
    shrink=shrink,
    family="judging",
    decided_by=lambda config: ("stages/core/keeping.py", "stages/select_rows/run.py", *(FUNCTIONS if config.programs else ())),
    reports_drops=True,
    subset_of="data",
)
