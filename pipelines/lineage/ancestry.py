"""The ancestry of an artifact, read from its `lineage.json` without a project or DVC.

`pipelines/lineage/find.py` resolves a user-supplied name to a pedigree.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pedigree.configs.base.mistakes import nearest
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.configs.language.graph import Node
from pedigree.configs.language.kinds import measures
from pedigree.data.artifacts.artifacts import (
    ADOPTED,
    LINEAGE_SCHEMA,
    Artifact,
    ArtifactError,
    Input,
    Record,
    Run,
    intact,
    load_record,
    open_artifact,
    parse_lineage,
    parse_patches,
    parse_run,
    read_json,
)
from pedigree.data.artifacts.chain import parents_first
from pedigree.data.artifacts.lineage import folded
from pedigree.data.records.records import row_files, rows_in
from pedigree.data.store.untrusted import LINEAGE_BYTES, RUN_BYTES, inside, open_plain
from pedigree.pipelines.lineage.named_models import find_named, named_models

Entry = tuple[Record, Run]
"""A record and its run."""
SHORTEST = 4
"""Minimum digits of an id or content hash prefix."""


def expanded(entries: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """Records and runs as JSON values."""
    return {name: {"record": record.model_dump(mode="json"), "run": run.as_json()} for name, (record, run) in entries.items()}


def no_file(path: str) -> BinaryIO:
    """`open_file` of a pedigree without a payload."""
    raise ArtifactError(f"payload/{path} is not available: only the records of this artifact exist here")


@dataclass(frozen=True)
class Pedigree:
    """The records of an artifact and all its ancestors."""

    id: str
    entries: Mapping[str, Entry]
    """By id, including its own entry."""
    open_file: Callable[[str], BinaryIO] = no_file
    """Opens a file by its path in the payload; raises ArtifactError if unavailable."""
    patches: Mapping[str, str] = field(default_factory=dict)
    """sha256 → text of the patches referenced by attempts."""

    @property
    def record(self) -> Record:
        return self.entries[self.id][0]

    @property
    def run(self) -> Run:
        return self.entries[self.id][1]

    @property
    def address(self) -> str:
        """`RECIPE/STAGE` that produced it, or an id prefix if not recorded."""
        return self.run.address or self.id[:12]

    def row_files(self) -> list[str]:
        """Payload files that contain rows; empty unless it is a dataset."""
        return row_files(entry.path for entry in self.record.files)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows of the payload; ArtifactError if they are unavailable or damaged."""
        for name in self.row_files():
            with self.open_file(name) as stream:
                yield from rows_in(stream, name)

    def of(self, identifier: str) -> "Pedigree":
        """The pedigree of an ancestor, records only."""
        return Pedigree(identifier, self.entries, patches=self.patches)

    def parents_first(self) -> "list[Pedigree]":
        """All ancestors in topological order, then itself."""
        return self._in_order({identifier: record for identifier, (record, _) in self.entries.items()})

    def material(self) -> "list[Pedigree]":
        """`parents_first` without inputs used only for measuring, such as a tokenizer that counted the tokens of rows."""
        return self._in_order({name: one.without(partial(measures, one.kind)) for name, (one, _) in self.entries.items()})

    def own(self) -> "list[Pedigree]":
        """`parents_first` without the stages of other projects, from which models were adopted."""
        return self._in_order({name: one.without(ADOPTED.__eq__) for name, (one, _) in self.entries.items()})

    def _in_order(self, records: Mapping[str, Record]) -> "list[Pedigree]":
        return [self if identifier == self.id else self.of(identifier) for identifier in parents_first(self.id, records)]

    def as_lineage(self) -> dict[str, Any]:
        """Contents of `lineage.json`: records and runs of the ancestors, and patches including its own."""
        runs = {found.id: found.run for found in self.parents_first()}
        named = {attempt.code.patch_sha256 for run in runs.values() for attempt in run.attempts if attempt.code}
        patches = {sha256: self.patches[sha256] for sha256 in sorted(self.patches.keys() & named)}
        ancestors = sorted(runs.keys() - {self.id})
        return {"schema_version": LINEAGE_SCHEMA, **folded(expanded({name: self.entries[name] for name in ancestors}), patches)}


class Ancestor(NamedTuple):
    """A line of a pedigree's tree."""

    depth: int
    role: str
    """Port (and label, if it differs from the stage name) through which the child reads it; empty for the root."""
    address: str
    """`RECIPE/STAGE` that produced it."""
    record: Record
    repeated: bool
    """Already listed earlier in the tree together with its parents, since a pedigree is a graph."""
    last: bool
    """Whether it is the last input of its child."""


def is_exported(folder: Path) -> bool:
    """Whether a folder is an export, whose records are in `pedigree/`, rather than an artifact."""
    return not (folder / "record.json").is_file() and (folder / "pedigree" / "record.json").is_file()


def read_pedigree(folder: Path) -> Pedigree:
    """Read the pedigree of an artifact folder or an exported folder; ArtifactError if it or its lineage is missing or damaged."""
    exported = is_exported(folder)
    records, payload = (folder / "pedigree", folder) if exported else (folder, folder / "payload")
    record = load_record(inside(folder, "pedigree/record.json")) if exported else open_artifact(folder).record
    run, lineage = read_json(records / "run.json", RUN_BYTES), read_json(records / "lineage.json", LINEAGE_BYTES)
    return pedigree_of(record, run, lineage, str(records / "lineage.json"), partial(open_payload, payload))


