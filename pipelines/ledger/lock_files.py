"""Results of stages as DVC records them: entries of `dvc.lock`, of the present or of a git revision, and of the run cache, of the past.

All may come from a branch or a remote, so they are untrusted.
"""

import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import pipeline_file
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import replace
from pedigree.data.store.untrusted import (
    LOCK_BYTES,
    ArtifactError,
    LockEntry,
    LockOut,
    inside,
    parse_entry,
    parse_lock,
    parse_yaml,
    read_plain,
)
from pedigree.pipelines.ledger.dvc_private import run_cache_names
from pedigree.pipelines.ledger.git import names_at, text_at
from pedigree.pipelines.ledger.repository import Repository
from pedigree.pipelines.ledger.transfers import LedgerError

Entry = Mapping[str, Any]
"""An entry as DVC stores it: `cmd`, `deps`, `params`, `outs`."""
RUN_ENTRY = re.compile(r"runs/[0-9a-f]{2}/[0-9a-f]{64}/[0-9a-f]{64}")
"""Path of a run cache entry, in the cache and in the remote."""


def read_lock(path: Path) -> str:
    """The text of a `dvc.lock`, a `dvc.yaml` or a `.dvc` file; empty if there is none.

    Raises:
        ArtifactError: it is not a regular file, or far too long.
    """
    return read_plain(path, LOCK_BYTES).decode(errors="replace") if os.path.lexists(path) else ""


def read_run_entry(path: Path) -> LockEntry | None:
    """A run cache entry that DVC would accept; None for anything else, such as a partial entry left by a kill."""
    try:
        return parse_entry(parse_yaml(read_plain(path, LOCK_BYTES).decode(), path.name), path.name)
    except (ArtifactError, UnicodeDecodeError):
        return None


@dataclass(frozen=True)
class Recorded:
    """An output recorded in a `dvc.lock`."""

    address: str
    part: str
    """`payload`, `evidence`, `record.json` …"""
    path: Path
    md5: str
    """With `.dir` for a folder."""


class LockFiles:
    """The `dvc.lock` files and the run cache of a project."""

    def __init__(self, repository: Repository) -> None:
        self.repository, self.project = repository, repository.project
        self._read: dict[Path, tuple[tuple[int, int, int] | None, Mapping[str, LockEntry]]] = {}

    def entry(self, address: str) -> LockEntry | None:
        """The entry of a stage in `dvc.lock`.

        Raises:
            LedgerError: the file is damaged or forged. DVC would follow aliases without limit, and take a hash that is a path for an object
                of its cache, find it damaged, and delete the file.
        """
        path, name = self._place(address)
        return self._entries(path).get(name)

    def entries(self) -> list[LockEntry]:
        """The entries of all `dvc.lock` files that can be read, those of stages that no recipe has any more included."""
        found: list[LockEntry] = []
        for path in lock_paths(self.project):
            with suppress(LedgerError):
                found += self._entries(path).values()
        return found

    def _entries(self, path: Path) -> Mapping[str, LockEntry]:
        with self.repository.reading():
            state = _state_of(path)
            if path not in self._read or self._read[path][0] != state:
                try:
                    found = parse_lock(read_lock(path), path.relative_to(self.project.root).as_posix())
                except ArtifactError as error:
                    raise LedgerError(f"{error}: {_remedy(path.relative_to(self.project.root))}") from error
                self._read[path] = (state, found)
            return self._read[path][1]

    def write(self, address: str, entry: Entry) -> None:
        """Write a stage's entry into the run cache, and into `dvc.lock` by rename; the caller holds the lock.

        DVC's own dump truncates the file first, so a kill would leave it truncated.
        """
        past = self._past(entry)
        if not past.exists():
            past.parent.mkdir(parents=True, exist_ok=True)
            replace(_dumped(past.parent.parent / f".{past.name}", entry), past)
        path, name = self._place(address)
        lock: dict[str, Any] = parse_yaml(read_lock(path), path.name) or {"schema": "2.0"}
        before = lock.get("stages") or {}
        if before.get(name) != entry:
            temporary = _dumped(path.with_name(f".{path.name}"), {**lock, "stages": before | {name: entry}})
            fault_point("lock written")
            replace(temporary, path)
            fault_point("lock replaced")

    def past(self, entry: Entry) -> list[LockEntry]:
        """Run cache entries with the command, dependencies, parameters and output paths of an entry; the newest first.

        DVC's own lookup considers only the newest, even if its objects are damaged, and works only inside the repository's folder.
        """
        folder = self.past_folder(entry)
        paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True) if folder.is_dir() else []
        return list(filter(None, map(read_run_entry, paths)))

    def past_folder(self, entry: Entry) -> Path:
        """Where the run cache stores entries with the inputs of this one."""
        return self._past(entry).parent

    def past_files(self) -> set[Path]:
        """All entries of the local run cache."""
        return {path for path in self.runs.rglob("*") if path.is_file() and not path.name.startswith(".")} if self.runs.is_dir() else set()

    @property
    def runs(self) -> Path:
        """Folder of the run cache."""
        return Path(self.repository.repo.stage_cache.cache_dir)

    def _past(self, entry: Entry) -> Path:
        key, name = run_cache_names(entry)
        return self.runs / key[:2] / key / name

    def _place(self, address: str) -> tuple[Path, str]:
        """The `dvc.lock` of a stage, and its name there."""
        recipe, _, name = address.partition("/")
        return (self.project.root / pipeline_file(recipe)).with_suffix(".lock"), name


