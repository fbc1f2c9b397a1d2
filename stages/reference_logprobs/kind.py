"""`reference_logprobs` as recipes, plans, rehearsals and reports see it."""

from configs.base.kind import Kind, gives, port
from configs.methods.training import ReferenceLogprobs

KIND = Kind(
    name="reference_logprobs",
    version=1,
    config=ReferenceLogprobs,
    inputs={"policy": port("policy"), "preferences": port("preference", many=True)},
    output=gives("logprobs"),
    engine="torch",
    family="judging",
)
