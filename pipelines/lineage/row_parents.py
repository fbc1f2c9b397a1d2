"""Which rows of a project were made from which others.

A stage that makes rows from other rows names these in `evidence/parents.parquet` (`data/records/parents.py`), and completions and judgments
have the column `prompt_id`. Rows that keep their id need no parent. Artifacts of earlier versions have no such file: for them, and for
artifacts with rows from them, `spelled_parent` reads the id.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from pedigree.configs.judging.pairing import STRATEGIES
from pedigree.configs.rows.filters import base_id
from pedigree.data.artifacts.artifacts import Artifact, Record
from pedigree.data.records import parents, records

OF_PROMPT = re.compile(rf"(.*)/(?:{'|'.join(map(re.escape, STRATEGIES))})(?:/[0-9]+)?|(.*-[0-9a-f]{{16}}(?:-[0-9]+)?)/.*", re.DOTALL)
SPELLED = ("pair", "best_answers", "constrain", "synthesize")
"""Kinds whose earlier versions named the parent of a row in its id only."""
NAMED_TYPES = ("completion", "judgment")
"""Types of rows with the column `prompt_id`."""


def spelled_parent(name: str) -> str:
    """The id at the start of an id of an earlier version: `PROMPT/STRATEGY`, `PROMPT/POLICY/INDEX`, and `PROMPT/PART` are from `PROMPT`."""
    while found := OF_PROMPT.fullmatch(name):
        name = found[found.lastindex or 0]
    return base_id(name)


def ids_of(row: Mapping[str, Any]) -> set[str]:
    """The ids by which a row is traced, without copy numbers: its own and its prompt's."""
    return {base_id(str(row[field])) for field in ("id", "prompt_id") if field in row}


@dataclass(frozen=True)
class RowParents:
    """The parents of all rows of a project. Ids are without copy numbers."""

    artifacts: Sequence[tuple[str, Artifact]]
    """(address, artifact) of all available artifacts, parents first."""
    spelled: Collection[str]
    """Ids of the artifacts in which ids name parents, see `spelled_artifacts`."""
    noting: Callable[[str], AbstractContextManager[None]]
    """Records an unreadable artifact by its address."""

    def roots(self, names: Collection[str]) -> set[str]:
        """The rows from which these were made. A row made from several others counts as a root."""
        found = set(names)
        for address, artifact in reversed(self.artifacts) if found else ():
            with self.noting(address):
                made = {name: parent for name, (parent, *more) in self._links(artifact) if name in found and not more}
                found = (found - made.keys()) | set(made.values())
        return found

    def family(self, roots: Collection[str]) -> tuple[set[str], dict[str, bool]]:
        """(the ids of these rows and of all rows made from one of them; content → whether it has rows made from several, one of these)."""
        found, blended = set(roots), dict[str, bool]()
        for address, artifact in self.artifacts if found else ():
            with self.noting(address):
                mine = [(name, of) for name, of in self._links(artifact) if not found.isdisjoint(of)]
                found |= {name for name, of in mine if len(of) == 1}
                if parents.named(artifact.evidence):
                    blended[artifact.record.content] = any(len(of) > 1 for _, of in mine)
        return found, blended

    def _links(self, artifact: Artifact) -> Iterator[tuple[str, set[str]]]:
        """(row, its parents) of rows with parents."""
        own = spelled_parent if artifact.record.id in self.spelled else base_id
        for name, of in self._named(artifact):
            name, of = base_id(name), set(map(own, of))
            if of - {name}:
                yield name, of

    def _named(self, artifact: Artifact) -> Iterator[tuple[str, Sequence[str]]]:
        if parents.named(artifact.evidence):
            yield from parents.read(artifact.evidence)
        elif artifact.type in NAMED_TYPES:
            for row in records.stream(artifact.payload, ("id", "prompt_id")):
                yield str(row.get("id")), [str(row.get("prompt_id"))]
        elif artifact.record.id in self.spelled:
            for row in records.stream(artifact.payload, ("id",)):
                yield str(row.get("id")), [str(row.get("id"))]


def spelled_artifacts(known: Mapping[str, tuple[Record, str]], artifacts: Sequence[tuple[str, Artifact]]) -> set[str]:
    """Ids of the artifacts in which ids name parents: those of `SPELLED` kinds that name none or are gone, and those with rows from them.

    `known` is id → record and address, parents first; `artifacts` are the available ones, with their addresses.
    """
    naming = {artifact.record.id for _, artifact in artifacts if parents.named(artifact.evidence)}
    found: set[str] = set()
    for identifier, (record, _) in known.items():
        above = any(given.producer in found for given in record.inputs) and record.type in records.RECORDS
        if above or (record.kind in SPELLED and identifier not in naming):
            found.add(identifier)
    return found
