"""`select_rows` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, port
from configs.base.shrink import LOWEST, Cut
from configs.judging.answers import SCORERS, scorers_need, scorers_problem, shrink_scorers
from configs.judging.keeping import SelectRows

KEPT_SHARE = 0.75
"""Of few rows, enough to train on."""


def shrink(cut: Cut) -> None:
    shrink_scorers(cut)
    cut.most("min_rows", 1, "thresholds")
    cut.most("keep.min_score", LOWEST, "thresholds")
    if (cut.get("keep.share") or 1) < KEPT_SHARE:
        cut.set("keep.share", KEPT_SHARE, "thresholds")


KIND = Kind(
    name="select_rows",
    version=1,
    config=SelectRows,
    inputs={"data": port("conversation", "preference"), **SCORERS},
    output=lambda config, inputs: inputs["data"][0],
    engine="torch",
    needs=scorers_need,
    problem=scorers_problem,
    shrink=shrink,
    family="judging",
    reports_drops=True,
    subset_of="data",
)