def open_payload(payload: Path, path: str) -> BinaryIO:
    """Open a file of a payload; ArtifactError if it cannot be read."""
    try:
        return open_plain(inside(payload, path))
    except OSError as error:
        raise ArtifactError(f"{payload / path} cannot be read ({error}): restore the artifact or export it again") from error


def pedigree_of(record: Record, run: Any, lineage: Any, source: str, open_file: Callable[[str], BinaryIO]) -> Pedigree:
    """Build a pedigree from the contents of its three files; every edge must reference a known record. `source` names `lineage.json` in
    messages.

    Raises:
        ArtifactError: the lineage lacks an ancestor, has an id mismatch, or has a cycle.
    """
    ancestors = parse_lineage(lineage, source)
    entries: dict[str, Entry] = {record.id: (record, parse_run(run, source.replace("lineage.json", "run.json")))}
    for identifier, entry in ancestors.items():
        if entry[0].id != identifier:
            raise ArtifactError(f"{source} is damaged: the record stored under id {identifier[:12]} has id {entry[0].id[:12]}")
        entries[identifier] = entry
    for child, made in entries.values():
        for given in child.inputs:
            if given.producer not in entries:
                raise ArtifactError(f"the lineage is damaged: it lacks {given.producer[:12]}, the {given.port} of {made.address}")
    parents_first(record.id, {identifier: found for identifier, (found, _) in entries.items()})
    return Pedigree(record.id, entries, open_file, parse_patches(run, lineage, source))


def walk(pedigree: Pedigree) -> Iterator[Ancestor]:
    """The tree of a pedigree in preorder: shared ancestors are repeated, but their parents are listed only once."""
    seen: set[str] = set()
    waiting: list[tuple[int, Input | None, bool]] = [(0, None, True)]
    while waiting:  # iterative, since an ancestry may exceed Python's recursion limit
        depth, edge, last = waiting.pop()
        identifier = edge.producer if edge else pedigree.id
        record, run = pedigree.entries[identifier]
        role = edge.port if edge else ""
        if edge and not (run.address or "").endswith(f"/{edge.label}"):
            role += f" {edge.label}"
        yield Ancestor(depth, role, run.address or "", record, identifier in seen, last)
        if identifier not in seen:
            waiting += [(depth + 1, given, given is record.inputs[-1]) for given in reversed(record.inputs)]
        seen.add(identifier)


def find_artifact(project: Project | None, name: str) -> Artifact:
    """Find an artifact by folder, `RECIPE/STAGE`, unique stage name, model name, or prefix of its id or content hash.

    Raises:
        ArtifactError: no match or several; the message lists them.
    """
    folder = Path(name)
    if (folder / "record.json").is_file():
        return open_artifact(folder)
    if project is None:
        problem = f"{name} is not an artifact folder (it has no record.json), and there is no project here"
        raise ArtifactError(f"{problem}: specify an artifact folder, or run the command in a project")
    if "/" in name and (project.artifact(name) / "record.json").is_file():
        return open_artifact(project.artifact(name))
    artifacts = list(published(project))
    named = [found for found in artifacts if found.path.name == name]
    if len(named) == 1:
        return named[0]
    model = None if named else find_named(named_models(project), name)
    if model is not None and not (project.artifact(model.address) / "record.json").is_file():
        what = name if name == model.address else f"{name} is the model of {model.address}, which"
        how = f"{command('run', model.recipe)} restores or rebuilds it, or {command('pull', model.recipe)} downloads it from the remote"
        raise ArtifactError(f"{what} is not available: {how}")
    if model is not None:
        return open_artifact(project.artifact(model.address))
    prefixed = artifacts if len(name) >= SHORTEST else []
    matches = [found for found in prefixed if found.record.id.startswith(name)]
    matches = matches or named or [found for found in prefixed if found.record.content.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    choices = [found.path.relative_to(project.artifacts).as_posix() for found in (matches or artifacts)]
    problem = (
        "matches several artifacts"
        if matches
        else f"is not an artifact folder, RECIPE/STAGE, stage, model, or id prefix (at least {SHORTEST} digits); available artifacts"
    )
    raise ArtifactError(f"{name!r} {problem}: {', '.join(choices) or 'none'}{'' if matches else nearest(name, choices)}")


def opened(project: Project, node: Node) -> Artifact | None:
    """The stage's artifact, or None if missing or damaged."""
    return intact(project.artifact(node.address))


def published(project: Project) -> Iterator[Artifact]:
    """All readable artifacts of the project, sorted by address; the next run reports damaged ones."""
    yield from filter(None, (intact(project.artifact(address)) for address in addresses(project)))


def addresses(project: Project) -> list[str]:
    """Sorted `RECIPE/STAGE`s of all folders with a record, including damaged ones."""
    return [path.parent.relative_to(project.artifacts).as_posix() for path in sorted(project.artifacts.glob("*/*/record.json"))]
