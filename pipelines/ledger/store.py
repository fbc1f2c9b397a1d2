"""The only interface to DVC: stages and lock files, cache, run cache and remote of a project.

Decisions based on them are made elsewhere (`ledger.py`: is a stage up to date; `verify.py`, `gc.py`, `by_id.py`).

DVC's repository lock is held while an already hashed output goes into the cache and while `dvc.lock` is written. It is shared while
DVC's files are read, which writes nothing, and never held while a job runs. DVC's per-path locks are not taken, because their holder
may be a `dvc repro` that waits for this process; the stage's lease takes their place.
"""

import errno
import logging
import os
import re
import sqlite3
import tempfile
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import shown
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import replace
from pedigree.data.store.hashing import LONG_BYTES, Beat, silent
from pedigree.data.store.untrusted import LIST_BYTES, LOCK_BYTES, ArtifactError, parse_listing, parse_lock, read_plain
from pedigree.pipelines.ledger.dvc_private import run_cache_names, untouched_repo, waiting_repo
from pedigree.pipelines.ledger.lock_files import RUN_ENTRY, read_lock, read_run_entry, shared, state_of
from pedigree.pipelines.ledger.objects import damaged, hash_info, hash_unknown, md5_of, oid_of, plain, remove, set_hash, size_of
from pedigree.pipelines.ledger.transfers import (
    Bytes,
    Files,
    LedgerError,
    ProgressCallback,
    RemoteError,
    RemoteObjects,
    TemporaryObjects,
    last_error,
    one_line,
    remedy,
    without_passwords,
)

if TYPE_CHECKING:
    from dvc.data_cloud import Remote as DvcRemote
    from dvc.output import Output as Output
    from dvc.repo import Repo
    from dvc.stage import PipelineStage as PipelineStage

OBJECT = re.compile(r"[0-9a-f]{32}(?:\.dir)?")
"""Pattern of an object's name."""
LARGEST_FILE = 4 << 30
"""Maximum size in bytes of a file that `get` fetches."""


@contextmanager
def dvc_errors() -> Iterator[None]:
    """Convert DVC's various exceptions to one type."""
    from dvc.exceptions import DvcException
    from scmrepo.exceptions import SCMError

    try:
        yield
    except (DvcException, SCMError) as error:
        text = str(error)
        look = "`git diff -- dvc.yaml .dvc artifacts` shows changes to its files, `dvc status -v` gives details"
        remedy = "run `git init` there, then the command again" if text.endswith("is not a git repository") else look
        raise LedgerError(f"DVC reports: {text}: {remedy}") from error
    except RecursionError as error:
        raise LedgerError("a file that DVC reads is nested too deeply, so DVC did not write it: restore it from git") from error
    except sqlite3.OperationalError as error:  # from its hash database
        if "full" in str(error):
            raise OSError(errno.ENOSPC, "DVC cannot update its hash database, the disk is full") from error
        raise LedgerError(f"DVC's hash database (core.site_cache_dir) failed: {error}") from error


