"""Slots: cores and GPUs of this machine, shared by all clones of all projects of one user.

They are held in a folder of the machine's own, below `/tmp` whatever TMPDIR says, or where PEDIGREE_SLOTS says: `cores/` and `gpus/`, a
file per job. A profile's `slots` says how many the machine has. Where two clones disagree, each takes only slots that its own profile
knows, and all together never hold more than the larger of the two numbers; a GPU is held by its own name (as in CUDA_VISIBLE_DEVICES),
so that two clones never share one.
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

from configs.base.frozen import Frozen
from configs.base.problems import PedigreeError
from configs.language.execution import Numerics
from data.artifacts.artifacts import write_json
from data.store import heartbeat
from data.store.heartbeat import Listener, Pulse
from pipelines.jobs.launcher import Launcher, state_in
from pipelines.jobs.lease import pause
from pipelines.jobs.processes import Process
from pipelines.jobs.scratch_state import read_mapping
from stages.job.job import PULSES

FOLDER = "PEDIGREE_SLOTS"
"""Environment variable: where the machine's slots are held. Containers that share a machine's GPUs share this folder, too."""
REMEDY = f"set {FOLDER} to a folder of your own on this machine's disk"
MACHINE = Path("/tmp")
"""Shells with different TMPDIR must meet. Not /dev/shm: systemd empties it when its user logs out, jobs or not."""
POLL_S = 0.2


class NoSlots(PedigreeError):
    """There is no folder that can hold the machine's slots."""


@dataclass(frozen=True)
class Pool:
    """What a job may take slots of."""

    folder: Path
    names: tuple[str, ...]
    """Of the slots that the profile knows: numbers of cores' slots, or GPUs."""

    @classmethod
    def of(cls, numerics: Numerics, capacity: int) -> "Pool":
        """The pool for a device.

        Args:
            numerics: of the job.
            capacity: slots of the machine, as the profile has it.
        """
        if numerics.device == "cpu":
            return cls(machine_folder() / "cores", tuple(map(str, range(capacity))))
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]  # e.g. a scheduler's
        return cls(machine_folder() / "gpus", tuple(visible or map(str, range(capacity)))[:capacity])


def machine_folder() -> Path:
    """The folder of this machine's slots; made, for this user alone, where it does not exist.

    Raises:
        NoSlots: it cannot be made, or somebody else has made it.
    """
    chosen = os.environ.get(FOLDER)
    folder = Path(chosen) if chosen else MACHINE / f"pedigree-slots-{os.getuid()}"
    with _told_what_to_do(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise NoSlots(f"{folder} belongs to somebody else: {REMEDY}")
    return folder


@contextmanager
def _told_what_to_do(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # has a remedy of its own
        raise NoSlots(f"{folder} cannot hold the slots of this machine ({error.strerror}): {REMEDY}") from error


@contextmanager
def slots(
    pool: Pool,
    count: int,
    *,
    jobs: Launcher,
    job: Path,
    waiting: Callable[[list[str]], None] = lambda whose: None,
    cancelled: threading.Event | None = None,
) -> Iterator[list[str]]:
    """Takes `count` of a pool's slots for the block, first waiting until they are free; yields their names.

    Whoever holds slots keeps them while its own process lives or the job does whose `job.json` is named: an orphaned job goes on using
    its cores. The slots of the same job, e.g. of one that is re-attached to, are taken over.

    Args:
        pool: what they are taken of.
        count: how many.
        jobs: whether a job lives is asked of it.
        job: the job's `job.json`.
        waiting: called with the jobs that hold slots, whenever others do.
        cancelled: ends the wait.

    Raises:
        Cancelled: the event was set while waiting.
        NoSlots: the pool's folder cannot be used.
    """
    with _told_what_to_do(pool.folder):
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
        with suppress(FileNotFoundError), _exclusive(pool.folder):  # somebody has cleaned the folder away: nothing is left to give back
            if read_mapping(path) == mine:
                if state_in(jobs, job.parent) == "running":  # a job that was left running keeps its slots, and nobody else does
                    write_json(path, mine | {"process": None})
                else:
                    path.unlink()
                    (pool.folder / f"{name}.beat").unlink(missing_ok=True)


def taken_slots(folder: Path, listeners: dict[str, Listener], jobs: Launcher) -> dict[str, list[str]]:
    """Entry → its slots, of all that live; entries of the dead are removed. One of a form that this version does not know lives as long as
    it beats, and holds the slots that it names, if it does. The caller holds the folder's lock, or only looks.

    Args:
        folder: the pool's.
        listeners: by entry; kept by the caller between two looks.
        jobs: whether a job lives is asked of it.
    """
    taken = {}
    for path in sorted(folder.glob("[!.]*.json")):
        told = read_mapping(path)
        if _lives(path, told, listeners.setdefault(path.stem, Listener()), jobs):
            taken[path.stem] = [str(name) for name in told["slots"]] if isinstance(told.get("slots"), list) else []
        else:
            path.unlink(missing_ok=True)
            path.with_suffix(".beat").unlink(missing_ok=True)
    return taken


class _Entry(Frozen):
    """What holds slots, as its file has it."""

    process: dict[str, Any] | None
    job: Annotated[str, Field(max_length=4096)]
    token: str
    slots: tuple[str, ...] = Field(strict=False)


def _lives(path: Path, told: Mapping[str, Any], listener: Listener, jobs: Launcher) -> bool:
    try:
        entry = _Entry.model_validate(told)
        known = entry.process is None or Process.told(entry.process) is not None
    except ValidationError:
        entry, known = None, False
    job = Path(entry.job) if entry else None
    process = Process.told(entry.process) if entry else None
    if process is not None and process.alive:
        return True
    state = state_in(jobs, job.parent) if job else None
    if state == "running":
        return True
    if known and state != "unknown" and (process is None or process.is_local):
        return False
    # of another container or version
    signs = (heartbeat.sign(path.with_suffix(".beat")), heartbeat.sign(job.parent / PULSES) if job else ())
    return listener.silent_s(signs) <= heartbeat.SILENCE_S


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Guards looking and writing as one step; held for milliseconds, released by the kernel when a holder dies."""
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
