"""`judge` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import FUNCTIONS, RENDERING, REWARDING, Kind, gives, port
from pedigree.configs.base.work import Amount, PlannedStage, only, tokens_at
from pedigree.configs.judging.scoring import (
    SCORERS,
    Judge,
    scorers_need,
    scorers_problem,
    scorers_sampling_plan,
    scorers_scoring_plan,
    scorers_work,
    shrink_scorers,
)


def rows(stage: PlannedStage) -> Amount | None:
    return only(stage, "completions").rows


def decided_by(config: Judge) -> tuple[str, ...]:
    functions = FUNCTIONS if config.programs else ()
    return (*RENDERING, *REWARDING, "stages/core/ensembles.py", "stages/core/rating.py", "stages/judge/win_rates.py", *functions)


KIND = Kind(
    name="judge",
    version=7,
    config=Judge,
    inputs={"completions": port("completion"), **SCORERS},
    output=gives("judgment"),
    engine="torch",
    verified=lambda config: frozenset({"completions"}),
    decided_by=decided_by,
    needs=scorers_need,
    problem=scorers_problem,
    work=scorers_work,
    rows=rows,
    row_tokens=tokens_at("completions"),
    scoring_plan=scorers_scoring_plan,
    sampling_plan=scorers_sampling_plan,
    shrink=shrink_scorers,
    family="judging",
)