class Store:
    """DVC in one project. Safe to share between threads and processes."""

    def __init__(self, project: Project, *, looking: bool = False) -> None:
        """`looking`: write nothing in the project's folder, which may be read-only."""
        self.project, self.looking = project, looking
        self._mutex = threading.RLock()  # DVC's own lock polls every half second, even between threads
        self._local = threading.local()
        self._asked: dict[str, str | None] = {}
        self._small: dict[str, bytes] = {}
        """Cache of small objects that were read before."""
        self._aside = TemporaryObjects()

    # --- stages and lock files ------------------------------------------------------------------------------------------

    @property
    def repo(self) -> "Repo":
        """A repo per thread: DVC's objects are not thread-safe."""
        repo = getattr(self._local, "repo", None)
        if repo is None:
            for name in ("dvc", "dvc_data", "dvc_objects"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # no progress bars or notices from DVC
            repo = self._opened()
            self._local.repo, self._local.files = repo, {}
        return repo

    def close(self) -> None:
        """Close what this thread has opened, at the end of the thread or of its work; it is reopened on demand.

        DVC's objects form reference cycles, so without this its databases stay open until garbage collection, and no other thread can close
        them.
        """
        repo = self._local.__dict__.pop("repo", None)
        if repo is not None:
            repo.close()

    @dvc_errors()
    def _opened(self) -> "Repo":
        config: dict[str, Any] = {"cache": {"type": self._link_types}}
        if not self.looking:
            return waiting_repo(self.project.root, config)
        private = None
        if not (self._private / "btime").exists():  # DVC has not been used here: it would create its folder, and knows no hashes yet
            self._elsewhere = tempfile.TemporaryDirectory(prefix="pedigree-dvc-")
            private = self._elsewhere.name
            config["core"] = {"site_cache_dir": private}
        repo = untouched_repo(self.project.root, config, private)
        repo.scm  # noqa: B018 - fails early if there is no git, as every other command does
        return repo

    @property
    def _private(self) -> Path:
        """Folder of DVC's locks."""
        return self.project.root / ".dvc" / "tmp"

    @contextmanager
    def locked(self) -> "Iterator[Repo]":
        """Hold DVC's lock for writing."""
        with self._mutex:
            repo = self.repo
            if repo.lock.is_locked:
                yield repo
            else:
                with repo.lock:
                    yield repo

    @contextmanager
    def reading(self) -> "Iterator[Repo]":
        """Share DVC's lock for reading, without touching anything."""
        with self._mutex:
            repo = self.repo
            with nullcontext() if repo.lock.is_locked else shared(self._private / "lock"):
                yield repo

    @dvc_errors()
    def stage(self, pipeline: Path, name: str, compiled: dict[str, Any]) -> "PipelineStage":
        """A stage as compiled from the recipe, with its recorded state from `dvc.lock`.

        The project's `dvc.yaml` is not read: another version of the recipe may have been compiled since.

        Args:
            pipeline: path of the `dvc.yaml` that it belongs to.
            name: of the stage.
            compiled: its entry there.
        """
        with self.reading() as repo:
            from dvc.dvcfile import ProjectFile
            from dvc.stage.loader import StageLoader

            return StageLoader.load_stage(ProjectFile(repo, str(pipeline)), name, compiled, self._lock(pipeline).get(name))

    def lock_entry(self, pipeline: Path, name: str) -> Mapping[str, Any] | None:
        """The entry of a stage in `dvc.lock`."""
        with self.reading():
            return self._lock(pipeline).get(name)

    def _refuse_forged(self, lock: Path) -> None:
        """Reject a forged `dvc.lock`, e.g. from another branch. DVC follows aliases without limit, and takes a hash that is a path for
        an object of its cache, finds it damaged, and deletes the file.
        """
        try:
            parse_lock(read_lock(lock), lock.relative_to(self.project.root).as_posix())
        except ArtifactError as error:
            raise LedgerError(f"{error}: restore it from git, or delete it") from error

    @dvc_errors()
    def _lock(self, pipeline: Path) -> dict[str, Any]:
        """The stages of the `dvc.lock` next to a `dvc.yaml`, parsed again only if it has changed."""
        from dvc.dvcfile import ProjectFile

        self.repo  # noqa: B018 - initializes this thread's state
        state = state_of(pipeline.with_suffix(".lock"))
        known = self._local.files.get(pipeline)
        if known is None or known[0] != state:
            self._refuse_forged(pipeline.with_suffix(".lock"))
            lock = ProjectFile(self.repo, str(pipeline)).lockfile_contents if state else {}
            known = self._local.files[pipeline] = (state, lock.get("stages") or {})
        return known[1]

    def write_lock(self, stage: "PipelineStage") -> None:
        """Write the stage into `dvc.lock` by rename; DVC's own dump truncates the file first, so a kill would leave it truncated."""
        from dvc.utils.serialize import dump_yaml, load_yaml

        path = Path(stage.dvcfile.path).with_suffix(".lock")
        entry = to_lock_entry(stage)
        lock: dict[str, Any] = load_yaml(str(path)) if path.exists() else {"schema": "2.0"}
        stages = lock.setdefault("stages", {})
        if plain(stages.get(stage.name)) == plain(entry):
            return
        stages[stage.name] = entry
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        dump_yaml(str(temporary), lock)
        fault_point("lock written")
        replace(temporary, path)
        fault_point("lock replaced")

    # --- the cache ------------------------------------------------------------------------------------------------------

    def cache_path(self, oid: str) -> Path:
        """Path of an object in this machine's cache, present or not.

        Raises:
            LedgerError: not a valid object name, which could point outside the cache.
        """
        if not OBJECT.fullmatch(oid):
            raise LedgerError(f"{shown(oid[:80])!r} is not a DVC object name: do not trust its source")
        return Path(self.repo.cache.local.oid_to_path(oid))

    @dvc_errors()
    def object(self, oid: str) -> Path | None:
        """An intact object of the cache, fetched if missing or damaged; None if unavailable. A `.dir` object brings its files."""
        path = self.cache_path(oid)
        if self._is_sound(oid):
            return path
        if self.remote_name() is not None and self.refusal() is None:
            with suppress(RemoteError):
                self._bring([hash_info(oid)])
                if oid.endswith(".dir") and self._is_sound(oid):
                    self._bring([hash_info(md5) for md5 in self.listing(oid).values()])
        return path if self._is_sound(oid) else None

    @dvc_errors()
    def open(self, oid: str, limit: int | None = None) -> BinaryIO | None:
        """The verified bytes of an object of the cache or the remote; None if unavailable.

        Objects fetched from the remote are stored in the cache, or, in read-only mode, in a temporary folder for the lifetime of the store.

        Args:
            oid: its name.
            limit: maximum number of bytes to fetch.

        Raises:
            RemoteError: the remote cannot be reached, or its object is damaged or too large.
        """
        path = self.cache_path(oid)
        if not self._is_sound(oid):
            remote = self.remote_name()
            if remote is None:
                return None
            if refusal := self.refusal():
                raise RemoteError(refusal)
            with self._remote_errors():
                if not self.remote(remote).exists(oid):
                    return None
                if self.looking:
                    path = self._aside.fetch(self.remote(remote), oid, limit)
            if not self.looking:
                self._bring([hash_info(oid)])
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

    def listing(self, oid: str) -> dict[str, str]:
        """Path → md5 of the files of a folder whose `.dir` object is in the cache.

        Raises:
            ArtifactError: DVC did not write the object, e.g. it names a path outside.
        """
        return parse_listing(read_plain(self.cache_path(oid), LIST_BYTES), f"object {oid}")

    def refuse_lists(self, stage: "PipelineStage") -> None:
        """Check the lists of files that DVC would follow to restore the stage's outputs; delete forged ones.

        Raises:
            ArtifactError: a list is forged, e.g. it names a path outside.
        """
        for oid in filter(lambda oid: oid.endswith(".dir"), map(oid_of, stage.outs)):
            if self.cache_path(oid).exists():
                try:
                    self.listing(oid)
                except ArtifactError:
                    self.cache_path(oid).unlink(missing_ok=True)
                    raise

    def _is_sound(self, oid: str) -> bool:
        """Whether the cache has an object whose bytes match its name; a mismatch is deleted, except in read-only mode."""
        path = self.cache_path(oid)
        if md5_of(path) == oid.removesuffix(".dir"):
            return True
        if not self.looking:
            path.unlink(missing_ok=True)
        return False

    def cached_objects(self) -> dict[str, Path]:
        """All objects of the cache, by md5."""
        base = self.cache_path("0" * 32).parent.parent
        found = {f"{path.parent.name}{path.name}": path for path in base.glob("??/*")} if base.is_dir() else {}
        return {oid: path for oid, path in found.items() if OBJECT.fullmatch(oid)}

    def remember(self, md5s: Mapping[Path, str], looks: Mapping[Path, dict[str, Any]] | None = None) -> None:
        """Add known MD5s of files to DVC's database, so that it does not read the files again.

        Args:
            md5s: of each file.
            looks: metadata of each file before it was read; by default the current metadata.
        """
        from dvc_objects.fs.local import LocalFileSystem

        known = [(str(path), hash_info(md5), looks[path] if looks else None) for path, md5 in md5s.items()]
        self.repo.state.save_many(known, LocalFileSystem())

    def hash_ahead(self, parts: Iterable["Output"], beat: Beat) -> None:
        """Hash what DVC would have to hash, because DVC reports no progress. After a move or on another machine, this is most of the work.

        Args:
            parts: dependencies and outputs that DVC will be asked about.
            beat: reports progress if there is much to hash.
        """
        with suppress(FileNotFoundError):  # replaced at this moment; DVC will notice
            self.remember(*hash_unknown(self.repo.state, parts, beat))

    def commit_outputs(self, stage: "PipelineStage", beat: Beat = silent) -> None:
        """Put outputs hashed by `save_outs` into the cache; the caller holds the lock.

        Outputs are added one by one: DVC's attempt at a reflink truncates an equal object that another stage is just adding. Files in place
        are not touched: DVC would remove a file before linking it to the cache, and a kill or a reader in between would find none.
        """
        for out in stage.outs:
            for path in damaged(out, beat):  # DVC would trust an existing object of that name, whatever its bytes
                path.unlink(missing_ok=True)
            out.commit(relink=False)
            self.repo.state.save_link(out.fs_path, out.fs)  # so that `dvc checkout` of a commit without this stage removes it

    def check_out(self, stage: "PipelineStage", tell: ProgressCallback = silent) -> bool:
        """Put the outputs from the cache into place, replacing existing files. False if an object has disappeared in the meantime.

        `tell` reports the number of files in place, if there is much to copy.

        Raises:
            ArtifactError: a list of files names a path outside; nothing is written.
        """
        from dvc.exceptions import DvcException

        self.refuse_lists(stage)
        placed = Files(tell if size_of(stage) >= LONG_BYTES else silent, sum(out.get_files_number() for out in stage.outs))
        try:
            for out in stage.outs:
                remove(Path(out.fs_path))
                out.checkout(force=True, progress_callback=placed)
        except (DvcException, OSError):
            return False
        return True

    # --- the run cache --------------------------------------------------------------------------------------------------

    def run_cache_entries(self, stage: "PipelineStage") -> list[Mapping[str, Any]]:
        """DVC's run cache entries for the stage's command, dependencies and parameters; the newest first.

        DVC's own lookup considers only the newest, even if its objects are damaged, and works only inside the repository's folder.
        """
        folder = self._run_cache_path(stage).parent
        values = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True) if folder.is_dir() else []
        return [entry for entry in map(read_run_entry, values) if entry]

    def write_run_cache(self, stage: "PipelineStage") -> None:
        from dvc.utils.serialize import dump_yaml

        entry, path = to_lock_entry(stage), self._run_cache_path(stage)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
            dump_yaml(str(temporary), entry)
            replace(temporary, path)

    def _run_cache_path(self, stage: "PipelineStage") -> Path:
        """Where the run cache stores the stage's current state."""
        key, name = run_cache_names(to_lock_entry(stage))
        return Path(self.repo.stage_cache.cache_dir, key[:2], key, name)

    def run_cache_files(self) -> set[Path]:
        """All entries of the local run cache."""
        folder = Path(self.repo.stage_cache.cache_dir)
        return {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")} if folder.is_dir() else set()

    def fetch_run_cache(self, stage: "PipelineStage | None" = None) -> bool:
        """Fetch the remote's run cache entries, for one stage or all. False if nothing new arrived.

        Raises:
            RemoteError: the remote cannot be used.
        """
        if self.remote_name() is None:
            return False
        remote = self._usable("fetch")
        here = Path(self.repo.stage_cache.cache_dir).parent
        folder = self._run_cache_path(stage).parent.relative_to(here).parts if stage else ("runs",)
        with self._remote_errors():
            sizes = self._remote_sizes(remote.fs, remote.fs.join(remote.path, *folder))
            names = {"/".join([*folder, name]) for name, size in sizes.items() if size <= LOCK_BYTES}
            new = sorted(name for name in names if RUN_ENTRY.fullmatch(name) and not (here / name).exists())
            for path, target in ((remote.fs.join(remote.path, *name.split("/")), here / name) for name in new):
                target.parent.mkdir(parents=True, exist_ok=True)
                half = target.parent.parent / f".{target.name}.{uuid.uuid4().hex}"
                remote.fs.get_file(path, str(half))
                replace(half, target)
        return bool(new)

    def send_run_cache(self) -> int:
        """Send entries that the remote's run cache lacks; return how many.

        Raises:
            RemoteError: the remote cannot be used.
        """
        remote = self._usable("push")
        here = Path(self.repo.stage_cache.cache_dir).parent
        with self._remote_errors():
            there = {remote.fs.relpath(path, remote.path) for path in remote.fs.find(remote.fs.join(remote.path, "runs"))}
            new = sorted(path for path in self.run_cache_files() if path.relative_to(here).as_posix() not in there)
            for path in new:
                remote.fs.put_file(str(path), remote.fs.join(remote.path, *path.relative_to(here).parts))
        return len(new)

    # --- the remote -----------------------------------------------------------------------------------------------------

    def remote_name(self) -> str | None:
        """The default remote; None if none is configured."""
        return self.repo.config["core"].get("remote")

    @dvc_errors()
    def remote(self, name: str) -> RemoteObjects:
        """The objects of a remote."""
        return RemoteObjects(name, self.repo.cloud.get_remote_odb(name, "verify"))

    def remote_files(self) -> tuple[dict[str, int], dict[str, int]]:
        """(objects by md5, run cache entries by path) of the remote, each with its size in bytes.

        Raises:
            RemoteError: the remote cannot be used.
        """
        remote = self._usable("gc")
        odb = self.repo.cloud.get_remote_odb(None, "gc")
        with self._remote_errors():
            objects, entries = (self._remote_sizes(remote.fs, path) for path in (odb.path, remote.fs.join(remote.path, "runs")))
        named = {name.replace("/", ""): size for name, size in objects.items()}
        known = {name: size for name, size in entries.items() if RUN_ENTRY.fullmatch(f"runs/{name}")}
        return {oid: size for oid, size in named.items() if OBJECT.fullmatch(oid)}, known

    def delete_remote(self, objects: Collection[str], entries: Collection[str]) -> None:
        """Delete from the remote: run cache entries before objects, lists of folders before their files.

        Raises:
            RemoteError: the remote cannot be used; another attempt deletes the rest.
        """
        from dvc_data.hashfile.db import get_index

        remote = self._usable("gc")
        odb = self.repo.cloud.get_remote_odb(None, "gc")
        lists = sorted(oid for oid in objects if oid.endswith(".dir"))
        with self._remote_errors():
            get_index(odb).clear()  # DVC's cached view of the remote
            for paths in (
                [remote.fs.join(remote.path, "runs", *name.split("/")) for name in sorted(entries)],
                [odb.oid_to_path(oid) for oid in lists],
                [odb.oid_to_path(oid) for oid in sorted(set(objects) - set(lists))],
            ):
                if paths:
                    remote.fs.remove(paths)

    @staticmethod
    def _remote_sizes(fs: Any, folder: str) -> dict[str, int]:
        found = fs.fs.find(folder, detail=True)
        if isinstance(found, Mapping):
            sizes = {path: int(info.get("size") or 0) for path, info in found.items()}
        else:  # DVC's local file system provides no details
            sizes = {path: int(fs.size(path) or 0) for path in found}
        return {"/".join(fs.relparts(path, folder)): size for path, size in sizes.items()}

    def refusal(self) -> str | None:
        """Why the default remote cannot be used, with the remedy; None if it is reachable or not configured. Checked once."""
        name = self.remote_name()
        if name is None:
            return None
        with self._mutex:
            if name not in self._asked:
                self._asked[name] = self._ask(name)
            return self._asked[name]

    def require_remote(self, verb: str) -> None:
        """Fail before long work if there is no usable remote.

        Raises:
            RemoteError: with the reason.
        """
        self._usable(verb)

    def holds(self, stage: "PipelineStage") -> bool:
        """Whether the remote has everything for the stage's recorded outputs; a folder's list is uploaded after its files.

        Raises:
            RemoteError: the remote cannot be used.
        """
        self._usable("ask")
        wanted = [oid_of(out) for out in stage.outs]
        with self._remote_errors():
            odb = self.repo.cloud.get_remote_odb(None, "status")
            return set(wanted) <= set(odb.oids_exist(wanted))

    @dvc_errors()
    def fetch(self, stage: "PipelineStage", tell: ProgressCallback = silent) -> bool:
        """Fetch what the stage's outputs need into the cache, verifying every object; False if objects are missing or damaged.

        Raises:
            RemoteError: the remote cannot be used.
            ArtifactError: a list of files names a path outside.
        """
        if self.remote_name() is None:
            return False
        self._usable("fetch")
        lists = [oid_of(out) for out in stage.outs if oid_of(out).endswith(".dir")]
        self._bring([hash_info(oid) for oid in lists])
        if not all(map(self._is_sound, lists)):
            return False
        self.refuse_lists(stage)
        wanted = {info for objects in stage.get_used_objs().values() for info in objects}
        self._bring(wanted, tell, size_of(stage))
        return stage.outs_cached()

    @dvc_errors()
    def send(self, stage: "PipelineStage", tell: ProgressCallback = silent) -> int:
        """Send what the stage's recorded outputs need to the remote; return how many objects were new there.

        Raises:
            RemoteError: the remote cannot be used, or not everything arrived.
        """
        remote = self._usable("push")
        wanted = {info for objects in stage.get_used_objs().values() for info in objects}
        cache, odb = self.repo.cache.local, self.repo.cloud.get_remote_odb(None, "push")
        with self._remote_errors(), last_error() as errors:
            result = self.repo.cloud.transfer(cache, odb, wanted, cache_odb=cache, callback=Bytes(tell, size_of(stage)))
        if result.failed:
            why = f" ({errors[-1]})" if errors else ""
            raise RemoteError(
                f"{len(result.failed)} objects of {stage.addressing} did not reach the remote {remote.name!r}{why}: "
                "run the command again, objects that arrived are not sent twice"
            )
        return len(result.transferred)

    @dvc_errors()
    def put(self, source: Path, name: str) -> bool:
        """Store a file under a name in the remote, atomically; False if it exists already."""
        remote = self._usable("push")
        target = remote.fs.join(remote.path, *name.split("/"))
        with self._remote_errors():
            if remote.fs.exists(target):
                return False
            half = f"{target}.{uuid.uuid4().hex}"
            remote.fs.makedirs(remote.fs.parent(target), exist_ok=True)
            remote.fs.put_file(str(source), half)
            remote.fs.move(half, target)
        return True

    @dvc_errors()
    def get(self, name: str, target: Path) -> bool:
        """Fetch a file stored by `put`; False without a remote, or if the remote has no such file."""
        if self.remote_name() is None:
            return False
        remote = self._usable("fetch")
        source = remote.fs.join(remote.path, *name.split("/"))
        with self._remote_errors():
            if not remote.fs.exists(source):
                return False
            if int(remote.fs.size(source) or 0) > LARGEST_FILE:
                raise RemoteError(f"{name} of the remote {remote.name!r} exceeds {LARGEST_FILE} bytes and is not fetched")
            remote.fs.get_file(source, str(target))
        return True

    def _bring(self, objects: Collection[Any], tell: ProgressCallback = silent, size: int = 0) -> None:
        """Fetch objects from the remote into the cache; objects whose bytes do not match their name are not kept."""
        cache, odb = self.repo.cache.local, self.repo.cloud.get_remote_odb(None, "fetch")
        with self._remote_errors(), last_error() as errors:
            result = self.repo.cloud.transfer(odb, cache, objects, cache_odb=cache, verify=True, callback=Bytes(tell, size))
        if result.failed:
            why = f" ({errors[-1]})" if errors else ""
            failed = f"could not fetch {len(result.failed)} objects from the remote {self.remote_name()!r}{why}"
            raise RemoteError(f"{failed}: run the command again")

    def _usable(self, verb: str) -> "DvcRemote":
        if self.remote_name() is None:
            raise RemoteError(f"there is no remote to {verb}: add one with `dvc remote add -d NAME URL`")
        if refusal := self.refusal():
            raise RemoteError(refusal)
        return self.repo.cloud.get_remote(command=verb)

    def _ask(self, name: str) -> str | None:
        """Check the remote's folder and, for bucket stores, the bucket, because a missing bucket looks like an empty folder."""
        try:
            remote = self.repo.cloud.get_remote(name)
            try:
                remote.fs.info(remote.path)
            except FileNotFoundError:
                if remote.fs.protocol not in ("local", "file"):
                    with suppress(PermissionError):  # the credentials may cover only a folder of the bucket
                        remote.fs.info(remote.path.split("/")[0])
        except Exception as error:  # each kind of storage has its own exceptions
            return self._refused(name, error)
        return None

    def _refused(self, name: str, error: BaseException) -> str:
        """One line with the storage error and its remedy."""
        url = self.repo.config["remote"].get(name, {}).get("url", "?")
        refused = f"the remote {name!r} ({url}) cannot be used: {one_line(error)}"
        return f"{without_passwords(refused)}. {remedy(error)}"

    @contextmanager
    def _remote_errors(self) -> Iterator[None]:
        """Convert errors of the remote's storage to one type."""
        from dvc.exceptions import DvcException

        try:
            yield
        except (DvcException, LedgerError):
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # of this machine's disk
                raise
            raise RemoteError(self._refused(self.remote_name() or "?", error)) from error
        except Exception as error:  # each kind of storage has its own exceptions
            raise RemoteError(self._refused(self.remote_name() or "?", error)) from error

    @cached_property
    def _link_types(self) -> list[str]:
        """For root, a read-only hard link is no protection: one write in place would damage the cache too."""
        return ["reflink", "copy"] if os.geteuid() == 0 else ["reflink", "hardlink", "copy"]


def to_lock_entry(stage: "PipelineStage") -> Mapping[str, Any]:
    """The stage's entry for `dvc.lock`: command, dependencies, parameters, outputs."""
    from dvc.stage.serialize import to_single_stage_lockfile

    return to_single_stage_lockfile(stage)


def set_params(stage: "PipelineStage", values: Mapping[str, Any]) -> None:
    """Set the values of a stage's parameters, overriding any `params.yaml`."""
    from dvc.dependency.param import ParamsDependency
    from dvc_data.hashfile.hash_info import HashInfo

    for dep in stage.params:
        assert isinstance(dep, ParamsDependency)
        dep.hash_info = HashInfo("params", dict(values))  # type: ignore[arg-type] - DVC itself uses the field this way


def set_deps(stage: "PipelineStage", entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the hashes of a stage's dependencies (path → entry of `dvc.lock`), regardless of current files."""
    from dvc_data.hashfile.meta import Meta

    for dep in stage.deps:
        if dep not in stage.params:
            entry = dict(entries[dep.def_path])
            set_hash(dep, entry["md5"])
            dep.meta = Meta.from_dict(entry)


def fill(stage: "PipelineStage", entry: Mapping[str, Any]) -> None:
    """Load the hashes of an entry of `dvc.lock` or of the run cache into a stage."""
    from dvc.stage.loader import StageLoader

    StageLoader.fill_from_lock(stage, entry)
