"""`preference_train` as recipes, plans, rehearsals and reports see it."""

from pedigree.configs.base.kind import RENDERING, Kind, gives, port
from pedigree.configs.base.work import TrainingPlan
from pedigree.configs.judging.pairing import preference_problem
from pedigree.configs.methods.preference import Kto
from pedigree.configs.methods.training import PreferenceTrain, shrink_training, training_plan, training_work

CACHED = "use a `reference_logprobs` stage as the input `reference` in the recipe"


def plan(config: PreferenceTrain) -> TrainingPlan:
    referenced = not config.loss.reference_free
    if isinstance(config.loss, Kto):  # a pair becomes one or two answers; their reference cannot be cached (`reference_problem`)
        return training_plan(config, "answers", answers=2, reference=referenced, examples=2, head=config.head)
    return training_plan(config, "pairs", answers=2, reference=referenced, without_reference=CACHED, head=config.head)


KIND = Kind(
    name="preference_train",
    version=4,
    config=PreferenceTrain,
    inputs={
        "policy": port("policy"),
        "preferences": port("preference", pooled=True),
        "reference": port("policy", "logprobs", optional=True),
    },
    output=gives("policy"),
    engine="deepspeed",
    decided_by=lambda config: RENDERING,
    trains_on=frozenset({"preferences"}),
    problem=preference_problem,
    work=lambda stage: training_work(stage, "preferences", plan(stage.config)),
    training_plan=plan,
    shrink=shrink_training,
    family="training",
    curve="loss",
)
