"""DVC's cache of this machine: hash files and folders, add them, verify objects, and put them into place.

An object's name is the MD5 of its bytes; that of a folder has `.dir` and is the list of its files.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pedigree.configs.base.texts import shown
from pedigree.data.store.hashing import LONG_BYTES, Beat, pieces, silent
from pedigree.data.store.untrusted import LIST_BYTES, ArtifactError, parse_listing, read_plain
from pedigree.pipelines.ledger.repository import Repository
from pedigree.pipelines.ledger.transfers import LedgerError, Part, ProgressCallback, Sum, last_error

if TYPE_CHECKING:
    from dvc_data.hashfile.db import HashFileDB

OBJECT = re.compile(r"[0-9a-f]{32}(?:\.dir)?")
"""Pattern of an object's name."""
Output = Mapping[str, Any]
"""What `dvc.lock` states about a path: `hash`, `md5`, `size`, and for a folder `nfiles`."""


class Cache:
    """The cache of one project. Safe to share between threads and processes."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    @property
    def odb(self) -> "HashFileDB":
        return self.repository.repo.cache.local

    # --- objects --------------------------------------------------------------------------------------------------------

    def path(self, oid: str) -> Path:
        """Path of an object, present or not. LedgerError: not a valid name, which could point outside the cache."""
        if not OBJECT.fullmatch(oid):
            raise LedgerError(f"{shown(oid[:80])!r} is not a DVC object name: do not trust its source")
        return Path(self.odb.oid_to_path(oid))

    def listing(self, oid: str) -> dict[str, str]:
        """Path → md5 of the files of a folder whose `.dir` object is in the cache.

        Raises:
            ArtifactError: it is not in the cache, cannot be read, or was not written by DVC, e.g. it names a path outside.
        """
        return parse_listing(read_plain(self.path(oid), LIST_BYTES), f"object {oid}")

    def names(self, oids: Iterable[str]) -> list[str]:
        """The objects, and those of the files of each folder whose list is in the cache.

        Forged lists are deleted, except in read-only mode.

        Raises:
            ArtifactError: a list cannot be read, or is forged, e.g. it names a path outside.
        """
        found = list(oids)
        for oid in [oid for oid in found if oid.endswith(".dir") and self.path(oid).exists()]:
            try:
                found += self.listing(oid).values()
            except ArtifactError as error:
                if not isinstance(error.__cause__, OSError) and not self.repository.looking:
                    self.path(oid).unlink(missing_ok=True)
                raise
        return sorted(set(found))

    def holds(self, oids: Iterable[str]) -> bool:
        """Whether all these objects and those that they list are there. Bytes are read only where DVC has not protected them."""
        from dvc_objects.errors import ObjectFormatError

        try:
            for oid in oids:
                for name in (*(self.listing(oid).values() if oid.endswith(".dir") else ()), oid):
                    self.odb.check(name)
        except (FileNotFoundError, ObjectFormatError, ArtifactError):
            return False
        return True

    def lacks(self, oids: Iterable[str], beat: Beat = silent) -> bool:
        """Whether one of these objects is missing or has bytes that do not match its name; such an object is deleted, except in read-only
        mode.
        """
        paths = {oid: self.path(oid) for oid in sorted(set(oids))}
        progress = Sum(beat, sum(path.stat().st_size for path in paths.values() if path.exists())).add
        damaged = [path for oid, path in paths.items() if md5_of(path, progress) != oid.removesuffix(".dir")]
        for path in damaged if not self.repository.looking else ():
            path.unlink(missing_ok=True)
        return bool(damaged)

    def objects(self) -> dict[str, Path]:
        """All objects of the cache, by md5."""
        base = self.path("0" * 32).parent.parent
        found = {f"{path.parent.name}{path.name}": path for path in base.glob("??/*")} if base.is_dir() else {}
        return {oid: path for oid, path in found.items() if OBJECT.fullmatch(oid)}

    # --- files in place -------------------------------------------------------------------------------------------------

    def remember(self, md5s: Mapping[Path, str], looks: Mapping[Path, dict[str, Any]] | None = None) -> None:
        """Add known MD5s of files to DVC's database, so that they are not read again; `looks`: the metadata before a file was read."""
        known = [(str(path), hash_info(md5), looks[path] if looks else None) for path, md5 in md5s.items()]
        self.repository.repo.state.save_many(known, self.repository.repo.fs)

    def hashed(self, path: Path, beat: Beat = silent) -> Output | None:
        """A file or folder as an output, without its path; None if there is none. Files that DVC's database knows are not read.

        `beat` reports the hashing of large files: after a move or on another machine, this is most of the work.
        """
        try:
            self._hash_large(path, beat)
            _, meta, obj = self._build(path, dry_run=True)
        except FileNotFoundError:
            return None
        return {"hash": "md5", "md5": obj.hash_info.value} | {name: value for name, value in meta.to_dict().items() if name != "isdir"}

    def add(self, path: Path, beat: Beat = silent) -> None:
        """Put a file or folder into the cache; the caller holds the lock. `beat` reports the hashing of objects that are there already.

        Outputs are added one by one: DVC's attempt at a reflink truncates an equal object that another stage is just adding. Files in place
        are not touched: DVC would remove a file before linking it to the cache, and a kill or a reader in between would find none.

        Raises:
            LedgerError: git tracks it, or the cache cannot take it.
            OSError: the disk is full, or fails.
        """
        from dvc_data.hashfile.transfer import transfer

        repo = self.repository.repo
        if repo.scm.is_tracked(str(path)):
            place = path.relative_to(self.repository.project.root)
            raise LedgerError(f"git tracks {place}, which DVC stores: run `git rm -r --cached {place}`, then the command again")
        repo.scm_context.ignore(str(path))
        staging, _, obj = self._build(path)
        members = [info.value for _, _, info in obj] if obj.hash_info.isdir else []
        self.lacks([*members, obj.hash_info.value], beat)  # DVC would trust an existing object of that name, whatever its bytes
        with last_error() as errors:
            failed = transfer(staging, self.odb, {obj.hash_info}, shallow=False).failed
        if failed:
            cause = next((error for error in errors if isinstance(error, OSError)), None)
            raise cause or LedgerError(
                f"{len(failed)} objects of {path.name} could not be added to DVC's cache: check its disk and run it again"
            )
        repo.state.save_link(str(path), repo.fs)  # so that `dvc checkout` of a commit without this stage removes it

    def place(self, parts: Mapping[Path, str], progress: ProgressCallback = silent) -> bool:
        """Put objects into place, replacing existing files and folders. False if one has disappeared in the meantime.

        `progress` reports the number of files in place, if there is much to copy.

        Raises:
            ArtifactError: a list of files names a path outside; nothing is written.
        """
        from dvc_data.hashfile import load
        from dvc_data.hashfile.checkout import CheckoutError, LinkError, checkout
        from dvc_objects.errors import ObjectFormatError

        files = [self.path(oid) for oid in self.names(parts.values()) if not oid.endswith(".dir")]
        repo = self.repository.repo
        ignore: Any = repo.dvcignore
        try:
            many = sum(file.stat().st_size for file in files) >= LONG_BYTES
            placed = Part(Sum(progress if many else silent, len(files)))
            for path, oid in parts.items():
                remove(path)
                checkout(str(path), repo.fs, load(self.odb, hash_info(oid)), self.odb, True, placed, state=repo.state, ignore=ignore)
        except (CheckoutError, LinkError, ObjectFormatError, OSError):
            return False
        return True

    def _build(self, path: Path, *, dry_run: bool = False) -> tuple[Any, Any, Any]:
        """DVC's staging area, metadata and hash of a file or folder."""
        from dvc_data.hashfile.build import build

        repo = self.repository.repo
        ignore: Any = repo.dvcignore
        return build(self.odb, str(path), repo.fs, "md5", ignore=ignore, dry_run=dry_run)

    def _hash_large(self, path: Path, beat: Beat) -> None:
        """Hash what DVC's database does not know of a path, if it is much, because DVC reports no progress."""
        repo = self.repository.repo
        looks = {file: repo.fs.info(str(file)) for file in files_of(path)}
        if sum(look["size"] for look in looks.values()) < LONG_BYTES:
            return
        hashes = repo.state.get_many(list(map(str, looks)), repo.fs, {str(file): look for file, look in looks.items()})
        unknown = [Path(file) for file, _, known in hashes if known is None]
        size = sum(looks[file]["size"] for file in unknown)
        if size < LONG_BYTES:
            return
        progress: Callable[[int], None] = Sum(beat, size).add
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = dict(zip(unknown, pool.map(lambda file: md5_of(file, progress), unknown), strict=True))
        with suppress(FileNotFoundError):  # replaced at this moment: its hash is not remembered
            self.remember({file: md5 for file, md5 in found.items() if md5}, looks)


def md5_of(path: Path, progress: Callable[[int], None] = lambda count: None) -> str | None:
    """MD5 of a file's current bytes, reporting the size of each piece read; None if there is no file."""
    found = hashlib.md5(usedforsecurity=False)
    try:
        for piece in pieces(path):
            found.update(piece)
            progress(len(piece))
    except FileNotFoundError:
        return None
    return found.hexdigest()


def md5_of_bytes(data: bytes) -> str:
    """The name of the object with these bytes."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def hash_info(oid: str) -> Any:
    """An object's name as a DVC HashInfo."""
    from dvc_data.hashfile.hash_info import HashInfo

    return HashInfo("md5", oid)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files_of(place: Path) -> Iterator[Path]:
    """The files of a folder, or a file itself; none if the path does not exist."""
    if place.is_dir():
        yield from (path for path in place.rglob("*") if path.is_file())
    elif place.is_file():
        yield place
