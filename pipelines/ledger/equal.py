"""Find the artifact that a stage would make under any name: of a renamed stage, a copied recipe, a variant.

The key decides, except for names: the label of an input defaults to the name of its stage, and where it reaches nothing in the output
(`Port.takes_labels`), artifacts that differ only in it are the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import ADOPTED, ArtifactError, Input, Record, without_places
from pedigree.data.store.untrusted import LockEntry
from pedigree.pipelines.ledger.lock_files import LockFiles, read_run_entry
from pedigree.pipelines.ledger.remote import Remote
from pedigree.pipelines.ledger.transfers import LedgerError


@dataclass(frozen=True)
class StageInputs:
    """The identity of a stage run."""

    key: str
    inputs: tuple[Input, ...]
    folders: Mapping[str, Mapping[str, Path]]
    """Port → label → folder of the artifact."""
    source_files: Mapping[str, str]
    """Project file → sha256."""


@dataclass(frozen=True)
class Equal:
    """A recorded artifact that is what a stage would make."""

    entry: LockEntry
    made: Record
    """Its record."""
    record: Record
    """Its record under the key and the labels of the stage."""


class Equals:
    """The artifacts recorded in a project's `dvc.lock` files and run cache, by what their stages do."""

    def __init__(self, locks: LockFiles, remote: Remote) -> None:
        self.locks, self.remote = locks, remote
        self._past: dict[Path, LockEntry | None] = {}

    def of(self, node: Node, identify: Callable[[], StageInputs]) -> Iterator[Equal]:
        """Artifacts that equal the stage's; those in `dvc.lock` first. Their files may be missing.

        `identify` gives the stage's identity, if there is anything to compare it with.
        """
        wanted: StageInputs | None = None
        seen: set[str] = set()
        for entry in self._entries():
            named = entry.objects.get("record.json")
            if named is None or named in seen or not _does_the_same(entry, node):
                continue
            seen.add(named)
            wanted = wanted or identify()
            made = None
            with suppress(ArtifactError, LedgerError):
                made = self.remote.record(entry)
            if made is not None and _is_equal(made, node, wanted):
                yield Equal(entry, made, made if made.key == wanted.key else _renamed(made, wanted))

    def _entries(self) -> Iterator[LockEntry]:
        yield from self.locks.entries()
        for path in sorted(self.locks.past_files()):
            if path not in self._past:
                self._past[path] = read_run_entry(path)
            if entry := self._past[path]:
                yield entry


def _does_the_same(entry: LockEntry, node: Node) -> bool:
    """Whether an entry is of this kind and configuration, which spares reading its record."""
    wanted = node.identity()
    return any(
        isinstance(found, dict)
        and (found.get("kind"), found.get("version")) == (wanted["kind"], wanted["version"])
        and without_places(found.get("config")) == without_places(wanted["config"])
        for params in entry.params.values()
        for found in params.values()
    )


def _is_equal(made: Record, node: Node, wanted: StageInputs) -> bool:
    ports = node.declaration.inputs

    def edges(inputs: Sequence[Input]) -> list[tuple[str, str, str]]:
        return [(given.port, given.label if ports[given.port].takes_labels else "", given.content) for given in _sorted(inputs)]

    given = [one for one in made.inputs if one.port != ADOPTED]
    return (
        (made.kind, made.version) == (node.kind, node.declaration.version)
        and without_places(made.config) == without_places(node.config.model_dump(mode="json"))
        and made.source_files == wanted.source_files
        and {one.port for one in given} <= ports.keys()
        and edges(given) == edges(wanted.inputs)
    )


def _renamed(made: Record, wanted: StageInputs) -> Record:
    """The record under the key and the labels of a stage; the order of ports is the record's."""
    labels = {port: iter([given.label for given in wanted.inputs if given.port == port]) for port in {given.port for given in made.inputs}}
    given = tuple(old.model_copy(update={"label": next(labels[old.port], old.label)}) for old in made.inputs)
    return made.model_copy(update={"key": wanted.key, "inputs": given})


def _sorted(inputs: Sequence[Input]) -> list[Input]:
    """By port, which the key ignores the order of; the order within a port matters."""
    return sorted(inputs, key=lambda given: given.port)
