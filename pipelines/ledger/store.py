"""The one door to DVC: its stages and lock files, the cache, the run cache and the remote of a project.

What is decided with them stands elsewhere (`ledger.py`: is a stage up to date; `verify.py`, `gc.py`, `by_id.py`).

DVC's repository lock is held while an output that was hashed before goes into the cache and while `dvc.lock` is written, and shared
while its files are read, which writes nothing; never while a job runs. Its per-path locks are not taken (their holder may be a
`dvc repro` that waits for us): the stage's lease does that work.
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

from configs.base.project import Project
from configs.base.texts import shown
from data.host.faults import fault_point
from data.store.durable import replace
from data.store.hashing import LONG_BYTES, Beat, silent
from data.store.untrusted import LIST_BYTES, LOCK_BYTES, ArtifactError, parse_listing, parse_lock, read_plain
from pipelines.ledger.lock_files import RUN_ENTRY, read_lock, read_run_entry, shared, state_of
from pipelines.ledger.objects import damaged, hash_info, hash_unknown, md5_of, oid_of, plain, remove, set_hash, size_of
from pipelines.ledger.transfers import (
    Aside,
    Bytes,
    Files,
    LedgerError,
    RemoteError,
    RemoteObjects,
    Tell,
    last_error,
    remedy,
    said,
    without_passwords,
)

if TYPE_CHECKING:
    from dvc.data_cloud import Remote as DvcRemote
    from dvc.output import Output as Output
    from dvc.repo import Repo
    from dvc.stage import PipelineStage as PipelineStage

OBJECT = re.compile(r"[0-9a-f]{32}(?:\.dir)?")
"""The name of an object."""
LARGEST_FILE = 4 << 30
"""Bytes of a file that `get` fetches."""


@contextmanager
def dvc_errors() -> Iterator[None]:
    """DVC's many exceptions as one."""
    from dvc.exceptions import DvcException
    from scmrepo.exceptions import SCMError

    try:
        yield
    except (DvcException, SCMError) as error:
        text = str(error)
        look = "`git diff -- dvc.yaml .dvc artifacts` shows what has changed of its files, `dvc status -v` says more"
        remedy = "type `git init` there, then the same command again" if text.endswith("is not a git repository") else look
        raise LedgerError(f"DVC says: {text}: {remedy}") from error
    except RecursionError as error:
        raise LedgerError("a file that DVC reads is nested too deep: DVC did not write it; take it back from git") from error
    except sqlite3.OperationalError as error:  # of its database of hashes
        if "full" in str(error):
            raise OSError(errno.ENOSPC, "DVC cannot write down what it knows, the disk is full") from error
        raise LedgerError(f"DVC's database of hashes (core.site_cache_dir) fails: {error}") from error


