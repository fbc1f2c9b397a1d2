"""A stage of a recipe with what its artifact shows: metrics, run, scores, and evidence, or why there is none."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Graph, Node, shown_name
from pedigree.data.artifacts.artifacts import Artifact, ArtifactError, Record, Run, open_artifact, read_json, read_run
from pedigree.data.artifacts.run_record import CodeState
from pedigree.data.store.untrusted import open_plain, read_lines
from pedigree.pipelines.lineage.ancestry import read_pedigree
from pedigree.pipelines.lineage.waivers import Split, splits_of


def report_path(project: Project, recipe: str) -> Path:
    return project.recipe_folder(recipe) / "report.html"


def code_text(code: CodeState | None) -> str:
    """Commit of the code, and whether it was changed."""
    return f"{(code.commit or 'none')[:12]}{' with local changes' if code.dirty else ''}" if code else ""


def metric_lines(record: Record) -> list[str]:
    """The first scalar metrics, and the content hash."""
    numbers = [f"{name}: {value}" for name, value in sorted(record.metrics.items()) if isinstance(value, int | float | str)]
    return [*numbers[:8], f"content {record.content[:12]}"]


@dataclass(frozen=True)
class Stage:
    """A node with its artifact, or the reason why there is none."""

    node: Node
    shown: str
    """Name in this recipe; for stages of other recipes, the address."""
    artifact: Artifact | None
    problem: str

    @cached_property
    def run(self) -> Run | None:
        try:
            return read_run(self.artifact.path / "run.json") if self.artifact else None
        except ArtifactError:  # the report shows what is readable
            return None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return self.artifact.record.metrics if self.artifact else {}

    @property
    def seconds(self) -> float | None:
        """Total wall time of all attempts of its job; None if none was recorded."""
        return self.run.seconds if self.run else None

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.artifact.record.files) if self.artifact else 0

    @cached_property
    def policies(self) -> list[str]:
        """Labels of its policies, in recipe order."""
        return [edge.label for edge in self.node.edges if edge.port == "policies"]

    @cached_property
    def scores(self) -> dict[str, Any]:
        """`scores.json` of a finished evaluation, with policies in recipe order; empty for other stages."""
        found = _json(self.artifact.payload / "scores.json") if self.artifact and self.node.output == "scores" else {}
        if found:
            found["policies"] = {label: found["policies"][label] for label in self.policies if label in found["policies"]}
        return found

    def splits(self) -> list[Split]:
        """Scores of an evaluation that waivers affect; ArtifactError if its rows are damaged."""
        return splits_of(read_pedigree(self.artifact.path)) if self.artifact else []

    def evidence(self, name: str) -> Any:
        return _json(self.artifact.evidence / name) if self.artifact else {}

    def evidence_rows(self, name: str) -> list[dict[str, Any]]:
        path = self.artifact.evidence / name if self.artifact else None
        if path is None or not path.is_file():
            return []
        with open_plain(path) as stream:
            return list(read_lines(stream, path.name))


def stage_of(project: Project, graph: Graph, node: Node) -> Stage:
    shown = shown_name(graph, node)
    try:
        return Stage(node, shown, open_artifact(project.artifact(node.address)), "")
    except ArtifactError as error:
        missing = not project.artifact(node.address).exists()
        return Stage(node, shown, None, "not built yet" if missing else str(error).replace(f"{project.root}/", ""))


def scores_of(project: Project, graph: Graph, among: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
    """Name → scores of the recipe's finished evaluations: all, or those with an address in `among`. Those of an earlier version count until
    they are replaced.
    """
    return {stage.shown: stage.scores for stage in _evaluations(project, graph, among) if stage.scores}


def waived_in(project: Project, graph: Graph, among: Collection[str] | None = None) -> Mapping[str, list[Split]]:
    """Name of an evaluation → its scores affected by waivers, split into contaminated and clean items.

    Damaged evaluations are omitted; the report describes their problems.
    """
    found: dict[str, list[Split]] = {}
    for stage in _evaluations(project, graph, among):
        with suppress(ArtifactError):
            found |= {stage.shown: splits} if (splits := stage.splits()) else {}
    return found


def _evaluations(project: Project, graph: Graph, among: Collection[str] | None) -> list[Stage]:
    nodes = [node for node in graph.nodes.values() if node.output == "scores" and (among is None or node.address in among)]
    return [stage_of(project, graph, node) for node in nodes]


def _json(path: Path) -> Any:
    """Parse a JSON file; empty if missing or unreadable, since evidence is optional."""
    try:
        return read_json(path)
    except ArtifactError:
        return {}