def _dumped(path: Path, value: Any) -> Path:
    from dvc.utils.serialize import dump_yaml

    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    dump_yaml(str(temporary), value)
    return temporary


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """File metadata that changes whenever the file does; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def lock_paths(project: Project) -> list[Path]:
    """Where the `dvc.lock` files of a project's recipes are, or may be."""
    return [project.root / "dvc.lock", *sorted(project.artifacts.glob("*/dvc.lock"))]


def recorded(project: Project) -> list[Recorded]:
    """All parts of artifacts recorded in the working tree, sorted by address and part. LedgerError: a file is damaged."""
    try:
        return _sorted(project, {path: read_lock(path) for path in lock_paths(project)})
    except ArtifactError as error:
        raise LedgerError(str(error)) from error


def recorded_at(project: Project, revision: str) -> list[Recorded]:
    """All parts of artifacts recorded in a git revision, sorted by address and part.

    Raises:
        LedgerError: git knows no such revision, or one of the files is damaged.
    """
    names = names_at(project, revision)
    if names is None:
        raise LedgerError(f"{revision!r} is not a commit, branch or tag of this git repository: `git log` lists commits")
    return _sorted(project, {project.root / name: text_at(project, revision, name) for name in names if Path(name).name == "dvc.lock"})


def _sorted(project: Project, texts: dict[Path, str]) -> list[Recorded]:
    found = []
    for path, text in texts.items():
        try:
            outs = [out for entry in parse_lock(text, "it").values() for out in entry.outs]
            found += filter(None, (_output(project, path.parent, out) for out in outs))
        except ArtifactError as error:
            name = path.relative_to(project.root)
            raise LedgerError(f"{name} is damaged ({error}): {_remedy(name)}") from error
    return sorted(found, key=lambda entry: (entry.address, entry.part))


def _remedy(name: Path) -> str:
    """How to heal a damaged `dvc.lock`, with nothing lost."""
    return f"restore it from git (`git checkout -- {name}`), or `rm {name}`, and `pedigree run` rebuilds it from what is here"


def _output(project: Project, folder: Path, out: LockOut) -> Recorded | None:
    """An output of a `dvc.lock` in `folder`; None for one outside the artifacts, where a user's own stage may write."""
    place = Path(os.path.normpath(folder / out.path))
    if not place.is_relative_to(project.artifacts):
        return None
    name = place.relative_to(project.artifacts).as_posix()
    address, _, part = inside(project.artifacts, name).relative_to(project.artifacts).as_posix().rpartition("/")
    if out.md5 is None or address.count("/") != 1:
        raise ArtifactError(f"output {name} has no md5, or is not part of an artifact RECIPE/STAGE")
    return Recorded(address, part, place, out.md5)