class Store:
    """DVC in one project. Safe to share between threads and processes."""

    def __init__(self, project: Project, *, looking: bool = False) -> None:
        """`looking`: nothing in the project's folder is written, which may be read-only."""
        self.project, self.looking = project, looking
        self._mutex = threading.RLock()  # DVC's own lock polls every half second, also between threads
        self._local = threading.local()
        self._asked: dict[str, str | None] = {}
        self._small: dict[str, bytes] = {}
        """Small objects that were read before."""
        self._aside = Aside()

    # --- stages and lock files ------------------------------------------------------------------------------------------

    @property
    def repo(self) -> "Repo":
        """One per thread: DVC's objects are not made for sharing."""
        repo = getattr(self._local, "repo", None)
        if repo is None:
            for name in ("dvc", "dvc_data", "dvc_objects"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # no progress bars and notices of its own
            repo = self._opened()
            self._local.repo, self._local.files = repo, {}
        return repo

    def close(self) -> None:
        """Closes what this thread has opened, at its end or that of its work; who asks again opens it again.

        DVC's objects lie in circles, so without this its databases stay open until all garbage is collected; no other thread can close
        them.
        """
        repo = self._local.__dict__.pop("repo", None)
        if repo is not None:
            repo.close()

    @dvc_errors()
    def _opened(self) -> "Repo":
        from dvc.repo import Repo

        root = str(self.project.root)
        config: dict[str, Any] = {"cache": {"type": self._link_types}}
        if not self.looking:
            return Repo(root, config=config, _wait_for_lock=True)

        class Untouched(Repo):
            def _ignore(self) -> None:
                """Writes no .gitignore."""

        kind: Any = Untouched
        if not (self._private / "btime").exists():  # nobody has worked here: DVC would make its folder for that, and knows no hashes yet
            self._elsewhere = tempfile.TemporaryDirectory(prefix="pedigree-dvc-")
            kind = type("Elsewhere", (Untouched,), {"tmp_dir": self._elsewhere.name})
            config["core"] = {"site_cache_dir": self._elsewhere.name}
        repo = kind(root, config=config)
        repo.scm  # noqa: B018 - says at once that there is no git, as every other command does
        return repo

    @property
    def _private(self) -> Path:
        """Where DVC keeps its locks."""
        return self.project.root / ".dvc" / "tmp"

    @contextmanager
    def locked(self) -> "Iterator[Repo]":
        """For who writes."""
        with self._mutex:
            repo = self.repo
            if repo.lock.is_locked:
                yield repo
            else:
                with repo.lock:
                    yield repo

    @contextmanager
    def reading(self) -> "Iterator[Repo]":
        """For who reads: nobody writes meanwhile. Nothing is touched."""
        with self._mutex:
            repo = self.repo
            with nullcontext() if repo.lock.is_locked else shared(self._private / "lock"):
                yield repo

    @dvc_errors()
    def stage(self, pipeline: Path, name: str, compiled: dict[str, Any]) -> "PipelineStage":
        """A stage as the recipe compiles to it, with what `dvc.lock` says of it.

        The `dvc.yaml` that lies in the project is not asked: another version of the recipe may have been compiled since.

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
        """What `dvc.lock` says of a stage."""
        with self.reading():
            return self._lock(pipeline).get(name)

    def _refuse_forged(self, lock: Path) -> None:
        """A `dvc.lock` may come with a branch of somebody else's. DVC follows aliases without end, and takes a hash that is a path for an
        object of its cache: it finds it damaged, and deletes what lies there."""
        try:
            parse_lock(read_lock(lock), lock.relative_to(self.project.root).as_posix())
        except ArtifactError as error:
            raise LedgerError(f"{error}: take it back from git, or delete it") from error

    @dvc_errors()
    def _lock(self, pipeline: Path) -> dict[str, Any]:
        """The stages of the `dvc.lock` beside a `dvc.yaml`, parsed again only when it has changed."""
        from dvc.dvcfile import ProjectFile

        self.repo  # noqa: B018 - makes this thread's memory
        state = state_of(pipeline.with_suffix(".lock"))
        known = self._local.files.get(pipeline)
        if known is None or known[0] != state:
            self._refuse_forged(pipeline.with_suffix(".lock"))
            lock = ProjectFile(self.repo, str(pipeline))._lockfile.load() if state else {}
            known = self._local.files[pipeline] = (state, lock.get("stages") or {})
        return known[1]

    def write_lock(self, stage: "PipelineStage") -> None:
        """Writes the stage into `dvc.lock` by rename; DVC's own dump truncates the file first, and a kill would leave it so."""
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
        """Where this machine's cache keeps an object, if it does.

        Raises:
            LedgerError: that is no name of an object; it may have been made to lie somewhere else.
        """
        if not OBJECT.fullmatch(oid):
            raise LedgerError(f"{shown(oid[:80])!r} is no name of an object of DVC's: whoever wrote it is not to be trusted")
        return Path(self.repo.cache.local.oid_to_path(oid))

    @dvc_errors()
    def object(self, oid: str) -> Path | None:
        """A sound object of the cache, fetched when it is missing or damaged; None when nobody has it. A `.dir` brings its files."""
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
        """The bytes of a sound object of the cache or the remote, whole; None when nobody has it.

        What comes out of the remote is kept in the cache, but not by who only looks: there it is kept as long as the store.

        Args:
            oid: its name.
            limit: most bytes; of a larger one no more is fetched.

        Raises:
            RemoteError: the remote cannot be asked, or what it has is damaged or too large.
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
        """The same of a small object, asked for once."""
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
            ArtifactError: the object is none that DVC would write: it names a path outside, or something else it may not.
        """
        return parse_listing(read_plain(self.cache_path(oid), LIST_BYTES), f"object {oid}")

    def refuse_lists(self, stage: "PipelineStage") -> None:
        """Looks at the lists of files that DVC would follow to put the stage's outputs into place; a forged one does not stay.

        Raises:
            ArtifactError: one names a path outside, or something else it may not.
        """
        for oid in filter(lambda oid: oid.endswith(".dir"), map(oid_of, stage.outs)):
            if self.cache_path(oid).exists():
                try:
                    self.listing(oid)
                except ArtifactError:
                    self.cache_path(oid).unlink(missing_ok=True)
                    raise

    def _is_sound(self, oid: str) -> bool:
        """Whether the cache has an object whose bytes are what its name says; another one under the name goes, unless we only look."""
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
        """Tells DVC's database the MD5 of files that were hashed before, so that it does not read them once more.

        Args:
            md5s: of each file.
            looks: what each looked like from outside before it was read; by default what it looks like now.
        """
        from dvc_objects.fs.local import LocalFileSystem

        known = [(str(path), hash_info(md5), looks[path] if looks else None) for path, md5 in md5s.items()]
        self.repo.state.save_many(known, LocalFileSystem())

    def hash_ahead(self, parts: Iterable["Output"], beat: Beat) -> None:
        """Hashes what DVC would have to hash, which tells nobody of it: after a move or on another machine, that is all there is.

        Args:
            parts: dependencies and outputs that DVC is to be asked about.
            beat: told how far it is, where there is much to hash.
        """
        with suppress(FileNotFoundError):  # replaced at this moment: DVC finds out
            self.remember(*hash_unknown(self.repo.state, parts, beat))

    def commit_outputs(self, stage: "PipelineStage", beat: Beat = silent) -> None:
        """Puts outputs that `save_outs` has hashed into the cache; the caller holds the lock.

        One after the other: DVC's try at a reflink truncates an equal object that another stage is just adding. What lies in place is
        not touched: DVC would remove a file before it puts a link to the cache there, and who is killed or reads in between finds none.
        """
        for out in stage.outs:
            for path in damaged(out, beat):  # DVC would believe an object of that name, whatever its bytes
                path.unlink(missing_ok=True)
            out.commit(relink=False)
            self.repo.state.save_link(out.fs_path, out.fs)  # `dvc checkout` of a commit that has no such stage removes it

    def check_out(self, stage: "PipelineStage", tell: Tell = silent) -> bool:
        """Puts the outputs from the cache into place; whatever lies there goes. False when an object has gone meanwhile.

        `tell` is told of the files that are in place, where there is much to copy.

        Raises:
            ArtifactError: a list of files names a path outside; nothing is put anywhere.
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
        """What DVC's run cache has for the stage's command, dependencies and parameters; the newest first.

        DVC's own lookup takes the newest alone, also when its objects are damaged, and works only inside the repository's folder.
        """
        cache = self.repo.stage_cache
        key = _run_key(stage)
        folder = Path(cache._get_cache_dir(key))
        values = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True) if folder.is_dir() else []
        return [entry for entry in map(read_run_entry, values) if entry]

    def write_run_cache(self, stage: "PipelineStage") -> None:
        from dvc.stage.cache import _get_cache_hash
        from dvc.utils.serialize import dump_yaml

        entry = to_lock_entry(stage)
        path = Path(self.repo.stage_cache._get_cache_path(_run_key(stage), _get_cache_hash(entry)))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.parent.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
            dump_yaml(str(temporary), entry)
            replace(temporary, path)

    def run_cache_files(self) -> set[Path]:
        """All entries of the run cache here."""
        folder = Path(self.repo.stage_cache.cache_dir)
        return {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")} if folder.is_dir() else set()

    def fetch_run_cache(self, stage: "PipelineStage | None" = None) -> bool:
        """Brings the remote's run cache: what it has for one stage, or all. False when nothing new came.

        Raises:
            RemoteError: the remote cannot be used.
        """
        if self.remote_name() is None:
            return False
        remote = self._usable("fetch")
        folder = ("runs", *((_run_key(stage)[:2], _run_key(stage)) if stage else ()))
        here = Path(self.repo.stage_cache.cache_dir).parent
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
        """Sends what the remote's run cache lacks; returns how many entries that were.

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
        """The default remote; None where none is configured."""
        return self.repo.config["core"].get("remote")

    @dvc_errors()
    def remote(self, name: str) -> RemoteObjects:
        """The objects of a remote."""
        return RemoteObjects(name, self.repo.cloud.get_remote_odb(name, "verify"))

    def remote_files(self) -> tuple[dict[str, int], dict[str, int]]:
        """(objects by md5, entries of the run cache by their path) of the remote, each with its bytes.

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
        """Deletes from the remote; entries of the run cache go before objects, lists of folders before their files.

        Raises:
            RemoteError: the remote cannot be used; what is left can be deleted by another try.
        """
        from dvc_data.hashfile.db import get_index

        remote = self._usable("gc")
        odb = self.repo.cloud.get_remote_odb(None, "gc")
        lists = sorted(oid for oid in objects if oid.endswith(".dir"))
        with self._remote_errors():
            get_index(odb).clear()  # what DVC believes to be there
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
        else:  # DVC's local file system has no details to give
            sizes = {path: int(fs.size(path) or 0) for path in found}
        return {"/".join(fs.relparts(path, folder)): size for path, size in sizes.items()}

    def refusal(self) -> str | None:
        """Why the default remote cannot be used, with the remedy; None when it answers, or none is configured. Asked once."""
        name = self.remote_name()
        if name is None:
            return None
        with self._mutex:
            if name not in self._asked:
                self._asked[name] = self._ask(name)
            return self._asked[name]

    def require_remote(self, verb: str) -> None:
        """Says before long work that there is none, or why it cannot be used.

        Raises:
            RemoteError: so it is.
        """
        self._usable(verb)

    def holds(self, stage: "PipelineStage") -> bool:
        """Whether the remote has all that the stage's recorded outputs are made of; a folder's list arrives there after its files.

        Raises:
            RemoteError: the remote cannot be used.
        """
        self._usable("ask")
        wanted = [oid_of(out) for out in stage.outs]
        with self._remote_errors():
            odb = self.repo.cloud.get_remote_odb(None, "status")
            return set(wanted) <= set(odb.oids_exist(wanted))

    @dvc_errors()
    def fetch(self, stage: "PipelineStage", tell: Tell = silent) -> bool:
        """Brings what the stage's outputs need into the cache, every object hashed; False when the remote lacks some or has others.

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
    def send(self, stage: "PipelineStage", tell: Tell = silent) -> int:
        """Sends what the stage's recorded outputs need to the remote; returns how many objects were new there.

        Raises:
            RemoteError: the remote cannot be used, or not all arrived.
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
                "type the command again, what has arrived is not sent twice"
            )
        return len(result.transferred)

    @dvc_errors()
    def put(self, source: Path, name: str) -> bool:
        """Stores a file under a name in the remote, whole or not at all; False when it is there already."""
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
        """Fetches what `put` has stored; False without a remote, or when that has no such file."""
        if self.remote_name() is None:
            return False
        remote = self._usable("fetch")
        source = remote.fs.join(remote.path, *name.split("/"))
        with self._remote_errors():
            if not remote.fs.exists(source):
                return False
            if int(remote.fs.size(source) or 0) > LARGEST_FILE:
                raise RemoteError(f"{name} of the remote {remote.name!r} has more than {LARGEST_FILE} bytes: it is not fetched")
            remote.fs.get_file(source, str(target))
        return True

    def _bring(self, objects: Collection[Any], tell: Tell = silent, size: int = 0) -> None:
        """Objects from the remote into the cache; one whose bytes are not what its name says does not stay there."""
        cache, odb = self.repo.cache.local, self.repo.cloud.get_remote_odb(None, "fetch")
        with self._remote_errors(), last_error() as errors:
            result = self.repo.cloud.transfer(odb, cache, objects, cache_odb=cache, verify=True, callback=Bytes(tell, size))
        if result.failed:
            why = f" ({errors[-1]})" if errors else ""
            left = f"{len(result.failed)} objects did not come from the remote {self.remote_name()!r}{why}"
            raise RemoteError(f"{left}: type the command again")

    def _usable(self, verb: str) -> "DvcRemote":
        if self.remote_name() is None:
            raise RemoteError(f"there is no remote to {verb}: name one with `dvc remote add -d NAME URL`")
        if refusal := self.refusal():
            raise RemoteError(refusal)
        return self.repo.cloud.get_remote(command=verb)

    def _ask(self, name: str) -> str | None:
        """Looks at the remote's folder; on stores of buckets also at the bucket, whose absence looks like an empty folder."""
        try:
            remote = self.repo.cloud.get_remote(name)
            try:
                remote.fs.info(remote.path)
            except FileNotFoundError:
                if remote.fs.protocol not in ("local", "file"):
                    with suppress(PermissionError):  # keys for a folder of the bucket alone
                        remote.fs.info(remote.path.split("/")[0])
        except Exception as error:  # each kind of storage has its own exceptions
            return self._refused(name, error)
        return None

    def _refused(self, name: str, error: BaseException) -> str:
        """One line on what the remote's storage says, and what to do about it."""
        url = self.repo.config["remote"].get(name, {}).get("url", "?")
        refused = f"the remote {name!r} ({url}) cannot be used: {said(error)}"
        return f"{without_passwords(refused)}. {remedy(error)}"

    @contextmanager
    def _remote_errors(self) -> Iterator[None]:
        """What the remote's storage raises, as one kind of error."""
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
        """As root a read-only hard link is no protection: one write in place would damage the cache too."""
        return ["reflink", "copy"] if os.geteuid() == 0 else ["reflink", "hardlink", "copy"]


def to_lock_entry(stage: "PipelineStage") -> Mapping[str, Any]:
    """The stage as `dvc.lock` records it: command, dependencies, parameters, outputs."""
    from dvc.stage.serialize import to_single_stage_lockfile

    return to_single_stage_lockfile(stage)


def set_params(stage: "PipelineStage", values: Mapping[str, Any]) -> None:
    """Gives a stage the values of its parameters, instead of what some `params.yaml` holds."""
    from dvc.dependency.param import ParamsDependency
    from dvc_data.hashfile.hash_info import HashInfo

    for dep in stage.params:
        assert isinstance(dep, ParamsDependency)
        dep.hash_info = HashInfo("params", dict(values))  # type: ignore[arg-type] - DVC's own use of the field


def set_deps(stage: "PipelineStage", entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives a stage the hashes of its dependencies (path → entry of `dvc.lock`), whatever lies there now."""
    from dvc_data.hashfile.meta import Meta

    for dep in stage.deps:
        if dep not in stage.params:
            entry = dict(entries[dep.def_path])
            set_hash(dep, entry["md5"])
            dep.meta = Meta.from_dict(entry)


def fill(stage: "PipelineStage", entry: Mapping[str, Any]) -> None:
    """Takes the hashes of an entry of `dvc.lock` or of the run cache over into a stage."""
    from dvc.stage.loader import StageLoader

    StageLoader.fill_from_lock(stage, entry)


def _run_key(stage: "PipelineStage") -> str:
    """Under what the run cache keeps the stage: a hash of command, dependencies, parameters and the paths of its outputs."""
    from dvc.stage.cache import _get_cache_hash

    return _get_cache_hash(to_lock_entry(stage), key=True)
