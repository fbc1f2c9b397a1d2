"""Copy the candidate with the highest development score.

payload/                the chosen model, byte for byte
evidence/choice.json    all candidates' scores, best first
"""

import json
import shutil
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pedigree.configs.judging.measuring import Select
from pedigree.data.artifacts.artifacts import Artifact, write_json
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only


def run(config: Select, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Choose by the scores of `evaluate`; ties go to the candidate that comes first in the recipe.

    Raises:
        StageError: the scores are from an unseen suite or from other models, or lack the task.
    """
    scores = only(inputs, "scores")
    if scores.record.metrics.get("split") != "dev":
        raise StageError("the scores are from an unseen suite, which must not be used for selection: use an `evaluate` stage on dev suites")
    table = json.loads((scores.payload / "scores.json").read_text())["policies"]
    candidates = inputs["candidates"]
    scored = {label: score_of(label, candidate, scores, table, config.task) for label, candidate in candidates.items()}
    ranking = sorted(scored, key=lambda label: -scored[label])  # stable: ties keep recipe order
    chosen = ranking[0]
    with job.busy("copying the model"):
        shutil.copytree(candidates[chosen].payload, job.out / "payload")
    choice = {
        "chosen": chosen,
        "content": candidates[chosen].record.content,
        "task": config.task,
        "ranking": [{"candidate": label, "score": scored[label]} for label in ranking],
    }
    write_json(job.evidence / "choice.json", choice)
    return {"chosen": chosen, "chosen_content": choice["content"], "scores": scored}


def score_of(label: str, candidate: Artifact, scores: Artifact, table: dict[str, Any], task: str | Sequence[str] | None) -> float:
    """The development score of exactly this model, matched by content under any label."""
    evaluated = {edge.label: edge.content for edge in scores.record.inputs if edge.port == "policies"}
    content = candidate.record.content
    names = [label, *evaluated]
    name = next((name for name in names if evaluated.get(name) == content), None)
    if name is None:
        known = ", ".join(sorted(evaluated))
        raise StageError(
            f"candidate {label} ({content[:12]}) was not evaluated in its current version: the scores are of {known}; add it to the "
            "policies of the `evaluate` stage"
        )
    tasks = table[name]["tasks"]
    wanted = tasks if task is None else [task] if isinstance(task, str) else task
    for one in wanted:
        if one not in tasks:
            raise StageError(f"{label} has no score for task {one!r}; scored tasks: {', '.join(sorted(tasks))}")
    return fmean(tasks[one]["mean"] for one in wanted)  # rounded once, so that ties are ties
