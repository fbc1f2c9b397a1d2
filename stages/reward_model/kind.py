"""`reward_model` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.work import Amounts, PlannedStage
from pedigree.configs.judging.pairing import reward_model_problem
from pedigree.configs.methods.training import RewardModel, shrink_training, training_work


def work(stage: PlannedStage) -> Amounts:
    return training_work(stage, "preferences", answers=2, share=1 - stage.config.holdout)


KIND = Kind(
    name="reward_model",
    version=3,
    config=RewardModel,
    inputs={"policy": port("policy"), "preferences": port("preference", many=True)},
    output=gives("reward_model"),
    engine="deepspeed",
    trains_on=frozenset({"preferences"}),
    problem=reward_model_problem,
    work=work,
    shrink=shrink_training,
    family="training",
    curve="loss",
)
