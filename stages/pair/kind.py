"""`pair` as recipes, plans, rehearsals and reports see it."""

from math import comb, inf

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import HIGHEST, LOWEST, Cut
from pedigree.configs.base.work import SHARE_OF_A_BOUND, TURN, Amount, PlannedStage, only
from pedigree.configs.judging.pairing import AllPairs, Pair, pair_needs, pair_problem
from pedigree.configs.judging.scoring import answers_of_prompt, sampled


def shrink(cut: Cut) -> None:
    cut.most("min_pairs", 1, "thresholds")
    cut.most("min_gap", 0, "thresholds")
    cut.most("min_best", LOWEST, "thresholds")
    if cut.get("max_gap") is not None:
        cut.set("max_gap", HIGHEST, "thresholds")
    cut.set("truncated", "keep", "thresholds")
    if cut.get("strategy.verified"):
        cut.set("strategy.verified", False, "thresholds")


def rows(stage: PlannedStage) -> Amount:
    config, sample = stage.config, sampled(only(stage, "judgments", "completions"))
    each = 1.0
    if isinstance(config.strategy, AllPairs):
        each = min(comb(answers_of_prompt(sample), 2), config.strategy.per_prompt or inf)
    return Amount(min(sample.config.prompts.count * each, config.budget.pairs if config.budget else inf), "at most")


def row_tokens(stage: PlannedStage) -> float | None:
    first = only(stage, "judgments", "completions")
    second = SHARE_OF_A_BOUND * sampled(first).config.sampling.max_tokens + TURN
    return None if first.row_tokens is None else first.row_tokens + second


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
    verified=lambda config: frozenset({"completions", "relaxed"}),
    decided_by=lambda config: ("stages/pair/pair_selection.py",),
    ids="kept",
    needs=pair_needs,
    problem=pair_problem,
    rows=rows,
    row_tokens=row_tokens,
    shrink=shrink,
    family="judging",
    reports_drops=True,
)
