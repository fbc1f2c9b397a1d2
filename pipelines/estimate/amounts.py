"""The amount of work in a stage: counted from the records of finished stages, otherwise estimated by the hooks of their kinds."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from pedigree.configs.base.paths import place_of
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.base.work import CHARACTERS, TURN, Amount, Amounts, PlannedStage
from pedigree.configs.language.graph import Graph, Node
from pedigree.data.artifacts import assets
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.tools import OFFERED
from pedigree.data.records import records
from pedigree.data.records.records import rows_in
from pedigree.data.sources import row_files
from pedigree.data.store.untrusted import ArtifactError, open_plain
from pedigree.pipelines.estimate.outside import problem_of_source
from pedigree.pipelines.lineage.ancestry import opened

LOOKED_AT = 200
"""Number of rows of a dataset whose text is read; datasets are shuffled, so the first rows are a sample."""


@dataclass(frozen=True)
class Planned:
    """A stage of a graph, in the form that the hooks of kinds read (`configs.base.work.PlannedStage`)."""

    project: Project
    graph: Graph
    node: Node
    due: Collection[str] = ()
    """Addresses of stages whose artifacts will be replaced, so that nothing is read from them."""

    @property
    def config(self) -> Any:
        return self.node.config

    @property
    def frozen(self) -> bool:
        return self.node.declaration.frozen

    @property
    def inputs(self) -> Mapping[str, Mapping[str, PlannedStage]]:
        found: dict[str, dict[str, PlannedStage]] = {}
        for edge in self.node.edges:
            found.setdefault(edge.port, {})[edge.label] = replace(self, node=self.graph.nodes[edge.source])
        return found

    @property
    def readers(self) -> Sequence[PlannedStage]:
        return [replace(self, node=self.graph.nodes[address]) for address in self.graph.children[self.node.address]]

    @property
    def rows(self) -> Amount | None:
        artifact = None if self.node.address in self.due else opened(self.project, self.node)
        counted = count_of(artifact.record.metrics) if artifact else None
        return self.node.declaration.rows(self) if counted is None else Amount(counted, "counted")

    @property
    def row_tokens(self) -> float | None:
        found = _mean_tokens(opened(self.project, self.node))
        return self.node.declaration.row_tokens(self) if found is None else found

    def packaged_texts(self, asset: str) -> Sequence[str]:
        return packaged_rows(asset)

    def rows_in(self, path: str) -> int | None:
        try:
            return row_files.rows_at_most(self.place(path))
        except (PedigreeError, OSError):
            return None

    def place(self, path: str) -> Path:
        return place_of(self.project.root, path)

    def problem_of(self, source: Any) -> str | None:
        return problem_of_source(self.project, self.config, source)


def amounts_of(project: Project, graph: Graph, node: Node) -> Amounts:
    """The amount of work in one stage."""
    return node.declaration.work(Planned(project, graph, node))


def packaged_rows(asset: str) -> tuple[str, ...]:
    """The text of each row of a packaged file; empty if the file is missing or is not a JSON list."""
    try:
        return _texts(assets.path(asset))
    except (PedigreeError, OSError, ValueError):
        return ()


@lru_cache(maxsize=8)
def _texts(path: Path) -> tuple[str, ...]:
    rows = json.loads(path.read_bytes())
    return tuple("".join(_strings(row)) for row in rows) if isinstance(rows, list) else ()


def _strings(value: Any) -> Iterable[str]:
    """All texts inside a JSON value, without the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def count_of(metrics: Mapping[str, Any]) -> int | None:
    """Number of rows of an artifact, from the metrics in its record."""
    rows = metrics.get("rows", metrics.get("pairs"))
    return rows if isinstance(rows, int) and not isinstance(rows, bool) else None


def _mean_tokens(artifact: Artifact | None) -> float | None:
    """Mean tokens per row, estimated from the text of the first rows."""
    names = records.row_files(entry.path for entry in artifact.record.files) if artifact else []
    if artifact is None or not names:
        return None
    try:
        path = artifact.payload / names[0]
        return _tokens_in(path, path.stat().st_mtime_ns)
    except (ArtifactError, OSError, AttributeError, TypeError):
        return None


@lru_cache(maxsize=512)
def _tokens_in(path: Path, modified: int) -> float | None:
    """Cached by modification time, since many stages read the same rows."""
    with open_plain(path) as stream:
        found = [tokens_of(row) for row in islice(rows_in(stream, path.name), LOOKED_AT)]
    return sum(found) / len(found) if found else None


def longer_share(artifacts: Iterable[Artifact], limit: int) -> float:
    """Share of rows with a document (a prompt with one of its answers) of more than `limit` tokens, estimated from the first rows."""
    longer = rows = 0.0
    for artifact in artifacts:
        names, there = records.row_files(entry.path for entry in artifact.record.files), count_of(artifact.record.metrics)
        if not names or not there:
            continue
        with open_plain(artifact.payload / names[0]) as stream:
            looked = [_longest(row) > limit for row in islice(rows_in(stream, names[0]), LOOKED_AT)]
        longer, rows = longer + there * sum(looked) / len(looked), rows + there
    return longer / rows if rows else 0.0


def _longest(row: Mapping[str, Any]) -> float:
    answers = row.get("answers") or ()
    return max(tokens_of({**row, "answers": [answer]}) for answer in answers) if answers else tokens_of(row)


def tokens_of(row: Mapping[str, Any]) -> float:
    """Estimate the tokens of a row from its text: one per digit, one per `CHARACTERS` other characters, and `TURN` for each message,
    answer, and list of tools."""
    texts = [str(message.get("content", "")) for message in row.get("messages") or ()]
    texts += [str(answer.get("text", "")) for answer in row.get("answers") or ()]
    texts += [row["text"]] if isinstance(row.get("text"), str) else []
    texts += [str(given) for name, given in (row.get("template_arguments") or {}).items() if name == OFFERED]
    digits = len(re.findall(r"\d", "".join(texts)))
    return digits + (sum(map(len, texts)) - digits) / CHARACTERS + TURN * len(texts)
