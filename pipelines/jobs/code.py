"""Code snapshots for jobs: copies of Pedigree's packages, stored by hash, that no edit or checkout can change."""

import importlib.util
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.data.artifacts.provenance import CODE_ROOT, code_files, code_sha256, fingerprint
from pedigree.data.store.durable import rename, sync_tree
from pedigree.data.store.untrusted import inside
from pedigree.pipelines.jobs.scratch_state import SPEC, read_mapping
from pedigree.pipelines.lineage.git_state import code_state

TRIES = 20


@dataclass(frozen=True)
class Code:
    """A consistent state of the code."""

    sha256: str
    folder: Path
    """The snapshot of Pedigree's packages."""
    state: dict[str, Any]
    """Git state at that moment, as recorded in `run.json`."""


def snapshot(project: Project, root: Path = CODE_ROOT, *, new_files: bool = False) -> Code:
    """Snapshot the current code into the project unless it is already there; `new_files` as for `code_state`.

    Raises:
        PedigreeError: the files kept changing while they were read.
    """
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # a checkout is in progress
            before = _looks(root)
            sha256, state = code_sha256(code_files(root)), code_state(root, new_files=new_files)
            folder = project.code(sha256)
            if not folder.exists():
                _copy(root, folder, sha256)
            if folder.exists() and _looks(root) == before:
                return Code(sha256, folder, state)
    packages = ", ".join(sorted({name.split("/")[0] for name in code_files(root)}))
    raise PedigreeError(
        f"the files of {packages} changed {TRIES} times while being copied: wait for the checkout or editor to finish, then run the "
        "command again"
    )


def receive(project: Project, sha256: str, files: Mapping[str, bytes]) -> None:
    """Store code received from another machine, verified by `data.artifacts.provenance.unpacked`, next to local snapshots."""
    with _building(project.code(sha256), sha256) as building:
        for name, content in files.items():
            path = inside(building, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o444)


def unused(project: Project) -> list[Path]:
    """Snapshots that no unfinished job started with."""
    wanted = [read_mapping(spec).get("code") for spec in (project.private / "scratch").glob(f"*/{SPEC}")]  # of any version
    return sorted(path for path in project.code("any").parent.glob("*") if path.name not in wanted)


def differing(kind: str, one: Path, other: Path) -> list[str]:
    """Source files of a stage kind that differ between two code folders, ignoring comments and formatting."""
    before, now = (fingerprint(kind, root)["files"] for root in (one, other))
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _looks(root: Path) -> dict[str, tuple[int, int, int]]:
    """File metadata that changes whenever the files do."""
    stats = {name: path.stat() for name, path in code_files(root).items()}
    return {name: (found.st_mtime_ns, found.st_size, found.st_ino) for name, found in stats.items()}


def _copy(root: Path, target: Path, sha256: str) -> None:
    """Copy the files, with existing bytecode."""
    with _building(target, sha256) as building:
        for name, path in code_files(root).items():
            copy = building / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)  # keeps the mtime, by which Python validates bytecode
            if path.suffix == ".py":
                _copy_bytecode(path, copy)
            copy.chmod(0o444)


@contextmanager
def _building(target: Path, sha256: str) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` at the end of the block if its contents have the hash."""
    building = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield building
        if code_sha256(code_files(building)) == sha256:
            sync_tree(building)
            rename(building, target)
    except OSError:
        if not target.exists():  # otherwise another run was faster
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _copy_bytecode(source: Path, target: Path) -> None:
    compiled = Path(importlib.util.cache_from_source(str(source)))
    if compiled.is_file():
        copy = Path(importlib.util.cache_from_source(str(target)))
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(compiled, copy)
