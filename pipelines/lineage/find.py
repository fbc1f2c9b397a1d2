"""The names under which a user may ask for an artifact, and the pedigree behind each.

An artifact's folder or an exported one, `RECIPE/STAGE`, a stage's name, the start of an id or of a content hash (of an ancestor
too, of which only the records are left), the name that a recipe gives to a model, and `NAME@REVISION`: what `dvc.lock` named at
that commit; there the revision may also be a version that a tag gives to a model.
"""

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from configs.base.project import Project
from data.artifacts.artifacts import PARTS, ArtifactError, parse_record
from data.store.untrusted import LINEAGE_BYTES, LIST_BYTES, RECORD_BYTES, RUN_BYTES, parse_json, parse_listing
from pipelines.ledger.by_id import copy_objects
from pipelines.ledger.ledger import Ledger, LedgerError, Recorded
from pipelines.lineage.ancestry import Pedigree, find_artifact, pedigree_of, published, read_pedigree
from pipelines.lineage.named_models import find_named, named_models, revision_of

SHORTEST = 4
"""Digits of an id or content hash."""


def find_pedigree(project: Project | None, name: str) -> Pedigree:
    """The pedigree behind any name.

    Args:
        project: where to look; None outside of one, where only folders have names.
        name: see the module.

    Raises:
        ArtifactError: nothing or more than one thing has the name, or what has it is damaged or can be had nowhere.
    """
    folder = Path(name)
    if (folder / "record.json").is_file() or (folder / "pedigree" / "record.json").is_file():
        return read_pedigree(folder)
    stage, at, revision = name.rpartition("@")
    if at and project is not None:
        try:
            with closing(Ledger(project, looking=True)) as ledger:
                return _committed(ledger, stage, revision_of(project, stage, revision))
        except LedgerError as error:
            raise ArtifactError(f"{name}: {error}") from error
    try:
        return read_pedigree(find_artifact(project, name).path)
    except ArtifactError:
        ancestor = _ancestor(project, name) if project is not None and len(name) >= SHORTEST else None
        if ancestor is None:
            raise
        return ancestor


def _ancestor(project: Project, name: str) -> Pedigree | None:
    """An artifact that was replaced or deleted, and stands in the lineage of one that is there."""
    found: dict[str, Pedigree] = {}
    here = set()
    for artifact in published(project):
        pedigree = read_pedigree(artifact.path)
        here.add(pedigree.id)
        found |= {
            identifier: pedigree.of(identifier)
            for identifier, (record, _) in pedigree.entries.items()
            if identifier.startswith(name) or record.content.startswith(name)
        }
    gone = [pedigree for identifier, pedigree in found.items() if identifier not in here]
    if len(gone) > 1:
        several = ", ".join(f"{pedigree.id[:12]} ({pedigree.address})" for pedigree in gone)
        raise ArtifactError(f"{name!r} stands for several ancestors: {several}; give more digits of an id")
    return gone[0] if gone and len(found) == 1 else None


@contextmanager
def artifact_folder(project: Project | None, name: str) -> Iterator[tuple[Path, str]]:
    """The folder of an artifact by any name, and its address; one of a git revision is taken out of the cache or the remote for the block.

    Raises:
        ArtifactError: nothing has the name, several things have it, or what has it can be had nowhere.
    """
    if "@" not in name or project is None or Path(name).exists():
        found = find_artifact(project, name).path
        yield found, "/".join(found.resolve().parts[-2:])
        return
    project.private.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=project.private, prefix="committed-") as folder:
        with closing(Ledger(project)) as ledger:
            address = bring_committed(ledger, name, Path(folder) / "artifact")
        yield Path(folder) / "artifact", address


def bring_committed(ledger: Ledger, name: str, target: Path, parts: Collection[str] = PARTS) -> str:
    """Copies parts of what `dvc.lock` named at a revision into a new folder, every file hashed on the way; returns the address.

    Args:
        ledger: of the project whose git repository, cache and remote are asked.
        name: `NAME@REVISION`.
        target: a folder that does not exist.
        parts: names of files and folders of the artifact.

    Raises:
        ArtifactError: there is no such thing, or neither place holds it whole.
    """
    stage, _, revision = name.rpartition("@")
    try:
        address, recorded = _recorded_at(ledger, stage, revision_of(ledger.project, stage, revision))
        wanted = {part: entry.md5 for part, entry in recorded.items() if part in parts}
        if wanted.keys() == set(parts) and copy_objects(ledger, wanted, target):
            return address
    except LedgerError as error:
        raise ArtifactError(f"{name}: {error}") from error
    raise ArtifactError(f"{name} is {address}, whose files neither this machine's cache nor the remote holds whole: run it at that commit")


def _recorded_at(ledger: Ledger, stage: str, revision: str) -> tuple[str, dict[str, Recorded]]:
    """Address of a stage or model at a revision, and the parts of its artifact there."""
    recorded = ledger.recorded_at(revision)
    addresses = sorted({entry.address for entry in recorded})
    chosen = [address for address in addresses if stage in (address, address.partition("/")[2])]
    if stage in chosen:
        chosen = [stage]
    model = None if chosen else find_named(named_models(ledger.project, revision), stage)
    if model is not None:
        chosen = [address for address in addresses if address == model.address]
    if len(chosen) != 1:
        problem = f"stands for {', '.join(chosen)}" if chosen else f"is in no dvc.lock; there are: {', '.join(addresses) or 'none'}"
        raise ArtifactError(f"at {revision} {stage!r} {problem}")
    return chosen[0], {entry.part: entry for entry in recorded if entry.address == chosen[0]}


def _committed(ledger: Ledger, stage: str, revision: str) -> Pedigree:
    """What a `dvc.lock` named at a git revision, read from the cache or the remote."""
    address, parts = _recorded_at(ledger, stage, revision)
    members: dict[str, str] = {}
    shown = f"{stage}@{revision}"

    def open_file(path: str) -> BinaryIO:
        try:
            if not members:
                members.update(parse_listing(_read(ledger, parts["payload"], LIST_BYTES), f"the list of payload/ of {shown}"))
            return ledger.open_object(members[path])
        except (LedgerError, KeyError) as error:
            raise ArtifactError(f"{stage}@{revision}: payload/{path} cannot be had: {error}") from error

    missing = {"record.json", "run.json", "lineage.json", "payload"} - parts.keys()
    if missing:
        raise ArtifactError(f"dvc.lock at {revision} names no {', '.join(sorted(missing))} of {address}: no Pedigree wrote it")
    record = parse_record(_read(ledger, parts["record.json"], RECORD_BYTES), f"record.json of {shown}")
    told = parse_json(_read(ledger, parts["run.json"], RUN_BYTES), f"run.json of {shown}", RUN_BYTES)
    lineage = parse_json(_read(ledger, parts["lineage.json"], LINEAGE_BYTES), f"lineage.json of {shown}", LINEAGE_BYTES)
    return pedigree_of(record, told, lineage, f"lineage.json of {shown}", open_file)


def _read(ledger: Ledger, entry: Recorded, limit: int) -> bytes:
    """An object's bytes, one more than the limit at most: the door refuses those that are too many."""
    with ledger.open_object(entry.md5) as stream:
        return stream.read(limit + 1)
