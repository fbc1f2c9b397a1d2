"""`judge` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import RENDERING, REWARDING, Kind, gives, port
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


KIND = Kind(
    name="judge",
    version=7,
    config=Judge,
    inputs={"completions": port("completion"), **SCORERS},
    output=gives("judgment"),
    engine="torch",
    verified=frozenset({"completions"}),
    decided_by=lambda config: (*RENDERING, *REWARDING, "stages/core/ensembles.py", "stages/core/rating.py", "stages/judge/win_rates.py"),
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
