"""The DVC remote of a project: objects, run cache entries, and files that Pedigree names itself."""

import errno
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pedigree.data.artifacts.artifacts import Record, Run, parse_record, parse_run
from pedigree.data.store.durable import replace
from pedigree.data.store.hashing import Hashed, silent
from pedigree.data.store.untrusted import LOCK_BYTES, RECORD_BYTES, RUN_BYTES, LockEntry, parse_json
from pedigree.pipelines.ledger import transfers
from pedigree.pipelines.ledger.cache import OBJECT, Cache, hash_info
from pedigree.pipelines.ledger.lock_files import RUN_ENTRY, Entry, LockFiles
from pedigree.pipelines.ledger.repository import dvc_errors
from pedigree.pipelines.ledger.transfers import ProgressCallback, RemoteError, Sum

if TYPE_CHECKING:
    from dvc.data_cloud import Remote as DvcRemote

LARGEST_FILE = 4 << 30
"""Maximum size in bytes of a file that `get` fetches by default."""


class Remote:
    """The default remote, and the cache in front of it. Safe to share between threads and processes.

    Methods raise RemoteError if the remote cannot be used, or not everything arrived.
    """

    def __init__(self, cache: Cache, locks: LockFiles) -> None:
        self.cache, self.locks, self.repository = cache, locks, cache.repository
        self._refusals: dict[str, str | None] = {}
        self._small: dict[str, bytes] = {}
        """Cache of small objects that were read before."""

    # --- whether it can be used -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The default remote; None if none is configured."""
        return self.repository.repo.config["core"].get("remote")

    def refusal(self) -> str | None:
        """Why the remote cannot be used, with the remedy; None if it is reachable or not configured. Checked once."""
        name = self.name
        if name is None:
            return None
        with self.repository.mutex:
            if name not in self._refusals:
                self._refusals[name] = self._probe(name)
            return self._refusals[name]

    def require(self, verb: str) -> "DvcRemote":
        """The usable remote."""
        if self.name is None:
            raise RemoteError(f"there is no remote to {verb}: add one with `dvc remote add -d NAME URL`")
        if refusal := self.refusal():
            raise RemoteError(refusal)
        return self.repository.repo.cloud.get_remote(command=verb)

    def _probe(self, name: str) -> str | None:
        """Check the remote's folder and, for bucket stores, the bucket, because a missing bucket looks like an empty folder."""
        try:
            remote = self.repository.repo.cloud.get_remote(name)
            try:
                remote.fs.info(remote.path)
            except FileNotFoundError:
                if remote.fs.protocol not in ("local", "file"):
                    with suppress(PermissionError):  # the credentials may cover only a folder of the bucket
                        remote.fs.info(remote.path.split("/")[0])
        except Exception as error:  # each kind of storage has its own exceptions
            return self._refused(error)
        return None

    def _refused(self, error: BaseException) -> str:
        """One line with the storage error and its remedy."""
        name = self.name or "?"
        url = self.repository.repo.config["remote"].get(name, {}).get("url", "?")
        refused = f"the remote {name!r} ({url}) cannot be used: {transfers.one_line(error)}"
        return f"{transfers.without_passwords(refused)}. {transfers.remedy(error)}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of the remote's storage to one type."""
        from dvc.exceptions import DvcException

        try:
            yield
        except (DvcException, transfers.LedgerError):
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # of this machine's disk
                raise
            raise RemoteError(self._refused(error)) from error
        except Exception as error:  # each kind of storage has its own exceptions
            raise RemoteError(self._refused(error)) from error

    # --- single objects, from the cache or the remote -------------------------------------------------------------------

    @dvc_errors()
    def objects(self) -> transfers.RemoteObjects:
        return transfers.RemoteObjects(self.name or "?", self._odb("verify"))

    @dvc_errors()
    def provide(self, oids: Collection[str]) -> bool:
        """Whether the cache has these objects and those that they list, intact; what is missing or damaged is fetched."""
        if not self.cache.lacks(self.cache.names(oids)):
            return True
        with suppress(RemoteError):
            return self.fetch(oids) and not self.cache.lacks(self.cache.names(oids))
        return False

    @dvc_errors()
    def open(self, oid: str, limit: int | None = None) -> BinaryIO | None:
        """The verified bytes of an object of the cache or the remote; None if unavailable.

        Objects fetched from the remote are stored in the cache, in read-only mode in a temporary file of at most `limit` bytes.
        RemoteError: the object is damaged or too large.
        """
        path = self.cache.path(oid)
        if self.cache.lacks([oid]):
            if self.name is None:
                return None
            self.require("fetch")
            with self._errors():
                if not self.objects().exists(oid):
                    return None
                if self.repository.looking:
                    return self.objects().fetch(oid, limit)
            self._bring([oid])
        return path.open("rb")

    def read(self, oid: str, limit: int) -> bytes | None:
        """The bytes of a small object, read once."""
        if oid not in self._small:
            stream = self.open(oid, limit)
            if stream is None:
                return None
            with stream:
                self._small[oid] = stream.read(limit + 1)
        return self._small[oid]

    def record(self, entry: LockEntry | None, name: str = "record.json") -> Record | None:
        """The record among an entry's outputs, called `name` in messages; None if unavailable. ArtifactError: it is damaged."""
        oid = entry and entry.objects.get("record.json")
        data = self.read(oid, RECORD_BYTES) if oid else None
        return None if data is None else parse_record(data, name)

    def run(self, entry: LockEntry | None, name: str = "run.json") -> Run | None:
        """The run among an entry's outputs, as `record` does."""
        oid = entry and entry.objects.get("run.json")
        data = self.read(oid, RUN_BYTES) if oid else None
        return None if data is None else parse_run(parse_json(data, name, RUN_BYTES), name)

    # --- the outputs of a stage -----------------------------------------------------------------------------------------

    def holds(self, oids: Collection[str]) -> bool:
        """Whether the remote has these objects; a folder's list is uploaded after its files."""
        self.require("ask")
        with self._errors():
            return set(oids) <= set(self._odb("status").oids_exist(list(oids)))

    @dvc_errors()
    def fetch(self, oids: Collection[str], progress: ProgressCallback = silent, size: int = 0) -> bool:
        """Fetch objects and those that they list into the cache, verifying each; False if some are missing or damaged. ArtifactError: a
        list names a path outside.

        `progress` reports the bytes of `size` that have arrived.
        """
        if self.name is None:
            return False
        self.require("fetch")
        lists = [oid for oid in oids if oid.endswith(".dir")]
        self._bring(lists)
        if self.cache.lacks(lists):
            return False
        self._bring(self.cache.names(oids), progress, size)
        return self.cache.holds(oids)

    @dvc_errors()
    def send(self, oids: Collection[str], owner: str, progress: ProgressCallback = silent, size: int = 0) -> int:
        """Send objects of a stage and those that they list to the remote; return how many were new there."""
        remote = self.require("push")

        def lost(count: int, why: str) -> str:
            again = "run the command again, objects that arrived are not sent twice"
            return f"{count} objects of {owner} did not reach the remote {remote.name!r}{why}: {again}"

        return self._transfer(self.cache.odb, self._odb("push"), self.cache.names(oids), lost, Sum(progress, size))

    def _bring(self, oids: Iterable[str], progress: ProgressCallback = silent, size: int = 0) -> None:
        """Fetch objects from the remote into the cache; objects whose bytes do not match their name are not kept."""

        def lost(count: int, why: str) -> str:
            return f"could not fetch {count} objects from the remote {self.name!r}{why}: run the command again"

        self._transfer(self._odb("fetch"), self.cache.odb, oids, lost, Sum(progress, size), verify=True)

    def _transfer(
        self, source: Any, target: Any, oids: Iterable[str], lost: Callable[[int, str], str], callback: Sum, *, verify: bool = False
    ) -> int:
        """Copy objects between the cache and the remote; return how many were new there. `lost` describes those that did not arrive, from
        their number and the cause.
        """
        wanted = set(map(hash_info, oids))
        with self._errors(), transfers.last_error() as errors:
            result = self.repository.repo.cloud.transfer(source, target, wanted, cache_odb=self.cache.odb, verify=verify, callback=callback)
        if result.failed:
            raise RemoteError(lost(len(result.failed), f" ({transfers.one_line(errors[-1])})" if errors else ""))
        return len(result.transferred)

    def _odb(self, command: str) -> Any:
        return self.repository.repo.cloud.get_remote_odb(None, command)

    # --- the run cache --------------------------------------------------------------------------------------------------

    def fetch_past(self, entry: Entry | None = None) -> bool:
        """Fetch the remote's run cache entries, those with the inputs of an entry or all. False if nothing new arrived."""
        if self.name is None:
            return False
        remote, here = self.require("fetch"), self.locks.runs.parent
        folder = self.locks.past_folder(entry).relative_to(here).parts if entry else ("runs",)
        with self._errors():
            sizes = _sizes(remote.fs, remote.fs.join(remote.path, *folder))
            names = {"/".join([*folder, name]) for name, size in sizes.items() if size <= LOCK_BYTES}
            new = sorted(name for name in names if RUN_ENTRY.fullmatch(name) and not (here / name).exists())
            for path, target in ((remote.fs.join(remote.path, *name.split("/")), here / name) for name in new):
                target.parent.mkdir(parents=True, exist_ok=True)
                half = target.parent.parent / f".{target.name}.{uuid.uuid4().hex}"
                remote.fs.get_file(path, str(half))
                replace(half, target)
        return bool(new)

    def send_past(self) -> int:
        """Send entries that the remote's run cache lacks; return how many."""
        remote, here = self.require("push"), self.locks.runs.parent
        with self._errors():
            there = {remote.fs.relpath(path, remote.path) for path in remote.fs.find(remote.fs.join(remote.path, "runs"))}
            new = sorted(path for path in self.locks.past_files() if path.relative_to(here).as_posix() not in there)
            for path in new:
                remote.fs.put_file(str(path), remote.fs.join(remote.path, *path.relative_to(here).parts))
        return len(new)

    # --- files of Pedigree ----------------------------------------------------------------------------------------------

    @dvc_errors()
    def put(self, source: Path, name: str, seen: Hashed | None = None) -> bool:
        """Store a file under a name in the remote, atomically, if it is still the one that was `seen`; False if it exists already."""
        remote = self.require("push")
        target = remote.fs.join(remote.path, *name.split("/"))
        with self._errors():
            if remote.fs.exists(target):
                return False
            half = f"{target}.{uuid.uuid4().hex}"
            remote.fs.makedirs(remote.fs.parent(target), exist_ok=True)
            remote.fs.put_file(str(source), half)
            if seen is not None and not seen.is_of(source):
                remote.fs.rm_file(half)
                raise RemoteError(f"{source} changed while it was sent: run the command again")
            remote.fs.move(half, target)
        return True

    @dvc_errors()
    def get(self, name: str, target: Path, most: int = LARGEST_FILE) -> bool:
        """Fetch a file stored by `put`; False without a remote, or if the remote has no such file."""
        if self.name is None:
            return False
        remote = self.require("fetch")
        source = remote.fs.join(remote.path, *name.split("/"))
        with self._errors():
            if not remote.fs.exists(source):
                return False
            if int(remote.fs.size(source) or 0) > most:
                raise RemoteError(f"{name} of the remote {remote.name!r} exceeds {most} bytes and is not fetched")
            remote.fs.get_file(source, str(target))
        return True

    # --- garbage --------------------------------------------------------------------------------------------------------

    def files(self) -> tuple[dict[str, int], dict[str, int]]:
        """(objects by md5, run cache entries by path) of the remote, each with its size in bytes."""
        remote = self.require("gc")
        with self._errors():
            objects, entries = (_sizes(remote.fs, path) for path in (self._odb("gc").path, remote.fs.join(remote.path, "runs")))
        named = {name.replace("/", ""): size for name, size in objects.items()}
        known = {name: size for name, size in entries.items() if RUN_ENTRY.fullmatch(f"runs/{name}")}
        return {oid: size for oid, size in named.items() if OBJECT.fullmatch(oid)}, known

    def delete(self, objects: Collection[str], entries: Collection[str]) -> None:
        """Delete from the remote: run cache entries before objects, lists of folders before files. Another attempt deletes the rest."""
        from dvc_data.hashfile.db import get_index

        remote, odb = self.require("gc"), self._odb("gc")
        lists = sorted(oid for oid in objects if oid.endswith(".dir"))
        with self._errors():
            get_index(odb).clear()  # DVC's cached view of the remote
            for paths in (
                [remote.fs.join(remote.path, "runs", *name.split("/")) for name in sorted(entries)],
                [odb.oid_to_path(oid) for oid in lists],
                [odb.oid_to_path(oid) for oid in sorted(set(objects) - set(lists))],
            ):
                if paths:
                    remote.fs.remove(paths)


def _sizes(fs: Any, folder: str) -> dict[str, int]:
    found = fs.fs.find(folder, detail=True)
    if isinstance(found, Mapping):
        sizes = {path: int(info.get("size") or 0) for path, info in found.items()}
    else:  # DVC's local file system provides no details
        sizes = {path: int(fs.size(path) or 0) for path in found}
    return {"/".join(fs.relparts(path, folder)): size for path, size in sizes.items()}
