"""`preference_train` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.judging.pairing import preference_problem
from configs.methods.training import PreferenceTrain, shrink_training

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
    shrink=shrink_training,
    family="training",
    curve="loss",
)
