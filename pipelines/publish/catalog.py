"""Named models: artifact, state, scores, and versions."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import ArtifactError, Record, load_record, open_artifact
from pedigree.pipelines.jobs.events import Watch, unwatched
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_files import recorded
from pedigree.pipelines.lineage.evaluations import evaluations_of
from pedigree.pipelines.lineage.named_models import Named, named_models, versions
from pedigree.pipelines.lineage.waivers import touched
from pedigree.pipelines.run.opening import compiled_request, open_run
from pedigree.pipelines.run.plans import plan

State = Literal["current", "stale", "no recipe", "recorded", "not made"]
"""`current`: present and up to date. `stale`: present, but a run would replace it. `no recipe`: present, but its recipe is missing or
unreadable. `recorded`: named in `dvc.lock` only. `not made`: neither."""


@dataclass(frozen=True)
class NamedModel:
    """A named model."""

    model: Named
    state: State
    record: Record | None
    """None if it was not made or its record is only in the remote."""
    scores: dict[str, dict[str, dict[str, float]]]
    """Address of an evaluation → task → n, mean, and interval."""
    waived: dict[str, list[str]]
    """Address of an evaluation → tasks whose items overlap with training rows of the model under a waiver."""
    versions: list[str]

    def as_json(self) -> dict[str, Any]:
        record = self.record
        known = {"id": record.id, "content": record.content, "kind": record.kind} if record else {"id": None, "content": None, "kind": None}
        named = asdict(self.model) | {"labels": list(self.model.labels), "dvc": self.model.full}
        return named | known | {"state": self.state, "scores": self.scores, "waived": self.waived, "versions": self.versions}

    def cells(self) -> tuple[str, ...]:
        """A line of a table: name, artifact, state, id, scores, versions."""
        scores = [
            f"{task} {score['mean']:.3f}{' (waiver)' * (task in self.waived.get(address, ()))}"
            for address, tasks in self.scores.items()
            for task, score in tasks.items()
        ]
        named = (self.model.name, self.model.address, self.state, self.record.id[:12] if self.record else "")
        return (*named, ", ".join(scores), ", ".join(self.versions))


def registry(project: Project, watch: Watch = unwatched) -> list[NamedModel]:
    """All named models of the working tree; `watch` receives progress of slow steps."""

    @cache
    def standing(recipe: str) -> dict[str, State]:
        """Address → state, for the stages of a recipe."""
        try:
            planned = plan(open_run(project, compiled_request(project, recipe), looking=True, watch=watch))
        except ConfigError:
            return {}
        return {entry.node.address: "stale" if entry.reasons else "current" for entry in planned}

    with closing(Ledger(project, looking=True)) as ledger:
        parts = {(entry.address, entry.part): entry.md5 for entry in recorded(project)}
        return [_row(project, ledger, model, parts, standing) for model in named_models(project)]


def _row(
    project: Project, ledger: Ledger, model: Named, parts: dict[tuple[str, str], str], standing: Callable[[str], dict[str, State]]
) -> NamedModel:
    md5 = parts.get((model.address, "record.json"))
    try:
        record = open_artifact(project.artifact(model.address)).record
        state: State = standing(model.recipe).get(model.address, "no recipe")
    except ArtifactError:
        record, state = _cached(ledger, md5), "recorded" if md5 else "not made"
    scores, waived = {}, {}
    for found in evaluations_of(project, record.content) if record else []:
        address = found.pedigree.address
        scores[address] = found.table()
        tasks = [task for label, task in touched(found.pedigree) if label == found.label]
        waived |= {address: tasks} if tasks else {}
    return NamedModel(model, state, record, scores, waived, versions(project, model))


def _cached(ledger: Ledger, md5: str | None) -> Record | None:
    """Load a record from the local cache only; a listing must not query the remote."""
    try:
        return load_record(ledger.cache.path(md5)) if md5 else None
    except ArtifactError:
        return None
