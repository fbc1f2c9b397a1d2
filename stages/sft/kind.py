"""`sft` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import RENDERING, Kind, gives, port
from pedigree.configs.base.work import TrainingPlan
from pedigree.configs.methods.training import Sft, shrink_training, training_plan, training_work


def plan(config: Sft) -> TrainingPlan:
    return training_plan(config, "sequences")


KIND = Kind(
    name="sft",
    version=4,
    config=Sft,
    inputs={"policy": port("policy"), "data": port("conversation", pooled=True)},
    output=gives("policy"),
    engine="deepspeed",
    decided_by=lambda config: RENDERING,
    trains_on=frozenset({"data"}),
    work=lambda stage: training_work(stage, "data", plan(stage.config)),
    training_plan=plan,
    shrink=shrink_training,
    family="training",
    curve="loss",
)
