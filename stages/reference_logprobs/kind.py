"""`reference_logprobs` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import RENDERING, Kind, gives, port
from pedigree.configs.base.work import Amounts, PlannedStage, ScoringPlan, at_ports
from pedigree.configs.methods.training import ReferenceLogprobs


def work(stage: PlannedStage) -> Amounts:
    rows, document = at_ports(stage, ("preferences",), 2 * stage.config.max_length)
    return Amounts(rows=rows, document=document, tokens=rows.times(document) if rows and document else None)


KIND = Kind(
    name="reference_logprobs",
    version=2,
    config=ReferenceLogprobs,
    inputs={"policy": port("policy"), "preferences": port("preference", pooled=True)},
    output=gives("logprobs"),
    engine="torch",
    decided_by=lambda config: RENDERING,
    work=work,
    scoring_plan=lambda config: ScoringPlan("policy", config.dtype, config.max_length, head=config.head),
    family="judging",
)
