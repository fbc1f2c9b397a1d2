"""`reward_model` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.judging.pairing import reward_model_problem
from configs.methods.training import RewardModel, shrink_training

KIND = Kind(
    name="reward_model",
    version=3,
    config=RewardModel,
    inputs={"policy": port("policy"), "preferences": port("preference", many=True)},
    output=gives("reward_model"),
    engine="deepspeed",
    trains_on=frozenset({"preferences"}),
    problem=reward_model_problem,
    shrink=shrink_training,
    family="training",
    curve="loss",
)
