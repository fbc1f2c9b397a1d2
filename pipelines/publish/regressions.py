"""Detect score regressions since the previous run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import finite
from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Graph
from pedigree.data.artifacts.artifacts import ArtifactError, read_json, write_json
from pedigree.pipelines.publish.shown_stages import scores_of

SCHEMA = 2


@dataclass(frozen=True)
class Fall:
    """A score below the 95% interval of the previous one."""

    evaluation: str
    """Name of the evaluation stage."""
    policy: str
    task: str
    mean: float
    before: float
    before_low: float
    """Lower end of the previous score's interval."""

    def __str__(self) -> str:
        was = f"{self.before:.3f} (interval from {self.before_low:.3f})"
        return f"{self.policy} on {self.task}: {self.mean:.3f}, previously {was}"


def fallen(before: dict[str, Any], now: dict[str, Any]) -> list[Fall]:
    """Scores whose mean is below the previous mean's 95% interval on the same task hash; both sides are from `measured`. What the previous
    run did not measure is skipped.
    """
    found = []
    for name, evaluation in now.items():
        old = before.get(name)
        if old is None:
            continue
        for policy, tasks in evaluation["policies"].items():
            for task, score in tasks.items():
                was = old["policies"].get(policy, {}).get(task)
                is_same = old["hashes"].get(task) == evaluation["hashes"].get(task)  # other items, form, or sampling are not comparable
                if was is not None and is_same and score["mean"] < was["low"]:
                    found.append(Fall(name, policy, task, score["mean"], was["mean"], was["low"]))
    return found


def measured(project: Project, graph: Graph) -> dict[str, Any]:
    """Scores of all published evaluations: name → `hashes` (by task), `policies` (policy → task → mean, low, high)."""
    found = {}
    for name, scores in scores_of(project, graph).items():
        hashes = {task: entry["hash"] for task, entry in scores.get("tasks", {}).items()}  # absent in older versions
        found[name] = {"hashes": hashes, "policies": {label: policy["tasks"] for label, policy in scores["policies"].items()}}
    return found


def remembered(project: Project, recipe: str) -> dict[str, Any] | None:
    """`measured` of the last run; None if not stored, or stored by another version."""
    try:
        noted = read_json(_note(project, recipe))
        return noted["evaluations"] if noted["schema_version"] == SCHEMA else None
    except (ArtifactError, KeyError, TypeError):
        return None


def remember(project: Project, recipe: str, evaluations: dict[str, Any]) -> None:
    write_json(_note(project, recipe), {"schema_version": SCHEMA, "evaluations": finite(evaluations)})


def _note(project: Project, recipe: str) -> Path:
    return project.private / "scores" / f"{recipe}.json"
