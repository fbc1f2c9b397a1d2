"""Slots: cores and GPUs of this machine, shared by all clones of all projects of one user.

Slots are held by locked files, one per job, in the machine folder: below `/tmp` regardless of TMPDIR, or in PEDIGREE_SLOTS; in `cores/` and
`gpus/`. The runner and its job each hold a shared lock, so the kernel frees the slots when both have ended. A profile's `slots` is the
number that the machine has. If two clones disagree, each takes only slots in its own profile, and together they never hold more than the
larger number. A GPU is held by name (as in CUDA_VISIBLE_DEVICES), so no two clones share one.
"""

import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.data.store.heartbeat import SILENCE_S
from pedigree.pipelines.jobs.lease import pause
from pedigree.pipelines.jobs.processes import Process, processes_of
from pedigree.pipelines.jobs.scratch_state import read_mapping
from pedigree.pipelines.quantities import counted

FOLDER = "PEDIGREE_SLOTS"
"""Environment variable: folder that holds the machine's slots. Containers that share GPUs must share this folder, too."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable: the GPUs that this process may use."""
REMEDY = f"set {FOLDER} to a folder of your own on this machine's disk"
MACHINE = Path("/tmp")
"""Fixed, so that shells with different TMPDIR share it. Not /dev/shm: systemd empties it at logout, even while jobs run."""
POLL_S = 0.2


@dataclass(frozen=True)
class Pool:
    """The slots that a job may take."""

    folder: Path
    names: tuple[str, ...]
    """Slots in the profile: numbers for cores, or GPU names."""

    @classmethod
    def of(cls, numerics: Numerics, capacity: int) -> "Pool":
        """The pool for a job's device; `capacity`: slots of the machine, from the profile."""
        if numerics.device == "cpu":
            return cls(machine_folder() / "cores", tuple(map(str, range(capacity))))
        return cls(machine_folder() / "gpus", tuple(visible_gpus() or map(str, range(capacity)))[:capacity])


def visible_gpus() -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES, e.g. those that a scheduler has allocated; empty if it is not set."""
    return [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]


def too_few_gpus(numerics: Numerics, count: int) -> str | None:
    """Why a job can never get this many slots, with the remedy; None if it can."""
    visible = visible_gpus() if numerics.device == "cuda" else []
    return _too_few(count, visible) if visible and count > len(visible) else None


def _too_few(count: int, visible: Sequence[str]) -> str:
    listed = f"{VISIBLE} lists {counted(len(visible), 'GPU')} ({','.join(visible)})"
    return f"placement.slots is {count}, but {listed}: make more GPUs visible, or lower placement.slots"


def machine_folder() -> Path:
    """The folder of this machine's slots, created for this user only if missing.

    Raises:
        PedigreeError: it cannot be created, or belongs to another user.
    """
    chosen = os.environ.get(FOLDER)
    folder = Path(chosen) if chosen else MACHINE / f"pedigree-slots-{os.getuid()}"
    with _with_remedy(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PedigreeError(f"{folder} belongs to another user: {REMEDY}")
    return folder


@contextmanager
def _with_remedy(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # has its own remedy
        raise PedigreeError(f"{folder} cannot hold this machine's slots ({error.strerror}): {REMEDY}") from error


@dataclass(frozen=True)
class HeldSlots:
    """Slots that a job takes."""

    names: list[str]
    lock: int
    """The runner's descriptor that holds them."""

    @contextmanager
    def for_job(self) -> Iterator[int]:
        """A descriptor of its own for a job, which keeps the slots until the last process that inherited it ends."""
        with open(f"/proc/self/fd/{self.lock}", "r+") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
            yield stream.fileno()


@contextmanager
def slots(
    pool: Pool,
    count: int,
    *,
    job: Path,
    waiting: Callable[[list[str]], None] = lambda holders: None,
    cancelled: threading.Event | None = None,
) -> Iterator[HeldSlots]:
    """Take `count` of a pool's slots for the block, waiting until they are free.

    Slots of the same job (its `job.json`), e.g. one that is re-attached to, are shared with it. `waiting` is called with the jobs that hold
    slots, whenever they change.

    Raises:
        Cancelled: the event was set while waiting.
        PedigreeError: the pool is too small, or its folder cannot be used.
    """
    with _with_remedy(pool.folder):
        pool.folder.mkdir(parents=True, exist_ok=True)
        (pool.folder / ".lock").touch()
    name = hashlib.sha256(str(job).encode()).hexdigest()[:32]
    path = pool.folder / f"{name}.json"
    seen: list[str] = []
    while True:
        with _exclusive(pool.folder):
            taken = taken_slots(pool.folder)
            free = [slot for slot in pool.names if not any(slot in held for held in taken.values())]
            held = taken.get(name)
            if not held and count > len(pool.names):
                raise PedigreeError(_too_few(count, pool.names))
            if held or len(free) >= count:
                names = held or free[:count]
                lock = _lock_shared(path, None if held else {"job": str(job), "slots": names})
                break
            holders = sorted(str(read_mapping(pool.folder / f"{entry}.json").get("job")) for entry in taken)
        if holders != seen:
            seen = holders
            waiting(seen)
        pause(cancelled, POLL_S)
    try:
        yield HeldSlots(names, lock)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for processes that were forked from this one and still live
        os.close(lock)
        with suppress(FileNotFoundError), _exclusive(pool.folder):  # the folder was deleted: nothing is left to release
            if not _is_locked(path):
                path.unlink()


def _lock_shared(path: Path, entry: dict[str, Any] | None) -> int:
    """Open an entry and lock it, shared with the job; `entry`: its new content. That of a live job stays as it is at every moment."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if entry is not None:
            data = json.dumps({"process": Process.here().model_dump(), "token": ""} | entry).encode()  # as earlier versions read it
            os.ftruncate(lock, 0)
            os.pwrite(lock, data, 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def taken_slots(folder: Path) -> dict[str, list[str]]:
    """Entry → its slots, for all live holders; dead entries are removed. Call with the folder's lock held, or only to look."""
    taken = {}
    for path in sorted(folder.glob("[!.]*.json")):
        raw = read_mapping(path)
        if _is_locked(path) or _is_kept_by_earlier_version(path, raw):
            taken[path.stem] = [str(name) for name in raw["slots"]] if isinstance(raw.get("slots"), list) else []
        else:
            path.unlink(missing_ok=True)
            path.with_suffix(".beat").unlink(missing_ok=True)
    return taken


def _is_locked(path: Path) -> bool:
    """Whether a process on this machine, in any container, has the entry's lock. The kernel releases it when that process ends."""
    with path.open("r+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_kept_by_earlier_version(path: Path, raw: Mapping[str, Any]) -> bool:
    """Before slots were locked, a runner rewrote a heartbeat next to its entry, and its job held the slots after it."""
    with suppress(OSError):
        if time.time() - path.with_suffix(".beat").stat().st_mtime < SILENCE_S:
            return True
    return any(processes_of(Path(str(raw.get("job"))).parent))


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock the folder for a read-modify-write; held for milliseconds, and released by the kernel if the holder dies."""
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
