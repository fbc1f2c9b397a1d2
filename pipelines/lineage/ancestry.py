"""The ancestry of an artifact, from its own `lineage.json`: no project, no DVC and no other file is needed.

`pipelines/lineage/find.py` finds a pedigree by any name that a user may type.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, BinaryIO

from configs.base.project import Project
from configs.base.texts import command
from configs.language.graph import Node, postorder
from configs.language.kinds import measures
from data.artifacts.artifacts import (
    LINEAGE_SCHEMA,
    Artifact,
    ArtifactError,
    Input,
    Record,
    Run,
    load_record,
    open_artifact,
    parse_lineage,
    parse_patches,
    parse_run,
    read_json,
)
from data.artifacts.lineage import folded
from data.records.records import row_files, rows_in
from data.store.untrusted import LINEAGE_BYTES, RUN_BYTES, inside, open_plain
from pipelines.lineage.named_models import find_named, named_models

Entry = tuple[Record, Run]
"""A record and its run."""


def parents_first(root: str, records: Mapping[str, Record]) -> list[str]:
    """Ids of an artifact and of all its ancestors, each once and after those that it was made from; the artifact itself is the last.

    Args:
        root: id of the artifact.
        records: by id, all that an edge leads to.

    Raises:
        ArtifactError: edges lead in a circle. Hashes alone do not rule that out: who made an input is no part of a key.
    """
    graph: dict[str, list[str]] = {}
    waiting = [root]
    while waiting:
        identifier = waiting.pop()
        if identifier not in graph:
            graph[identifier] = [given.producer for given in records[identifier].inputs]
            waiting.extend(graph[identifier])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " <- ".join(identifier[:12] for identifier in error.args[1])
        problem = f"the lineage leads in a circle ({circle}): nothing is made from itself, so it is forged"
        raise ArtifactError(f"{problem}: ask whoever gave it to you for a sound copy") from error
    return postorder([root], graph.__getitem__)


def _without_measures(record: Record) -> Record:
    return record.model_copy(update={"inputs": tuple(given for given in record.inputs if not measures(record.kind, given.port))})


def as_told(entries: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """Records and runs as they are written: every value where it belongs."""
    return {name: {"record": record.model_dump(mode="json"), "run": run.as_json()} for name, (record, run) in entries.items()}


def no_file(path: str) -> BinaryIO:
    """For pedigrees of which the records alone are known."""
    raise ArtifactError(f"payload/{path} is not here: only the records of this artifact are known")


@dataclass(frozen=True)
class Pedigree:
    """The records of an artifact and of all its ancestors, wherever they were read from."""

    id: str
    entries: Mapping[str, Entry]
    """By id: its own and those of all ancestors."""
    open_file: Callable[[str], BinaryIO] = no_file
    """Opens a file by its path in the payload; ArtifactError where it cannot be had."""
    patches: Mapping[str, str] = field(default_factory=dict)
    """sha256 → text of the patches that the attempts name."""

    @property
    def record(self) -> Record:
        return self.entries[self.id][0]

    @property
    def run(self) -> Run:
        return self.entries[self.id][1]

    @property
    def address(self) -> str:
        """Where it was made, `RECIPE/STAGE`; the start of its id where that was not recorded."""
        return self.run.address or self.id[:12]

    def row_files(self) -> list[str]:
        """Those files of the payload that hold rows; none where it is no data."""
        return row_files(entry.path for entry in self.record.files)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of its payload, one after another.

        Raises:
            ArtifactError: they cannot be had, or are damaged.
        """
        for name in self.row_files():
            with self.open_file(name) as stream:
                yield from rows_in(stream, name)

    def of(self, identifier: str) -> "Pedigree":
        """That of an ancestor, of which the records alone are known."""
        return Pedigree(identifier, self.entries, patches=self.patches)

    def parents_first(self) -> "list[Pedigree]":
        """All ancestors and itself, each once."""
        return self._in_order({identifier: record for identifier, (record, _) in self.entries.items()})

    def material(self) -> "list[Pedigree]":
        """The same without what only measured others, as a tokenizer that counted the tokens of rows: nothing of it is in them."""
        return self._in_order({identifier: _without_measures(record) for identifier, (record, _) in self.entries.items()})

    def _in_order(self, records: Mapping[str, Record]) -> "list[Pedigree]":
        return [self if identifier == self.id else self.of(identifier) for identifier in parents_first(self.id, records)]

    def as_lineage(self) -> dict[str, Any]:
        """What `lineage.json` holds: records and runs of the ancestors, the patches of itself too."""
        runs = {found.id: found.run for found in self.parents_first()}
        named = {attempt.code.patch_sha256 for run in runs.values() for attempt in run.attempts if attempt.code}
        patches = {sha256: self.patches[sha256] for sha256 in sorted(self.patches.keys() & named)}
        ancestors = sorted(runs.keys() - {self.id})
        return {"schema_version": LINEAGE_SCHEMA, **folded(as_told({name: self.entries[name] for name in ancestors}), patches)}


