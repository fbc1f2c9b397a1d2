"""`preference_train` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.work import Amounts, PlannedStage
from pedigree.configs.judging.pairing import preference_problem
from pedigree.configs.methods.preference import Kto
from pedigree.configs.methods.training import PreferenceTrain, shrink_training, training_work


def work(stage: PlannedStage) -> Amounts:
    return training_work(stage, "preferences", answers=2, examples=2 if isinstance(stage.config.loss, Kto) else 1)


KIND = Kind(
    name="preference_train",
    version=3,
    config=PreferenceTrain,
    inputs={
        "policy": port("policy"),
        "preferences": port("preference", many=True),
        "reference": port("policy", "logprobs", optional=True),
    },
    output=gives("policy"),
    engine="deepspeed",
    trains_on=frozenset({"preferences"}),
    problem=preference_problem,
    work=work,
    shrink=shrink_training,
    family="training",
    curve="loss",
)
