"""The one door to DVC: is a stage up to date, why not, restore it, commit it. `dvc.lock` is the only truth about what is done.

DVC's repository lock is held while its files are read, while an output that was hashed before goes into the cache, and while
`dvc.lock` is written; never while a job runs. Its per-path locks are not taken (their holder may be a `dvc repro` that waits for
us): the stage's lease does that work.
"""

import errno
import hashlib
import logging
import os
import shutil
import sqlite3
import subprocess
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml

from configs.compile import LOADER, pipeline_file
from configs.graph import Node
from configs.project import Project
from data.artifacts import Artifact, ArtifactError, open_artifact
from data.faults import fault_point

if TYPE_CHECKING:
    from dvc.output import Output
    from dvc.repo import Repo
    from dvc.stage import PipelineStage

Snapshot = dict[str, Any]
"""Dependency path or `params` → hash or values, as DVC would record them."""


class InputsMoved(Exception):
    """Dependencies or parameters are no longer what they were when the job started."""

    def __init__(self, moved: list[str]) -> None:
        self.moved = moved
        super().__init__(", ".join(moved))


class LedgerError(Exception):
    """DVC refuses: a damaged `dvc.lock`, a malformed `dvc.yaml` somewhere, an output that git tracks."""


@contextmanager
def _dvc_errors() -> Iterator[None]:
    from dvc.exceptions import DvcException

    try:
        yield
    except DvcException as error:
        raise LedgerError(f"DVC says: {error}") from error
    except sqlite3.OperationalError as error:  # of its database of hashes
        if "full" in str(error):
            raise OSError(errno.ENOSPC, "DVC cannot write down what it knows, the disk is full") from error
        raise LedgerError(f"DVC's database of hashes (core.site_cache_dir) fails: {error}") from error


