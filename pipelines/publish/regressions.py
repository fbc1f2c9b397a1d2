"""Scores that fell: those of a run against those that were told of the run before it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.base.frozen import finite
from configs.base.project import Project
from configs.language.graph import Graph
from data.artifacts.artifacts import ArtifactError, read_json, write_json
from pipelines.publish.report import scores_of

SCHEMA = 2


@dataclass(frozen=True)
class Fall:
    """A score that lies below the 95 % interval of the one before."""

    evaluation: str
    """Stage that made it."""
    policy: str
    task: str
    mean: float
    before: float
    before_low: float
    """Lower end of the interval of the score before."""

    def __str__(self) -> str:
        return f"{self.policy} on {self.task}: {self.mean:.3f}, below {self.before_low:.3f}, where the interval of {self.before:.3f} ends"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fallen(before: dict[str, Any], now: dict[str, Any]) -> list[Fall]:
    """Scores whose mean lies below the 95 % interval of the mean before, in the same measure.

    Args:
        before: `measured` by the run before; evaluations, policies and tasks that it lacks have nothing to fall from.
        now: the same, of this run.
    """
    return list(_fallen(before, now))


def _fallen(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Fall]:
    for name, evaluation in now.items():
        old = before.get(name)
        if old is None:
            continue
        for policy, tasks in evaluation["policies"].items():
            for task, score in tasks.items():
                was = old["policies"].get(policy, {}).get(task)
                is_same = old["hashes"].get(task) == evaluation["hashes"].get(task)  # other items, form or sampling: another measure
                if was is not None and is_same and score["mean"] < was["low"]:
                    yield Fall(name, policy, task, score["mean"], was["mean"], was["low"])


def measured(project: Project, graph: Graph) -> dict[str, Any]:
    """What all published evaluations say: name → `hashes` (by task), `policies` (policy → task → mean, low, high)."""
    found = {}
    for name, scores in scores_of(project, graph).items():
        hashes = {task: told["hash"] for task, told in scores.get("tasks", {}).items()}  # those of an older version have none
        found[name] = {"hashes": hashes, "policies": {label: policy["tasks"] for label, policy in scores["policies"].items()}}
    return found


def remembered(project: Project, recipe: str) -> dict[str, Any] | None:
    """What the last run measured; None where nothing was noted, or not by this version."""
    try:
        noted = read_json(_note(project, recipe))
        return noted["evaluations"] if noted["schema_version"] == SCHEMA else None
    except (ArtifactError, KeyError, TypeError):
        return None


def remember(project: Project, recipe: str, evaluations: dict[str, Any]) -> None:
    """Notes it for the next run."""
    write_json(_note(project, recipe), {"schema_version": SCHEMA, "evaluations": finite(evaluations)})


def _note(project: Project, recipe: str) -> Path:
    return project.private / "scores" / f"{recipe}.json"
