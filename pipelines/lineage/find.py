"""Resolve a user-supplied name to a pedigree.

A name is an artifact folder or exported folder, `RECIPE/STAGE`, a stage name, a prefix of an id or content hash (including ancestors
that exist only as records), a model name, or `NAME@REVISION`: the artifact in `dvc.lock` at that commit, where REVISION may also be a
model version from a tag.
"""

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from pedigree.configs.base.project import Project
from pedigree.data.artifacts.artifacts import PARTS, ArtifactError, parse_record
from pedigree.data.store.untrusted import LINEAGE_BYTES, LIST_BYTES, RECORD_BYTES, RUN_BYTES, parse_json, parse_listing
from pedigree.pipelines.ledger.by_id import copy_objects
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_files import Recorded, recorded_at
from pedigree.pipelines.ledger.transfers import LedgerError
from pedigree.pipelines.lineage.ancestry import SHORTEST, Pedigree, find_artifact, is_exported, pedigree_of, published, read_pedigree
from pedigree.pipelines.lineage.named_models import find_named, named_models, revision_of


def find_pedigree(project: Project | None, name: str) -> Pedigree:
    """Find a pedigree by name (see the module docstring); outside a project, only folders can be named.

    Raises:
        ArtifactError: no match, several matches, or the match is damaged or unavailable.
    """
    folder = Path(name)
    if (folder / "record.json").is_file() or is_exported(folder):
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
    """A replaced or deleted artifact that is an ancestor of an existing one."""
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
        raise ArtifactError(f"{name!r} matches several ancestors: {several}; specify more digits of the id")
    return gone[0] if gone and len(found) == 1 else None


@contextmanager
def artifact_folder(project: Project | None, name: str) -> Iterator[tuple[Path, str]]:
    """Folder and address of an artifact by name; for a git revision, a temporary copy from the cache or remote."""
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
    """Copy parts of the artifact `NAME@REVISION` to a new folder, verifying every hash; returns the address.

    Raises:
        ArtifactError: there is no such artifact, or it is incomplete in both the cache and the remote.
    """
    stage, _, revision = name.rpartition("@")
    try:
        address, recorded = _recorded_at(ledger, stage, revision_of(ledger.project, stage, revision))
        wanted = {part: entry.md5 for part, entry in recorded.items() if part in parts}
        if wanted.keys() == set(parts) and copy_objects(ledger, wanted, target):
            return address
    except LedgerError as error:
        raise ArtifactError(f"{name}: {error}") from error
    raise ArtifactError(f"{name} is {address}, but neither the local cache nor the remote has all its files: run it at that commit")


def _recorded_at(ledger: Ledger, stage: str, revision: str) -> tuple[str, dict[str, Recorded]]:
    """Address of a stage or model at a revision, and the recorded parts of its artifact."""
    recorded = recorded_at(ledger.project, revision)
    addresses = sorted({entry.address for entry in recorded})
    chosen = [address for address in addresses if stage in (address, address.partition("/")[2])]
    if stage in chosen:
        chosen = [stage]
    model = None if chosen else find_named(named_models(ledger.project, revision), stage)
    if model is not None:
        chosen = [address for address in addresses if address == model.address]
    if len(chosen) != 1:
        problem = f"matches {', '.join(chosen)}" if chosen else f"is not in any dvc.lock; recorded: {', '.join(addresses) or 'none'}"
        raise ArtifactError(f"at {revision} {stage!r} {problem}")
    return chosen[0], {entry.part: entry for entry in recorded if entry.address == chosen[0]}


def _committed(ledger: Ledger, stage: str, revision: str) -> Pedigree:
    """Pedigree of an artifact in `dvc.lock` at a git revision, read from the cache or the remote."""
    address, parts = _recorded_at(ledger, stage, revision)
    members: dict[str, str] = {}
    shown = f"{stage}@{revision}"

    def open_file(path: str) -> BinaryIO:
        try:
            if not members:
                members.update(parse_listing(_read(ledger, parts["payload"], LIST_BYTES), f"the list of payload/ of {shown}"))
            return ledger.open_object(members[path])
        except (LedgerError, KeyError) as error:
            raise ArtifactError(f"{stage}@{revision}: payload/{path} is unavailable: {error}") from error

    missing = {"record.json", "run.json", "lineage.json", "payload"} - parts.keys()
    if missing:
        raise ArtifactError(f"dvc.lock at {revision} has no {', '.join(sorted(missing))} for {address}: Pedigree did not write it")
    record = parse_record(_read(ledger, parts["record.json"], RECORD_BYTES), f"record.json of {shown}")
    run = parse_json(_read(ledger, parts["run.json"], RUN_BYTES), f"run.json of {shown}", RUN_BYTES)
    lineage = parse_json(_read(ledger, parts["lineage.json"], LINEAGE_BYTES), f"lineage.json of {shown}", LINEAGE_BYTES)
    return pedigree_of(record, run, lineage, f"lineage.json of {shown}", open_file)


def _read(ledger: Ledger, entry: Recorded, limit: int) -> bytes:
    """Read at most one byte more than the limit, so that the parser rejects an oversized object."""
    with ledger.open_object(entry.md5) as stream:
        return stream.read(limit + 1)
