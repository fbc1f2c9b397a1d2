"""`select_prompts` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import HIGHEST, LOWEST, Cut
from pedigree.configs.base.work import Amount, PlannedStage, only, rows_at
from pedigree.configs.judging.scoring import sampled
from pedigree.configs.judging.selection import SelectPrompts, keeping_problem


def shrink(cut: Cut) -> None:
    cut.most("min_answers", 1, "thresholds")
    cut.most("min_rows", 1, "thresholds")
    cut.most("min_mean", LOWEST, "thresholds")
    if cut.get("max_mean") is not None:
        cut.set("max_mean", HIGHEST, "thresholds")


def rows(stage: PlannedStage) -> Amount | None:
    sample = sampled(only(stage, "judgments"))
    return Amount(sample.config.prompts.count, "at most") if sample else rows_at(stage, "prompts")


KIND = Kind(
    name="select_prompts",
    version=2,
    config=SelectPrompts,
    inputs={"prompts": port("prompt"), "judgments": port("judgment")},
    output=gives("prompt"),
    ids="kept",
    problem=keeping_problem,
    rows=rows,
    shrink=shrink,
    family="judging",
    decided_by=lambda config: ("stages/select_prompts/run.py",),
    reports_drops=True,
)
