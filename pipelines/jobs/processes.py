"""Processes of this machine, as `/proc` shows them: who lives, which belong to a job, how to end them.

psutil would read the same files, but its time of a start moves with the machine's clock; ticks since boot do not.
"""

import functools
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from configs.base.frozen import Frozen
from data.store.untrusted import Line

MARK = "PEDIGREE_JOB"
"""Environment variable that holds the scratch folder: it finds every process of a job, also after its parents have died."""
POLL_S = 0.1
PATIENCE_S = 10.0
"""SIGKILL works at once, unless the kernel itself holds the process (a hung disk or driver): nobody waits longer for that."""


class _Told(Frozen):
    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    started: Annotated[int, Field(ge=0)]
    machine: Line


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same number, nor for one of another machine."""

    pid: int
    started: int
    """Clock ticks from boot to its start (`/proc/PID/stat`, field 22)."""
    machine: str
    """Boot of the machine and PID namespace (`this_machine`)."""

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The living process with this number; None when there is none, or a zombie."""
        started = _start_of(pid)
        return None if started is None else cls(pid, started, this_machine())

    @classmethod
    def here(cls) -> "Process":
        process = cls.of(os.getpid())
        assert process is not None
        return process

    @classmethod
    def told(cls, raw: Any) -> "Process | None":
        """A process that somebody has written down; None for a form that this version does not know."""
        try:
            return cls(**_Told.model_validate(raw).model_dump())
        except ValidationError:
            return None

    @property
    def is_local(self) -> bool:
        """Whether the process table of this machine can tell if it lives."""
        return self.machine == this_machine()

    @property
    def alive(self) -> bool:
        return self.is_local and _start_of(self.pid) == self.started


@functools.cache
def this_machine() -> str:
    """A boot of a machine, with the PID namespace: where process numbers mean the same. A hash, so that it names nobody's host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    seen = f"{boot}/{os.uname().nodename}/{os.stat('/proc/self/ns/pid').st_ino}"  # the name tells copies of one running machine apart
    return hashlib.sha256(seen.encode()).hexdigest()[:32]


def processes_of(scratch: Path) -> Iterator[int]:
    """Living processes that carry the scratch folder in their environment (a zombie has none).

    Those in a container of this machine have their own PID namespace: they are not ours.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            pid = int(folder.name)
            told = marked(pid)
            try:
                if told and _is_given(pid, told, scratch) and (folder / "ns/pid").stat().st_ino == namespace:
                    yield pid
            except OSError:  # gone meanwhile
                continue


def works_in(process: Process, scratch: Path) -> bool:
    """Whether a process lives and works in this scratch folder, not in the one that this is a copy of."""
    if not process.alive:
        return False
    told = marked(process.pid)
    return told is None or _is_given(process.pid, told, scratch)  # who hides its environment is believed


def marked(pid: int) -> str | None:
    """The scratch folder of the job that a process belongs to, as the process was told it."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or of another user
        return None
    mark = f"{MARK}=".encode()
    return next((os.fsdecode(line.removeprefix(mark)) for line in lines if line.startswith(mark)), None)


def is_seen_at(pid: int, path: str, folder: Path) -> bool | None:
    """Whether a path is this folder to a process of this machine: under another mount path it is, in a copy it is not.

    None: the process sees nothing there (any more), or nobody may look.
    """
    return _is_same(Path(f"/proc/{pid}/root{path}"), folder)


def _is_given(pid: int, told: str, scratch: Path) -> bool:
    found = is_seen_at(pid, told, scratch)
    if found is not None:
        return found
    if told == str(scratch):  # deleted under it
        return True
    project = scratch.parent.parent.parent  # moved under it, and a job's working directory with it
    return Path(told).name == scratch.name and bool(_is_same(Path(f"/proc/{pid}/cwd"), project))


def _is_same(one: Path, other: Path) -> bool | None:
    try:
        return one.samefile(other)
    except OSError:
        return None


def kill_all(scratch: Path, patience_s: float | None = None) -> list[int]:
    """SIGKILL for every process of a job, until none is left; returns those that did not die in time."""
    deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    while members := list(processes_of(scratch)):
        for pid in members:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return members
        time.sleep(POLL_S)
    return []


def described(pids: list[int]) -> str:
    """Processes that do not die, for a message."""
    states = {pid: _field(pid, 0) or "gone" for pid in pids}
    names = ", ".join(f"{pid} (state {state})" for pid, state in states.items())
    return f"process {names} does not die: the kernel holds it, most likely for a disk or a driver, and ends it when that answers"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal; another would die of it."""
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return bool(found) and bool(int(found[1], 16) >> (number - 1) & 1)


def leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def send_to_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def _start_of(pid: int) -> int | None:
    state, started = _field(pid, 0), _field(pid, 19)
    return None if started is None or state in ("Z", "X") else int(started)


def _field(pid: int, index: int) -> str | None:
    """A field of `/proc/PID/stat`, counted from the state."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[index]  # the name before may hold anything