@dataclass(frozen=True)
class Ancestor:
    """An artifact in a pedigree, and what it was made from."""

    id: str
    address: str
    """Where it was made: `RECIPE/STAGE`."""
    role: str
    """Port (and label, where it differs from the stage's name) at which the child reads it; empty for the artifact itself."""
    record: Record
    run: Run
    parents: tuple["Ancestor", ...]
    repeated: bool
    """It stands further up already, with its parents: a pedigree is a graph, and this is its tree."""

    @property
    def name(self) -> str:
        return self.address.partition("/")[2]


def read_pedigree(folder: Path) -> Pedigree:
    """The pedigree in an artifact's folder, or in an exported one.

    Raises:
        ArtifactError: the artifact or its lineage is missing or damaged.
    """
    exported = not (folder / "record.json").is_file() and (folder / "pedigree" / "record.json").is_file()
    records, payload = (folder / "pedigree", folder) if exported else (folder, folder / "payload")
    record = open_artifact(folder).record if not exported else load_record(inside(folder, "pedigree/record.json"))

    def open_file(path: str) -> BinaryIO:
        try:
            return open_plain(inside(payload, path))
        except OSError as error:
            raise ArtifactError(f"{payload / path} cannot be read ({error}): restore the artifact or export it again") from error

    run, lineage = read_json(records / "run.json", RUN_BYTES), read_json(records / "lineage.json", LINEAGE_BYTES)
    return pedigree_of(record, run, lineage, str(records / "lineage.json"), open_file)


def pedigree_of(record: Record, run: Any, lineage: Any, source: str, open_file: Callable[[str], BinaryIO]) -> Pedigree:
    """A pedigree from what its three files hold; every edge must lead to a record.

    Args:
        record: of the artifact itself.
        run: what stands in its `run.json`.
        lineage: what stands in its `lineage.json`.
        source: name of the latter, for messages.
        open_file: see `Pedigree`.

    Raises:
        ArtifactError: the lineage lacks an ancestor, has one under another's id, or leads in a circle.
    """
    ancestors = parse_lineage(lineage, source)
    entries: dict[str, Entry] = {record.id: (record, parse_run(run, source.replace("lineage.json", "run.json")))}
    for identifier, entry in ancestors.items():
        if entry[0].id != identifier:
            raise ArtifactError(f"{source} is damaged: the record under {identifier[:12]} has id {entry[0].id[:12]}")
        entries[identifier] = entry
    for child, made in entries.values():
        for given in child.inputs:
            if given.producer not in entries:
                raise ArtifactError(f"the lineage lacks {given.producer[:12]}, the {given.port} of {made.address}: it is damaged")
    parents_first(record.id, {identifier: found for identifier, (found, _) in entries.items()})
    return Pedigree(record.id, entries, open_file, parse_patches(run, lineage, source))


def ancestry(folder: Path) -> Ancestor:
    """The tree of all that an artifact was made from.

    Raises:
        ArtifactError: the artifact or its lineage is missing or damaged.
    """
    return tree(read_pedigree(folder))


