"""`best_answers` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import LOWEST, Cut
from pedigree.configs.base.work import Amount, PlannedStage, only, rows_at, tokens_at
from pedigree.configs.judging.scoring import answers_of_prompt, sampled
from pedigree.configs.judging.selection import AllAbove, BestAnswers, keeping_problem


def shrink(cut: Cut) -> None:
    """A tiny model gives no right answer, and mostly runs until it is cut off."""
    cut.most("keep.min_score", LOWEST, "thresholds")
    cut.most("min_rows", 1, "thresholds")
    cut.set("truncated", "keep", "thresholds")


def rows(stage: PlannedStage) -> Amount | None:
    keep, sample = stage.config.keep, sampled(only(stage, "judgments"))
    if sample is None:
        return rows_at(stage, "judgments")
    answers = answers_of_prompt(sample)
    most = keep.max_per_prompt or answers if isinstance(keep, AllAbove) else 1
    return Amount(sample.config.prompts.count * min(answers, most), "at most")


KIND = Kind(
    name="best_answers",
    version=1,
    config=BestAnswers,
    inputs={"judgments": port("judgment")},
    output=gives("conversation"),
    ids="kept",
    problem=keeping_problem,
    rows=rows,
    row_tokens=tokens_at("judgments"),
    shrink=shrink,
    family="judging",
    decided_by=lambda config: ("stages/best_answers/run.py",),
    reports_drops=True,
)
