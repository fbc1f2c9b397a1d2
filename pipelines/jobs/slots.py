"""Slots: cores and GPUs of this machine, shared by all clones of all projects of one user.

Slots are held by files, one per job, in the machine folder: below `/tmp` regardless of TMPDIR, or in PEDIGREE_SLOTS; in `cores/` and
`gpus/`. A profile's `slots` is the number that the machine has. If two clones disagree, each takes only slots in its own profile, and
together they never hold more than the larger number. A GPU is held by name (as in CUDA_VISIBLE_DEVICES), so no two clones share one.
"""

import errno
import fcntl
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.store import heartbeat
from pedigree.data.store.heartbeat import Listener, Pulse
from pedigree.pipelines.jobs.launcher import Launcher, state_in
from pedigree.pipelines.jobs.lease import pause
from pedigree.pipelines.jobs.processes import Process
from pedigree.pipelines.jobs.scratch_state import read_mapping
from pedigree.stages.job.job import PULSES

FOLDER = "PEDIGREE_SLOTS"
"""Environment variable: folder that holds the machine's slots. Containers that share GPUs must share this folder, too."""
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
        """The pool for a device.

        Args:
            numerics: of the job.
            capacity: slots of the machine, from the profile.
        """
        if numerics.device == "cpu":
            return cls(machine_folder() / "cores", tuple(map(str, range(capacity))))
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]  # e.g. a scheduler's
        return cls(machine_folder() / "gpus", tuple(visible or map(str, range(capacity)))[:capacity])


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


@contextmanager
def slots(
    pool: Pool,
    count: int,
    *,
    jobs: Launcher,
    job: Path,
    waiting: Callable[[list[str]], None] = lambda holders: None,
    cancelled: threading.Event | None = None,
) -> Iterator[list[str]]:
    """Take `count` of a pool's slots for the block, waiting until they are free; yield their names.

    A holder keeps its slots while its own process or the job of its `job.json` is alive: an orphaned job still uses its cores. Slots of the
    same job, e.g. one that is re-attached to, are taken over.

    Args:
        pool: the slots to take from.
        count: how many.
        jobs: launcher that is asked whether a job is alive.
        job: the job's `job.json`.
        waiting: called with the jobs that hold slots, whenever they change.
        cancelled: ends the wait.

    Raises:
        Cancelled: the event was set while waiting.
        PedigreeError: the pool's folder cannot be used.
    """
    with _with_remedy(pool.folder):
        pool.folder.mkdir(parents=True, exist_ok=True)
        (pool.folder / ".lock").touch()
    name = hashlib.sha256(str(job).encode()).hexdigest()[:32]
    path = pool.folder / f"{name}.json"
    mine: dict[str, Any] = {"process": asdict(Process.here()), "job": str(job), "token": uuid.uuid4().hex}
    listeners: dict[str, Listener] = {}
    seen: list[str] = []
    while True:
        with _exclusive(pool.folder):
            taken = taken_slots(pool.folder, listeners, jobs)
            free = [slot for slot in pool.names if not any(slot in held for held in taken.values())]
            if name in taken or len(free) >= count:
                mine["slots"] = taken.get(name, free[:count])
                write_json(path, mine)
                break
            holders = sorted(str(read_mapping(pool.folder / f"{entry}.json").get("job")) for entry in taken)
        if holders != seen:
            seen = holders
            waiting(seen)
        pause(cancelled, POLL_S)
    try:
        with Pulse(pool.folder / f"{name}.beat"):
            yield mine["slots"]
    finally:
        with suppress(FileNotFoundError), _exclusive(pool.folder):  # the folder was deleted: nothing is left to release
            if read_mapping(path) == mine:
                if state_in(jobs, job.parent) == "running":  # the job was left running and is now the only holder of its slots
                    write_json(path, mine | {"process": None})
                else:
                    path.unlink()
                    (pool.folder / f"{name}.beat").unlink(missing_ok=True)


def taken_slots(folder: Path, listeners: dict[str, Listener], jobs: Launcher) -> dict[str, list[str]]:
    """Entry → its slots, for all live holders; dead entries are removed. An entry in an unknown format is alive while its heartbeat
    continues, and holds the slots that it lists, if any. Call with the folder's lock held, or only to look.

    Args:
        folder: the pool's.
        listeners: by entry; kept by the caller between looks.
        jobs: launcher that is asked whether a job is alive.
    """
    taken = {}
    for path in sorted(folder.glob("[!.]*.json")):
        raw = read_mapping(path)
        if _is_alive(path, raw, listeners.setdefault(path.stem, Listener()), jobs):
            taken[path.stem] = [str(name) for name in raw["slots"]] if isinstance(raw.get("slots"), list) else []
        else:
            path.unlink(missing_ok=True)
            path.with_suffix(".beat").unlink(missing_ok=True)
    return taken


class _Entry(Frozen):
    """The contents of an entry's file."""

    process: dict[str, Any] | None
    job: Annotated[str, Field(max_length=4096)]
    token: str
    slots: tuple[str, ...] = Field(strict=False)


def _is_alive(path: Path, raw: Mapping[str, Any], listener: Listener, jobs: Launcher) -> bool:
    try:
        entry = _Entry.model_validate(raw)
        known = entry.process is None or Process.parse(entry.process) is not None
    except ValidationError:
        entry, known = None, False
    job = Path(entry.job) if entry else None
    process = Process.parse(entry.process) if entry else None
    if process is not None and process.alive:
        return True
    state = state_in(jobs, job.parent) if job else None
    if state == "running":
        return True
    if known and state != "unknown" and (process is None or process.is_local):
        return False
    # from another container or version
    signs = (heartbeat.sign(path.with_suffix(".beat")), heartbeat.sign(job.parent / PULSES) if job else ())
    return listener.silent_s(signs) <= heartbeat.SILENCE_S


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock the folder for a read-modify-write; held for milliseconds, and released by the kernel if the holder dies."""
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