def tree(pedigree: Pedigree) -> Ancestor:
    """A pedigree as a tree: what is read twice stands in it twice, its parents once."""
    lines: list[tuple[int, Input | None, str, bool]] = []
    seen: set[str] = set()
    waiting: list[tuple[int, Input | None, str]] = [(0, None, pedigree.id)]
    while waiting:  # no recursion: an ancestry may be longer than Python's stack
        depth, edge, identifier = waiting.pop()
        lines.append((depth, edge, identifier, identifier in seen))
        if identifier not in seen:
            waiting += [(depth + 1, given, given.producer) for given in reversed(pedigree.entries[identifier][0].inputs)]
        seen.add(identifier)
    below: dict[int, list[Ancestor]] = {}
    for depth, edge, identifier, repeated in reversed(lines):
        record, run = pedigree.entries[identifier]
        role = _role(edge.port, edge.label, run) if edge else ""
        parents = tuple(reversed(below.pop(depth + 1, [])))
        below.setdefault(depth, []).append(Ancestor(identifier, run.address or "", role, record, run, parents, repeated))
    return below[0][0]


def walk(tree: Ancestor) -> Iterator[tuple[int, Ancestor]]:
    """The tree line by line: (depth, artifact)."""
    waiting = [(0, tree)]
    while waiting:
        depth, found = waiting.pop()
        yield depth, found
        waiting += [(depth + 1, parent) for parent in reversed(found.parents)]


def find_artifact(project: Project | None, name: str, recipe: str | None = None) -> Artifact:
    """An artifact by folder, `RECIPE/STAGE`, stage (in `recipe`, or the only one of its name), the name that a recipe gives to a model,
    or the start of its id or content hash.

    Raises:
        ArtifactError: none, or more than one; the message lists them.
    """
    folder = Path(name)
    if (folder / "record.json").is_file():
        return open_artifact(folder)
    if project is None:
        problem = f"{name} is no artifact folder (it holds no record.json), and here is no project to look in"
        raise ArtifactError(f"{problem}: give a folder that holds one, or type it inside a project")
    for address in (name, f"{recipe}/{name}"):
        if "/" in address and (project.artifact(address) / "record.json").is_file():
            return open_artifact(project.artifact(address))
    artifacts = list(published(project))
    named = [found for found in artifacts if found.path.name == name]
    if len(named) == 1:
        return named[0]
    model = None if named else find_named(named_models(project), name)
    if model is not None and not (project.artifact(model.address) / "record.json").is_file():
        raise ArtifactError(
            f"{name} is the model of {model.address}, which is not here: {command('run', model.recipe)} restores or makes it"
        )
    if model is not None:
        return open_artifact(project.artifact(model.address))
    matches = [found for found in artifacts if len(name) >= 4 and found.record.id.startswith(name)]
    matches = matches or named or [found for found in artifacts if len(name) >= 4 and found.record.content.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    addresses = [found.path.relative_to(project.artifacts).as_posix() for found in (matches or artifacts)]
    problem = (
        "stands for several artifacts"
        if matches
        else "is no artifact folder, RECIPE/STAGE, stage, model or id of at least 4 digits; there are"
    )
    raise ArtifactError(f"{name!r} {problem}: {', '.join(addresses) or 'none'}")


def opened(project: Project, node: Node) -> Artifact | None:
    """The stage's artifact, if a sound one is there."""
    try:
        return open_artifact(project.artifact(node.address))
    except ArtifactError:
        return None


def published(project: Project) -> Iterator[Artifact]:
    """All artifacts of the project that can be opened, sorted by address."""
    for record in sorted(project.artifacts.glob("*/*/record.json")):
        try:
            yield open_artifact(record.parent)
        except ArtifactError:  # damaged ones are found again by the next run
            continue


def _role(port: str, label: str, run: Run) -> str:
    return port if (run.address or "").endswith(f"/{label}") else f"{port} {label}"
