"""Restore recorded artifacts by id from the cache or the remote, without a recipe that could still make them."""

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from pedigree.data.artifacts.artifacts import PARTS, ArtifactError, load_record
from pedigree.data.store.durable import rename, sync_tree
from pedigree.data.store.untrusted import inside
from pedigree.pipelines.ledger.ledger import Ledger


def bring(ledger: Ledger, address: str, target: Path, *, identifier: str | None = None, parts: Collection[str] = PARTS) -> bool:
    """Copy parts of an artifact into a new folder; every file is verified by hash.

    Args:
        ledger: of the project whose cache and remote are searched.
        address: where it was made, `RECIPE/STAGE`.
        target: a folder that does not exist.
        identifier: id of the artifact, searched in `dvc.lock` and the run cache; by default the artifact in `dvc.lock`.
        parts: names of files and folders of the artifact.

    Returns:
        False, and no folder, if neither place has it complete and undamaged.
    """
    for entry in ledger.entries(address, history=identifier is not None):
        outs = entry.objects
        if identifier is not None and _identifier(ledger, outs) != identifier:
            continue
        if set(parts) <= outs.keys() and copy_objects(ledger, {part: outs[part] for part in parts}, target):
            return True
    return False


def _identifier(ledger: Ledger, outs: Mapping[str, str]) -> str | None:
    """Id of the artifact whose `record.json` is among these objects."""
    path = ledger.store.object(outs["record.json"]) if "record.json" in outs else None
    try:
        return load_record(path).id if path else None
    except ArtifactError:
        return None


def copy_objects(ledger: Ledger, parts: Mapping[str, str], target: Path) -> bool:
    """Copy objects to files and folders below `target`, atomically; False if one is missing or damaged.

    Raises:
        ArtifactError: a list of files names a path outside; nothing is left of what was copied.
    """
    building = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        for name, oid in parts.items():
            path = ledger.store.object(oid)
            if path is None:
                return False
            members = [(name, oid)]
            if oid.endswith(".dir"):
                (building / name).mkdir()
                members = [(f"{name}/{place}", md5) for place, md5 in ledger.store.listing(oid).items()]
            for place, member in members:
                source = ledger.store.object(member)
                if source is None:
                    return False
                copy = inside(building, place)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy, follow_symlinks=False)
        sync_tree(building)
        rename(building, target)
        return True
    finally:
        shutil.rmtree(building, ignore_errors=True)
