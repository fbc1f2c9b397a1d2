"""`reward_model` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import RENDERING, Kind, gives, port
from pedigree.configs.base.work import TrainingPlan
from pedigree.configs.judging.pairing import reward_model_problem
from pedigree.configs.methods.training import RewardModel, shrink_training, training_plan, training_work


def plan(config: RewardModel) -> TrainingPlan:
    return training_plan(config, "pairs", answers=2, scalar_head=True)


KIND = Kind(
    name="reward_model",
    version=5,
    config=RewardModel,
    inputs={"policy": port("policy"), "preferences": port("preference", pooled=True)},
    output=gives("reward_model"),
    engine="deepspeed",
    decided_by=lambda config: RENDERING,
    trains_on=frozenset({"preferences"}),
    problem=reward_model_problem,
    work=lambda stage: training_work(stage, "preferences", plan(stage.config)),
    training_plan=plan,
    shrink=shrink_training,
    family="training",
    curve="loss",
)
