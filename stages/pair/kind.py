"""`pair` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.base.shrink import HIGHEST, LOWEST, Cut
from configs.judging.pairing import Pair, pair_needs, pair_problem


def shrink(cut: Cut) -> None:
    cut.most("min_pairs", 1, "thresholds")
    cut.most("min_gap", 0, "thresholds")
    cut.most("min_best", LOWEST, "thresholds")
    if cut.get("max_gap") is not None:
        cut.set("max_gap", HIGHEST, "thresholds")
    cut.set("truncated", "keep", "thresholds")
    if cut.get("strategy.verified"):
        cut.set("strategy.verified", False, "thresholds")


KIND = Kind(
    name="pair",
    version=6,
    config=Pair,
    inputs={
        "judgments": port("judgment", optional=True),
        "completions": port("completion", optional=True),
        "relaxed": port("completion", optional=True),
    },
    output=gives("preference"),
    needs=pair_needs,
    problem=pair_problem,
    shrink=shrink,
    family="judging",
    reports_drops=True,
)
