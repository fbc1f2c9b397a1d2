"""Restore recorded artifacts by id from the cache or the remote, without a recipe that could still make them."""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pedigree.data.artifacts.artifacts import PARTS, ArtifactError
from pedigree.data.store.durable import rename, sync_tree
from pedigree.data.store.untrusted import LockEntry, inside
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.lock_files import read_run_entry
from pedigree.pipelines.ledger.transfers import RemoteError


def bring(ledger: Ledger, address: str, target: Path, *, identifier: str | None = None, parts: Collection[str] = PARTS) -> bool:
    """Copy parts of an artifact of a stage from the cache or the remote into a new folder; every file is verified by hash.

    It is the artifact in `dvc.lock`, or the one with this id, in `dvc.lock` or the run cache. False, and no folder, if no place has it
    complete and undamaged.
    """
    for entry in _entries(ledger, address, history=identifier is not None):
        outs = entry.objects
        if identifier is not None and _identifier(ledger, entry) != identifier:
            continue
        if set(parts) <= outs.keys() and copy_objects(ledger, {part: outs[part] for part in parts}, target):
            return True
    return False


def _entries(ledger: Ledger, address: str, *, history: bool) -> Iterator[LockEntry]:
    """A stage's entries in `dvc.lock`, and with `history` in the run cache; the most likely first."""
    if recorded := ledger.locks.entry(address):
        yield recorded
    seen: set[Path] = set()
    for _ in range(2 if history else 0):
        files = ledger.locks.past_files()
        for path in sorted(files - seen):
            entry = read_run_entry(path)
            if entry and entry.cmd == f"pedigree stage {address}":
                yield entry
        seen |= files
        if not ledger.fetch_past():
            return


def _identifier(ledger: Ledger, entry: LockEntry) -> str | None:
    with suppress(ArtifactError, RemoteError):
        record = ledger.remote.record(entry)
        return record and record.id
    return None


def copy_objects(ledger: Ledger, parts: Mapping[str, str], target: Path) -> bool:
    """Copy objects to files and folders below `target`, atomically; False if one is missing or damaged.

    Raises:
        ArtifactError: a list of files names a path outside; nothing is left of what was copied.
    """
    if not ledger.remote.provide(parts.values()):
        return False
    building = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        for name, oid in parts.items():
            members = {name: oid}
            if oid.endswith(".dir"):
                (building / name).mkdir()
                members = {f"{name}/{place}": md5 for place, md5 in ledger.cache.listing(oid).items()}
            for place, member in members.items():
                copy = inside(building, place)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ledger.cache.path(member), copy, follow_symlinks=False)
        sync_tree(building)
        rename(building, target)
        return True
    finally:
        shutil.rmtree(building, ignore_errors=True)