class Ledger:
    """DVC's view of a project. Safe to share between threads and processes."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._mutex = threading.RLock()  # DVC's own lock polls every half second, also between threads
        self._local = threading.local()
        self._pulled = False

    @_dvc_errors()
    def reasons(self, node: Node) -> list[str]:
        """Why the stage must run, one short sentence each; empty: it is up to date."""
        stage = self._stage(node)
        if stage is None:
            return ["not compiled"]
        if not any(out.hash_info for out in stage.outs):
            return ["never run"]
        found = ["its command changed"] if stage.cmd_changed else []
        for dep in stage.deps:
            if dep in stage.params:
                found += self._parameter_changes(stage, dep)
            else:
                found += [f"input {self._shown(dep.fs_path)} {_SAID[said]}" for said in dep.status().values()]
        for out in stage.outs:
            found += [f"output {Path(out.fs_path).name} {_SAID[said]}" for said in out.status().values()]
        return found

    @_dvc_errors()
    def is_cached(self, node: Node) -> bool:
        """Whether this machine's cache knows an output for the stage as it stands (unproven: `restore` proves it)."""
        from dvc.stage.loader import StageLoader

        stage = self._stage(node)
        if stage is None or not all(dep.exists for dep in stage.deps):
            return False
        entry = to_lock_entry(stage)
        stage.save_deps()
        with self._locked() as repo:
            candidates = list(_run_cache_entries(repo, stage))
        if _same_inputs(entry, to_lock_entry(stage)):
            candidates.append(entry)
        for candidate in candidates:
            StageLoader.fill_from_lock(stage, candidate)
            if stage.outs_cached():
                return True
        return False

    @_dvc_errors()
    def restore(self, node: Node, key: str) -> bool:
        """Brings the stage's artifact back from `dvc.lock`, the run cache or the remote, and proves it.

        Every restored file is hashed again. A damaged cache object is deleted and counts as a miss, as does an artifact that
        was made under another key.
        """
        stage = self._stage(node)
        if stage is None:
            return False
        entry = to_lock_entry(stage)
        stage.save_deps()
        with self._locked() as repo:
            candidates = list(_run_cache_entries(repo, stage))
            if not candidates and self._pull_run_cache(repo):
                candidates = list(_run_cache_entries(repo, stage))
            if _same_inputs(entry, to_lock_entry(stage)):
                candidates.insert(0, entry)
        for candidate in candidates:
            if not self._fetch(stage, candidate):
                continue
            checked_out = self._check_out(stage)
            fault_point("restore checked out")
            if checked_out and self._is_proven(stage, node, key):
                self._record(stage)
                return True
            for out in stage.outs:
                _remove(Path(out.fs_path))
        return False

    def adopt(self, node: Node, key: str) -> bool:
        """Commits the artifact that lies in place, when it is complete, undamaged and of this key."""
        folder = self.project.artifact(node.address)
        try:
            artifact = open_artifact(folder, verify=True)
        except ArtifactError:
            return False
        if artifact.record.key != key or not is_complete(artifact):
            return False
        self.commit(node)
        return True

    @_dvc_errors()
    def snapshot(self, node: Node) -> Snapshot:
        """Dependencies and parameters as they are now. DVC itself looks only after the run."""
        stage = self._stage(node)
        if stage is None:
            raise InputsMoved([f"{node.address} is not compiled any more"])
        return self._snapshot(stage)

    def moved(self, node: Node, before: Snapshot) -> list[str]:
        """What differs from an earlier snapshot."""
        try:
            now = self.snapshot(node)
        except InputsMoved as error:
            return error.moved
        except Exception as error:  # DVC names a vanished dependency by several kinds of exception
            return [str(error)]
        return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))

    @_dvc_errors()
    def commit(self, node: Node, before: Snapshot | None = None) -> None:
        """Moves the stage's outputs into the cache and records it in `dvc.lock` and in the run cache.

        Raises:
            InputsMoved: dependencies or parameters differ from the snapshot; nothing is recorded.
        """
        stage = self._stage(node)
        if stage is None:
            raise InputsMoved([f"{node.address} is not compiled any more"])
        stage.save_deps()
        if before is not None:
            now = self._snapshot(stage, saved=True)
            moved = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            if moved:
                raise InputsMoved(moved)
        stage.save_outs()
        stage.md5 = stage.compute_md5()
        with self._locked():  # DVC's try at a reflink truncates an equal object that another stage is just adding
            for out in stage.outs:
                for path in _damaged(out):  # DVC would believe an object of that name, whatever its bytes
                    path.unlink(missing_ok=True)
                out.commit()
            fault_point("commit cached")
            self._record(stage)

    def recorded(self) -> list["Recorded"]:
        """All parts of artifacts that the `dvc.lock` files of the project name, sorted by address and part.

        Raises:
            LedgerError: one of the files is damaged.
        """
        found = []
        for path in (self.project.root / "dvc.lock", *sorted(self.project.artifacts.glob("*/dvc.lock"))):
            found += self._recorded(path, path.read_text() if path.exists() else "")
        return sorted(found, key=lambda entry: (entry.address, entry.part))

    def recorded_at(self, revision: str) -> list["Recorded"]:
        """All that the `dvc.lock` files of a git revision name, sorted by address and part.

        Raises:
            LedgerError: git knows no such revision, or one of the files is damaged.
        """
        root = self.project.root
        listing = self._git("ls-tree", "-r", "--name-only", "-z", revision, "--", ".")
        if listing is None:
            raise LedgerError(f"{revision!r} is no commit, branch or tag of the git repository here: `git log` lists commits")
        found = []
        for name in listing.decode().split("\0"):
            if Path(name).name == "dvc.lock":
                found += self._recorded(root / name, (self._git("show", f"{revision}:./{name}") or b"").decode())
        return sorted(found, key=lambda entry: (entry.address, entry.part))

    def open_object(self, md5: str) -> BinaryIO:
        """A file's bytes from this machine's cache or else from the remote, whole and proven.

        Raises:
            LedgerError: neither has it, or both have other bytes under its name.
        """
        place = self.object(md5)
        if place is not None:
            return place.open("rb")
        remote = self.remote_name()
        holds = f"neither this machine's cache nor the remote {remote!r} holds" if remote else "this machine's cache does not hold"
        raise LedgerError(f"{holds} a sound object {md5}: add the DVC remote that has it, or run the stage at that commit again")

    def _git(self, *arguments: str) -> bytes | None:
        """Output of git in the project's folder; None when it fails."""
        command = ["git", "-C", str(self.project.root), *arguments]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        return done.stdout if done.returncode == 0 else None

    def _recorded(self, path: Path, text: str) -> list["Recorded"]:
        """What the text of a `dvc.lock` names; `path` is where it lies."""
        try:
            stages = ((yaml.load(text, Loader=LOADER) or {}).get("stages") or {}).values()
            places = [(Path(os.path.normpath(path.parent / out["path"])), out["md5"]) for stage in stages for out in stage.get("outs", [])]
        except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
            remedy = "take it back from git, or delete it: `pedigree run` writes it again from what the cache knows"
            raise LedgerError(f"{path.relative_to(self.project.root)} is damaged ({error}): {remedy}") from error
        found = []
        for place, md5 in places:
            if place.is_relative_to(self.project.artifacts):  # a stage of somebody's own may write elsewhere
                address, _, part = place.relative_to(self.project.artifacts).as_posix().rpartition("/")
                found.append(Recorded(address, part, place, md5))
        return found

    def cache_path(self, md5: str) -> Path:
        """Where this machine's cache keeps an object, if it does."""
        return Path(self._repo.cache.local.oid_to_path(md5))

    def remote_name(self) -> str | None:
        """The default remote; None where none is configured."""
        return self._repo.config["core"].get("remote")

    @_dvc_errors()
    def remote(self, name: str) -> "Remote":
        """The objects of a remote."""
        return Remote(name, self._repo.cloud.get_remote_odb(name, "verify"))

    # --- what other clones may want (`shelf.py`) ------------------------------------------------------------------------

    @_dvc_errors()
    def push(self, nodes: Iterable[Node]) -> int:
        """Sends the recorded artifacts of these stages and the run cache to the remote; returns how many objects were new there."""
        sent = 0
        repo = self._remote_repo("push")
        for stage in filter(None, map(self._stage, nodes)):
            for objects in stage.get_used_objs().values():
                result = repo.cloud.push(objects)
                if result.failed:
                    raise LedgerError(f"{len(result.failed)} objects of {stage.addressing} did not reach the remote: type it again")
                sent += len(result.transferred)
        repo.stage_cache.push(None)
        return sent

    @_dvc_errors()
    def put(self, source: Path, name: str) -> bool:
        """Stores a file under a name in the remote, whole or not at all; False when it is there already."""
        remote = self._remote_repo("push").cloud.get_remote(command="push")
        target = remote.fs.join(remote.path, *name.split("/"))
        if remote.fs.exists(target):
            return False
        half = f"{target}.{uuid.uuid4().hex}"
        remote.fs.makedirs(remote.fs.parent(target), exist_ok=True)
        remote.fs.put_file(str(source), half)
        remote.fs.move(half, target)
        return True

    @_dvc_errors()
    def get(self, name: str, target: Path) -> bool:
        """Fetches what `put` has stored; False without a remote, or when that has no such file."""
        if self.remote_name() is None:
            return False
        remote = self._repo.cloud.get_remote(command="fetch")
        source = remote.fs.join(remote.path, *name.split("/"))
        if not remote.fs.exists(source):
            return False
        remote.fs.get_file(source, str(target))
        return True

    def _remote_repo(self, command: str) -> "Repo":
        if self.remote_name() is None:
            raise LedgerError(f"there is no remote to {command} to: name one with `dvc remote add -d NAME URL`")
        return self._repo

    def entries(self, address: str, *, history: bool) -> Iterator[Mapping[str, Any]]:
        """What `dvc.lock`, and with `history` the run cache, know of a stage: the likeliest first."""
        recipe, _, name = address.partition("/")
        lock = (self.project.root / pipeline_file(recipe)).with_suffix(".lock")
        recorded = (yaml.load(lock.read_text(), Loader=LOADER) or {}).get("stages", {}) if lock.exists() else {}
        if name in recorded:
            yield recorded[name]
        if not history:
            return
        seen: set[Path] = set()
        for _ in range(2):
            folder = Path(self._repo.stage_cache.cache_dir)
            files = {path for path in folder.rglob("*") if path.is_file()} if folder.is_dir() else set()
            for path in sorted(files - seen):
                entry = yaml.load(path.read_text(), Loader=LOADER)
                if isinstance(entry, dict) and entry.get("cmd") == f"pedigree stage {address}":
                    yield entry
            seen |= files
            with self._locked() as repo:
                if not self._pull_run_cache(repo):
                    return

    @_dvc_errors()
    def object(self, oid: str) -> Path | None:
        """A sound object of the cache, fetched when it is missing or damaged; None when nobody has it. A `.dir` brings its files."""
        from dvc.exceptions import DvcException
        from dvc_data.hashfile.hash_info import HashInfo

        path, wanted = Path(self._repo.cache.local.oid_to_path(oid)), oid.removesuffix(".dir")
        if _md5(path) == wanted:
            return path
        path.unlink(missing_ok=True)
        if self.remote_name() is not None:
            try:
                self._repo.cloud.pull([HashInfo("md5", oid)])
            except (DvcException, OSError):  # a remote that cannot be reached has nothing
                return None
        return path if _md5(path) == wanted else None

    # --- DVC's objects -------------------------------------------------------------------------------------------------

    @cached_property
    def _link_types(self) -> list[str]:
        """As root a read-only hard link is no protection: one write in place would damage the cache too."""
        return ["reflink", "copy"] if os.geteuid() == 0 else ["reflink", "hardlink", "copy"]

    @property
    def _repo(self) -> "Repo":
        """One per thread: DVC's objects are not made for sharing."""
        repo = getattr(self._local, "repo", None)
        if repo is None:
            for name in ("dvc", "dvc_data", "dvc_objects"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # no progress bars and notices of its own
            from dvc.repo import Repo

            repo = Repo(str(self.project.root), config={"cache": {"type": self._link_types}}, _wait_for_lock=True)
            self._local.repo, self._local.files = repo, {}
        return repo

    @contextmanager
    def _locked(self) -> "Iterator[Repo]":
        with self._mutex:
            repo = self._repo
            if repo.lock.is_locked:
                yield repo
            else:
                with repo.lock:
                    yield repo

    def _stage(self, node: Node) -> "PipelineStage | None":
        """DVC's stage with what `dvc.lock` says of it; files are parsed again only when they have changed."""
        path = self.project.root / pipeline_file(node.recipe)
        with self._locked() as repo:
            from dvc.dvcfile import load_file

            if not path.exists():
                return None
            state = (_state(path), _state(path.with_suffix(".lock")))
            known = self._local.files.get(path)
            if known is None or known[0] != state:
                known = self._local.files[path] = (state, load_file(repo, str(path)))
            stages: Any = known[1].stages
            return stages[node.name] if node.name in stages else None

    def _snapshot(self, stage: "PipelineStage", saved: bool = False) -> Snapshot:
        found: Snapshot = {}
        for dep in stage.deps:
            hash_info = dep.hash_info if saved else dep.get_hash()
            found["params" if dep in stage.params else self._shown(dep.fs_path)] = hash_info.value if hash_info else None
        return found

    def _parameter_changes(self, stage: "PipelineStage", dep: Any) -> list[str]:
        """Names of the identity fields whose value is not the recorded one, with both values."""
        recorded = dict(_leaves(dep.hash_info.value or {}))
        now = dict(_leaves({name: value for name, value in self._params(Path(dep.fs_path)).items() if name == stage.name}))
        changes = []
        for name in sorted(recorded.keys() | now.keys()):
            if recorded.get(name) != now.get(name):
                field = name.removeprefix(f"{stage.name}.").removeprefix("config.")
                changes.append(f"{field} {_said(recorded, name)} -> {_said(now, name)}")
        return [f"parameters changed: {', '.join(changes)}"] if changes else []

    def _params(self, path: Path) -> dict[str, Any]:
        state = _state(path)
        known = self._local.files.get(path)
        if known is None or known[0] != state:
            known = self._local.files[path] = (state, yaml.load(path.read_text(), Loader=LOADER) if state else {})
        return known[1]

    def _fetch(self, stage: "PipelineStage", entry: Mapping[str, Any]) -> bool:
        """Takes over the outputs of an entry, when the cache holds them or the remote gives them."""
        from dvc.exceptions import DvcException
        from dvc.stage.loader import StageLoader

        repo = self._repo
        StageLoader.fill_from_lock(stage, entry)
        if not stage.outs_cached() and repo.config["core"].get("remote"):
            try:
                for objects in stage.get_used_objs().values():
                    repo.cloud.pull(objects)
            except (DvcException, OSError):  # a remote that cannot be reached is a miss: the stage runs
                return False
        return stage.outs_cached()

    def _check_out(self, stage: "PipelineStage") -> bool:
        """Puts the outputs from the cache into place; whatever lies there goes."""
        from dvc.exceptions import DvcException

        try:
            for out in stage.outs:
                _remove(Path(out.fs_path))
                out.checkout(force=True)
        except (DvcException, OSError):  # e.g. an object that has gone meanwhile
            return False
        return True

    def _is_proven(self, stage: "PipelineStage", node: Node, key: str) -> bool:
        """Whether what was checked out is undamaged and of this key; damaged cache objects are deleted."""
        payload = [out for out in stage.outs if Path(out.fs_path).name == "payload"]
        damaged = [path for out in stage.outs if out not in payload for path in _damaged(out)]
        try:
            proven = not damaged and open_artifact(self.project.artifact(node.address), verify=True).record.key == key
        except ArtifactError:
            proven = False
            damaged += [path for out in payload for path in _damaged(out)]
        for path in damaged:
            path.unlink(missing_ok=True)
        return proven

    def _pull_run_cache(self, repo: "Repo") -> bool:
        """Fetches the remote's run cache, once; False where there is none or it cannot be reached."""
        from dvc.exceptions import DvcException

        if self._pulled or not repo.config["core"].get("remote"):
            return False
        self._pulled = True
        try:
            repo.stage_cache.pull(None)
        except (DvcException, OSError):
            return False
        return True

    def _record(self, stage: "PipelineStage") -> None:
        with self._locked() as repo:
            _write_run_cache(repo, stage)
            self._write_lock(stage)

    def _write_lock(self, stage: "PipelineStage") -> None:
        """Writes the stage into `dvc.lock` by rename; DVC's own dump truncates the file first, and a kill would leave it so."""
        from dvc.utils.serialize import dump_yaml, load_yaml

        path = Path(stage.dvcfile.path).with_suffix(".lock")
        entry = to_lock_entry(stage)
        lock: dict[str, Any] = load_yaml(str(path)) if path.exists() else {"schema": "2.0"}
        stages = lock.setdefault("stages", {})
        if _plain(stages.get(stage.name)) == _plain(entry):
            return
        stages[stage.name] = entry
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        dump_yaml(str(temporary), lock)
        fault_point("lock written")
        os.replace(temporary, path)
        fault_point("lock replaced")

    def _shown(self, path: str) -> str:
        """A dependency's path as people know it: the address of a stage, or a project file."""
        relative = Path(os.path.relpath(path, self.project.root))
        if relative.parts[0] == "artifacts" and relative.name == "payload":
            return "/".join(relative.parts[1:3])
        return relative.as_posix()


@dataclass(frozen=True)
class Recorded:
    """One output that a `dvc.lock` names."""

    address: str
    part: str
    """`payload`, `evidence`, `record.json` …"""
    path: Path
    md5: str
    """With `.dir` for a folder."""


@dataclass(frozen=True)
class Remote:
    """The objects of a DVC remote, by md5."""

    name: str
    odb: Any

    def exists(self, md5: str) -> bool:
        """Whether it holds an object; raises what its library raises where it cannot be asked (fsspec's `exists` says no then)."""
        try:
            self.odb.fs.info(self.odb.oid_to_path(md5))
        except FileNotFoundError:
            return False
        return True

    def open(self, md5: str) -> BinaryIO:
        return self.odb.fs.open(self.odb.oid_to_path(md5), "rb")


_SAID = {
    "modified": "changed",
    "deleted": "is missing",
    "new": "is new",
    "not in cache": "is not in the cache",
}


def is_complete(artifact: Artifact) -> bool:
    """All five parts are there; only then DVC can commit it."""
    return all((artifact.path / part).exists() for part in ("payload", "evidence", "run.json", "lineage.json"))


def to_lock_entry(stage: "PipelineStage") -> Mapping[str, Any]:
    """The stage as `dvc.lock` records it: command, dependencies, parameters, outputs."""
    from dvc.stage.serialize import to_single_stage_lockfile

    return to_single_stage_lockfile(stage)


def _same_inputs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two entries were made from the same, and the first has recorded outputs."""
    inputs = all(_plain(one.get(part)) == _plain(other.get(part)) for part in ("cmd", "deps", "params"))
    return inputs and all("md5" in out for out in one.get("outs", [{}]))


def _run_cache_entries(repo: "Repo", stage: "PipelineStage") -> Iterator[Mapping[str, Any]]:
    """What DVC's run cache has for the stage's command, dependencies and parameters; the newest first.

    DVC's own lookup takes the newest alone, also when its objects are damaged, and works only inside the repository's folder.
    """
    from dvc.stage.cache import _get_stage_hash

    cache = repo.stage_cache
    key = _get_stage_hash(stage)
    folder = Path(cache._get_cache_dir(key))
    values = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True) if folder.is_dir() else []
    for value in values:
        entry: Any = cache._load_cache(key, value.name)
        if entry:
            yield entry


def _write_run_cache(repo: "Repo", stage: "PipelineStage") -> None:
    from dvc.stage.cache import _get_cache_hash, _get_stage_hash
    from dvc.utils.serialize import dump_yaml

    entry = to_lock_entry(stage)
    path = Path(repo.stage_cache._get_cache_path(_get_stage_hash(stage), _get_cache_hash(entry)))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
        dump_yaml(str(temporary), entry)
        os.replace(temporary, path)


def _said(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "(absent)"


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}.{name}" if place else str(name))
    else:
        yield place, value


def _plain(value: Any) -> Any:
    """Ordered and commented mappings as ordinary ones, to compare by content."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _damaged(out: "Output") -> list[Path]:
    """Cache objects behind an output whose bytes are not what their name says."""
    from dvc_data.hashfile.tree import Tree

    obj: Any = out.obj or out.get_obj()
    members: Any = obj if isinstance(obj, Tree) else ()
    oids = {str(hash_info.value) for _, _, hash_info in members}
    paths = {oid: Path(out.cache.oid_to_path(oid)) for oid in sorted({*oids, str(obj.oid)})}
    return [path for oid, path in paths.items() if _md5(path) != oid.removesuffix(".dir")]


def _md5(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except FileNotFoundError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
