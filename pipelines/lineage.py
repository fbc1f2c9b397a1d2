"""The ancestry of an artifact, from its own `lineage.json`: no project, no DVC and no other file is needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.project import Project
from data.artifacts import Artifact, ArtifactError, Record, open_artifact, read_lineage, read_run


@dataclass(frozen=True)
class Ancestor:
    """An artifact in a pedigree, and what it was made from."""

    id: str
    address: str
    """Where it was made: `RECIPE/STAGE`."""
    role: str
    """Port (and label, where it differs from the stage's name) at which the child reads it; empty for the artifact itself."""
    record: Record
    run: dict[str, Any]
    parents: tuple["Ancestor", ...]
    repeated: bool
    """It stands further up already, with its parents: a pedigree is a graph, and this is its tree."""

    @property
    def name(self) -> str:
        return self.address.partition("/")[2]


def ancestry(folder: Path) -> Ancestor:
    """The tree of all that an artifact was made from.

    Raises:
        ArtifactError: the artifact or its lineage is missing or damaged.
    """
    artifact = open_artifact(folder)
    known = _known(folder)
    known[artifact.record.id] = (artifact.record, read_run(folder / "run.json"))
    return _tree(artifact.record.id, "", known, set())


def walk(tree: Ancestor, depth: int = 0) -> Iterator[tuple[int, Ancestor]]:
    """The tree line by line: (depth, artifact)."""
    yield depth, tree
    for parent in tree.parents:
        yield from walk(parent, depth + 1)


def find_artifact(project: Project | None, name: str, recipe: str | None = None) -> Artifact:
    """An artifact by folder, by `RECIPE/STAGE`, by stage name (with `recipe`), or by the start of its id or content hash.

    Raises:
        ArtifactError: none, or more than one; the message lists them.
    """
    folder = Path(name)
    if (folder / "record.json").is_file():
        return open_artifact(folder)
    if project is None:
        raise ArtifactError(f"{name} is no artifact folder (it holds no record.json), and here is no project to look in")
    for address in (name, f"{recipe}/{name}"):
        if "/" in address and (project.artifact(address) / "record.json").is_file():
            return open_artifact(project.artifact(address))
    artifacts = list(published(project))
    matches = [found for found in artifacts if len(name) >= 4 and found.record.id.startswith(name)]
    matches = matches or [found for found in artifacts if len(name) >= 4 and found.record.content.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    addresses = [found.path.relative_to(project.artifacts).as_posix() for found in (matches or artifacts)]
    problem = "stands for several artifacts" if matches else "is no artifact folder, RECIPE/STAGE or id of at least 4 digits; there are"
    raise ArtifactError(f"{name!r} {problem}: {', '.join(addresses) or 'none'}")


def published(project: Project) -> Iterator[Artifact]:
    """All artifacts of the project that can be opened, sorted by address."""
    for record in sorted(project.artifacts.glob("*/*/record.json")):
        try:
            yield open_artifact(record.parent)
        except ArtifactError:  # damaged ones are found again by the next run
            continue


def _tree(identifier: str, role: str, known: dict[str, tuple[Record, dict[str, Any]]], seen: set[str]) -> Ancestor:
    record, run = known[identifier]
    repeated = identifier in seen
    seen.add(identifier)
    parents = []
    for given in () if repeated else record.inputs:
        if given.producer not in known:
            raise ArtifactError(f"the lineage lacks {given.producer[:12]}, the {given.port} of {run.get('address')}: it is damaged")
        parents.append(_tree(given.producer, _role(given.port, given.label, known[given.producer][1]), known, seen))
    return Ancestor(identifier, str(run.get("address", "")), role, record, run, tuple(parents), repeated)


def _role(port: str, label: str, run: dict[str, Any]) -> str:
    return port if str(run.get("address", "")).endswith(f"/{label}") else f"{port} {label}"


def _known(folder: Path) -> dict[str, tuple[Record, dict[str, Any]]]:
    found = read_lineage(folder / "lineage.json")
    for identifier, (record, _) in found.items():
        if record.id != identifier:
            raise ArtifactError(f"{folder / 'lineage.json'} is damaged: the record under {identifier[:12]} has id {record.id[:12]}")
    return found
