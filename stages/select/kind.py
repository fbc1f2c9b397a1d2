"""`select` as recipes, plans, rehearsals and reports see it."""

from collections.abc import Iterator

from pedigree.configs.base.kind import Kind, gives, port
from pedigree.configs.base.work import PlannedStage
from pedigree.configs.judging.measuring import Evaluate, Select
from pedigree.configs.rows.datasets import PrepareData


def preflight(stage: PlannedStage) -> Iterator[str]:
    """Candidates and tasks without a score."""
    ((name, evaluation),), wanted = stage.inputs["scores"].items(), stage.config.task
    if not isinstance(evaluation.config, Evaluate):
        return
    for label, candidate in stage.inputs["candidates"].items():
        if candidate not in evaluation.inputs["policies"].values() and not candidate.frozen:  # a copy may equal another model
            yield f"{name} does not evaluate the candidate {label}: add it to the policies there, or remove it"
    suites = [suite.config for suite in evaluation.inputs["suites"].values()]
    tasks = [str(suite.task) for suite in suites if isinstance(suite, PrepareData)]
    for task in [wanted] if isinstance(wanted, str) else wanted or ():
        if len(tasks) == len(suites) and task not in tasks:
            yield f"{name} does not score the task {task!r}; its suites have the tasks {', '.join(tasks)}"


KIND = Kind(
    name="select",
    version=1,
    config=Select,
    inputs={"candidates": port("policy", many=True), "scores": port("scores")},
    output=gives("policy"),
    preflight=preflight,
    frozen=True,
    family="measuring",
    decided_by=lambda config: ("stages/select/run.py",),
)
