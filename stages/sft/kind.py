"""`sft` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.methods.training import Sft, shrink_training

KIND = Kind(
    name="sft",
    version=3,
    config=Sft,
    inputs={"policy": port("policy"), "data": port("conversation", many=True)},
    output=gives("policy"),
    engine="deepspeed",
    trains_on=frozenset({"data"}),
    shrink=shrink_training,
    family="training",
    curve="loss",
)
