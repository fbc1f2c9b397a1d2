"""`pair` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Iterator
from math import comb, inf

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import HIGHEST, LOWEST, Cut
from pedigree.configs.base.work import SHARE_OF_A_BOUND, TURN, Amount, PlannedStage, only
from pedigree.configs.judging.pairing import AllPairs, Delta, Pair, Relaxed, pair_needs, pair_problem
from pedigree.configs.judging.scoring import answers_of_prompt, sampled, too_few_answers


def shrink(cut: Cut) -> None:
    cut.most("min_pairs", 1, "thresholds")
    cut.most("min_gap", 0, "thresholds")
    cut.most("min_best", LOWEST, "thresholds")
    if cut.get("max_gap") is not None:
        cut.set("max_gap", HIGHEST, "thresholds")
    cut.set("truncated", "keep", "thresholds")
    if cut.get("strategy.verified"):
        cut.set("strategy.verified", False, "thresholds")


def rows(stage: PlannedStage) -> Amount | None:
    config, sample = stage.config, sampled(only(stage, "judgments", "completions"))
    if sample is None:
        return None
    each = 1.0
    if isinstance(config.strategy, AllPairs):
        each = min(comb(answers_of_prompt(sample), 2), config.strategy.per_prompt or inf)
    return Amount(min(sample.config.prompts.count * each, config.budget.pairs if config.budget else inf), "at most")


def row_tokens(stage: PlannedStage) -> float | None:
    first = only(stage, "judgments", "completions")
    if (sample := sampled(first)) is None or first.row_tokens is None:
        return None
    return first.row_tokens + SHARE_OF_A_BOUND * sample.config.sampling.max_tokens + TURN


def preflight(stage: PlannedStage) -> Iterator[str]:
    config, answers = stage.config, only(stage, "judgments", "completions")
    yield from too_few_answers(answers, 1 if isinstance(config.strategy, Relaxed) else 2)
    models = len(answers.inputs.get("reward_models", ()))
    if config.budget and config.budget.choose == "disagreement" and models < 2:
        yield f"budget.choose disagreement requires two or more reward models, but its answers have {models}: add some to the judge"
    if isinstance(config.strategy, Delta) and (sample := sampled(answers)):
        policies = sample.inputs["policies"]
        for name, label in (("strong", config.strategy.strong), ("weak", config.strategy.weak)):
            if label not in policies:
                yield f"strategy.{name} is {label!r}, but the completions are from {', '.join(policies)}: use one of them"


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
    preflight=preflight,
    rows=rows,
    row_tokens=row_tokens,
    shrink=shrink,
    family="judging",
    reports_drops=True,
)
