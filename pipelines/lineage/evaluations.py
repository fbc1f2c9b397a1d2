"""Evaluations of a policy in the project."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.store.untrusted import LIST_BYTES, parse_json
from pedigree.pipelines.lineage.ancestry import Pedigree, published, read_pedigree

if TYPE_CHECKING:
    from pedigree.stages.core.statistics import Interval

_ESTIMATES = TypeAdapter(dict[str, dict[str, float]])
Scores = dict[tuple[str, str], float]
"""Score by (task, id of the item)."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation and its label for one policy."""

    pedigree: Pedigree
    label: str

    @property
    def measure(self) -> tuple[Any, ...]:
        """Comparability key: evaluations are comparable if suites, settings, and task hashes are equal."""
        record = self.pedigree.record
        suites = sorted(given.content for given in record.inputs if given.port == "suites")
        return (record.version, json.dumps([record.config, record.metrics.get("hashes")], sort_keys=True), *suites)

    def table(self) -> dict[str, Any]:
        """Task → n, mean, and interval."""
        with self.pedigree.open_file("scores.json") as stream:
            found = parse_json(stream.read(LIST_BYTES + 1), f"scores.json of {self.pedigree.address}", LIST_BYTES)
        try:
            tasks = found["policies"][self.label]["tasks"]
            _ESTIMATES.validate_python(tasks)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"scores.json of {self.pedigree.address} has no scores for {self.label}") from error
        return tasks

    def scores(self) -> Scores:
        """Scores of all scored items."""
        rows = [row for row in self._rows() if row.get("score", "") is not None]
        if not all(isinstance(row.get("score"), int | float) for row in rows):
            raise ArtifactError(f"rows.jsonl of {self.pedigree.address} has a row with a non-numeric score")
        return {_name(row): row["score"] for row in rows}

    @cached_property
    def categories(self) -> Mapping[tuple[str, str], str]:
        """(task, item id) → category, for tasks whose score is an average over categories."""
        return {_name(row): str(row["category"]) for row in self._rows() if "category" in row}

    def estimate(self, scores: Scores) -> "Interval":
        """Mean and interval of these scores, averaged over categories and resampled as the evaluation's own."""
        from pedigree.stages.core.statistics import bootstrap_average

        items, categories, config = sorted(scores), self.categories, self.pedigree.record.config
        groups = [categories[item] for item in items] if all(item in categories for item in items) else None
        return bootstrap_average([scores[item] for item in items], groups=groups, resamples=config["resamples"], seed=config["seed"])

    def _rows(self) -> list[dict[str, Any]]:
        return [row for row in self.pedigree.rows() if row.get("policy") == self.label]


def _name(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row.get("task")), str(row.get("id"))


def labels_of(pedigree: Pedigree) -> list[Evaluation]:
    """One entry per policy that an evaluation scored, in recipe order."""
    return [Evaluation(pedigree, given.label) for given in pedigree.record.inputs if given.port == "policies"]


def evaluations_of(project: Project | None, content: str) -> list[Evaluation]:
    """All local evaluations of the policy with this content hash, sorted by address."""
    found = []
    for artifact in published(project) if project else ():
        labels = [given.label for given in artifact.record.inputs if given.port == "policies" and given.content == content]
        if labels and artifact.type == "scores" and any(entry.path == "scores.json" for entry in artifact.record.files):
            found.append(Evaluation(read_pedigree(artifact.path), labels[0]))
    return found
