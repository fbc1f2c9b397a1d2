"""`sft` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.work import Amounts, PlannedStage
from pedigree.configs.methods.training import Sft, shrink_training, training_work


def work(stage: PlannedStage) -> Amounts:
    return training_work(stage, "data", answers=1)


KIND = Kind(
    name="sft",
    version=3,
    config=Sft,
    inputs={"policy": port("policy"), "data": port("conversation", many=True)},
    output=gives("policy"),
    engine="deepspeed",
    trains_on=frozenset({"data"}),
    work=work,
    shrink=shrink_training,
    family="training",
    curve="loss",
)
