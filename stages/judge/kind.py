"""`judge` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.judging.answers import SCORERS, Judge, scorers_need, scorers_problem, shrink_scorers

KIND = Kind(
    name="judge",
    version=7,
    config=Judge,
    inputs={"completions": port("completion"), **SCORERS},
    output=gives("judgment"),
    engine="torch",
    needs=scorers_need,
    problem=scorers_problem,
    shrink=shrink_scorers,
    family="judging",
)
