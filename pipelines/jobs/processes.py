"""Processes of this machine, read from `/proc`: which are alive, which belong to a job, how to end them.

psutil reads the same files, but its start times shift with the machine's clock; ticks since boot do not.
"""

import functools
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pedigree.configs.base.frozen import Frozen
from pedigree.data.store.untrusted import Line

MARK = "PEDIGREE_JOB"
"""Environment variable that holds the scratch folder. It identifies every process of a job, even after its parents have died."""
POLL_S = 0.1
PATIENCE_S = 10.0
"""SIGKILL takes effect immediately unless the process is blocked in the kernel (a hung disk or driver). Longest wait for that."""


class Process(Frozen):
    """A process identity that distinguishes it from a later process with the same PID, and from processes of other machines."""

    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    started: Annotated[int, Field(ge=0)]
    """Clock ticks from boot to its start (`/proc/PID/stat`, field 22)."""
    machine: Line
    """Boot of the machine and PID namespace (`this_machine`)."""

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The live process with this PID; None if there is none, or a zombie."""
        started = _start_of(pid)
        return None if started is None else cls(pid=pid, started=started, machine=this_machine())

    @classmethod
    def here(cls) -> "Process":
        process = cls.of(os.getpid())
        assert process is not None
        return process

    @classmethod
    def parse(cls, raw: Any) -> "Process | None":
        """Parse a stored process; None for an unknown format."""
        try:
            return cls.model_validate(raw)
        except ValidationError:
            return None

    @property
    def is_local(self) -> bool:
        """Whether this machine's process table covers it."""
        return self.machine == this_machine()

    @property
    def alive(self) -> bool:
        return self.is_local and _start_of(self.pid) == self.started


@functools.cache
def this_machine() -> str:
    """Hash of the boot and the PID namespace, within which PIDs are unique; hashed so that it reveals no host name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    seen = f"{boot}/{os.uname().nodename}/{os.stat('/proc/self/ns/pid').st_ino}"  # the name distinguishes copies of one running machine
    return hashlib.sha256(seen.encode()).hexdigest()[:32]


def processes_of(scratch: Path) -> Iterator[int]:
    """Live processes that carry the scratch folder in their environment (zombies have none).

    Processes in a container of this machine have their own PID namespace and are excluded.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            pid = int(folder.name)
            mark = marked(pid)
            try:
                if mark and _is_given(pid, mark, scratch) and (folder / "ns/pid").stat().st_ino == namespace:
                    yield pid
            except OSError:  # gone in the meantime
                continue


def works_in(process: Process, scratch: Path) -> bool:
    """Whether a process is alive and works in this scratch folder, not in the original of which this is a copy."""
    if not process.alive:
        return False
    mark = marked(process.pid)
    return mark is None or _is_given(process.pid, mark, scratch)  # a hidden environment is given the benefit of the doubt


def marked(pid: int) -> str | None:
    """The scratch folder of the process's job, as in its environment."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or owned by another user
        return None
    mark = f"{MARK}=".encode()
    return next((os.fsdecode(line.removeprefix(mark)) for line in lines if line.startswith(mark)), None)


def is_seen_at(pid: int, path: str, folder: Path) -> bool | None:
    """Whether a process of this machine sees this folder at a path: true under another mount path, false in a copy.

    None if the process sees nothing there, or access is denied.
    """
    return _is_same(Path(f"/proc/{pid}/root{path}"), folder)


def _is_given(pid: int, mark: str, scratch: Path) -> bool:
    found = is_seen_at(pid, mark, scratch)
    if found is not None:
        return found
    if mark == str(scratch):  # deleted while it ran
        return True
    project = scratch.parent.parent.parent  # moved while it ran, along with the job's working directory
    return Path(mark).name == scratch.name and bool(_is_same(Path(f"/proc/{pid}/cwd"), project))


def _is_same(one: Path, other: Path) -> bool | None:
    try:
        return one.samefile(other)
    except OSError:
        return None


def kill_all(scratch: Path) -> list[int]:
    """Send SIGKILL to every process of a job until none is left; return those that did not die in time."""
    deadline = time.monotonic() + PATIENCE_S
    while members := list(processes_of(scratch)):
        for pid in members:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return members
        time.sleep(POLL_S)
    return []


def described(pids: list[int]) -> str:
    """Describe processes that survived SIGKILL, for a message."""
    states = {pid: _field(pid, 0) or "gone" for pid in pids}
    names = ", ".join(f"{pid} (state {state})" for pid, state in states.items())
    return f"process {names} survived SIGKILL; it is blocked in the kernel, probably on disk or driver I/O"


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal; otherwise the signal would kill it."""
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
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def send_to_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _start_of(pid: int) -> int | None:
    state, started = _field(pid, 0), _field(pid, 19)
    return None if started is None or state in ("Z", "X") else int(started)


def _field(pid: int, index: int) -> str | None:
    """A field of `/proc/PID/stat`, counted from the state."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[index]  # the name before it may contain anything
