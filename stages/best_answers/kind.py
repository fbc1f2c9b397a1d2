"""`best_answers` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.base.shrink import LOWEST, Cut
from configs.judging.keeping import BestAnswers, keeping_problem


def shrink(cut: Cut) -> None:
    """A tiny model gives no right answer, and mostly runs until it is cut off."""
    cut.most("keep.min_score", LOWEST, "thresholds")
    cut.most("min_rows", 1, "thresholds")
    cut.set("truncated", "keep", "thresholds")


KIND = Kind(
    name="best_answers",
    version=1,
    config=BestAnswers,
    inputs={"judgments": port("judgment")},
    output=gives("conversation"),
    problem=keeping_problem,
    shrink=shrink,
    family="judging",
    reports_drops=True,
)
