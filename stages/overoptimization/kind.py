"""`overoptimization` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.shrink import RESAMPLES, Cut
from pedigree.configs.base.work import only
from pedigree.configs.judging.scoring import Overoptimization, overoptimization_problem, too_few_answers

MAX_N = 2


def shrink(cut: Cut) -> None:
    cut.most("max_n", MAX_N, "samples")
    cut.most("resamples", RESAMPLES, "samples")


KIND = Kind(
    name="overoptimization",
    version=1,
    config=Overoptimization,
    inputs={"judgments": port("judgment"), "gold": port("judgment", optional=True)},
    output=gives("report"),
    problem=overoptimization_problem,
    preflight=lambda stage: too_few_answers(only(stage, "judgments"), stage.config.max_n or 2),
    shrink=shrink,
    family="measuring",
    decided_by=lambda config: ("stages/overoptimization/best_of_n.py",),
    curve="gold",
)
