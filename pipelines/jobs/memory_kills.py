"""Whether the kernel killed one of a job's own processes for lack of memory: a neighbour's must change nobody's micro-batch.

In this order:

1. The kernel counts its kills, per control group or for the machine. Where it has killed nobody since the job began, memory did not run
   out.
2. The kernel's log names whom it killed. Where it can be read and process numbers mean the same there, only a process of the job counts.
3. Otherwise a process of the job must have died of a SIGKILL that we did not send, and the job's last sign of life must have said that
   little memory was left.
"""

import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data.host.memory import LOW_SHARE
from data.store import heartbeat
from stages.job.job import PULSES

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
KERNEL_LOG = Path("/dev/kmsg")
CLOCKS_APART_S = 60.0
"""The kernel's log has a clock of its own since boot, which nobody corrects."""
INITIAL_NAMESPACE = 0xEFFFFFFC
"""The inode of the first PID namespace: the kernel's log speaks of its numbers."""


@dataclass(frozen=True)
class Before:
    """What had been killed when the job started."""

    kills: int = 0
    uptime_s: float = 0.0

    @classmethod
    def now(cls) -> "Before":
        return cls(_kills(), time.clock_gettime(time.CLOCK_MONOTONIC))


def ran_out(before: Before, scratch: Path, members: set[int], exit_code: int | None) -> str | None:
    """Why it is believed that the kernel killed a process of the job for lack of memory; None: it did not.

    Args:
        before: from when the job started.
        scratch: its folder, with the last signs of life of its processes.
        members: its processes, as far as they were seen.
        exit_code: of its first process, where it is known.
    """
    kills = _kills() - before.kills
    if kills <= 0:
        return None
    beats = heartbeat.told(scratch / PULSES)
    named = killed(KERNEL_LOG, before.uptime_s - CLOCKS_APART_S) if _sees_the_kernels_numbers() else None
    if named is not None:
        mine = sorted(named & (members | {int(beat["pid"]) for beat in beats if "pid" in beat}))
        return f"the kernel killed its process {mine[0]} because memory ran out" if mine else None
    if exit_code is not None and exit_code not in (-signal.SIGKILL, 1):  # 1: another of its processes died, and it says so
        return None
    low = [beat for beat in beats if beat.get("memory_share", 1.0) < LOW_SHARE]
    if not low:
        return None
    share = 100 * min(float(beat["memory_share"]) for beat in low)
    return f"one of its processes was killed when {share:.0f} % of the memory was left, and the kernel counts a kill because memory ran out"


def killed(log: Path, since_s: float) -> set[int] | None:
    """Processes that the kernel's log names as killed for lack of memory since so long after its start; None: it cannot be read."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = re.findall(r"^\d+,\d+,(\d+),[^;]*;.*Killed process (\d+)", "\n".join(_records(descriptor)), re.MULTILINE)
        return {int(pid) for microseconds, pid in found if int(microseconds) / 1e6 >= since_s}
    finally:
        os.close(descriptor)


def _records(descriptor: int) -> Iterable[str]:
    while True:
        try:
            record = os.read(descriptor, 8192)  # /dev/kmsg gives one record per read
        except BrokenPipeError:  # records were overwritten meanwhile; the next read goes on after them
            continue
        except OSError:
            return
        if not record:
            return
        yield record.decode(errors="replace")


def _kills() -> int:
    """Kills for lack of memory in our control group, or of the whole machine where groups do not tell."""
    for path in (_group("") / "memory.events", _group("memory") / "memory.oom_control", PROC / "vmstat"):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def _group(controller: str) -> Path:
    """The folder of our control group: of version 2, or of a controller of version 1."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return CGROUP / "none"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller == "" == controllers or (controller and controller in controllers.split(",")):
            return CGROUP / controller / path.lstrip("/")
    return CGROUP / "none"


def _sees_the_kernels_numbers() -> bool:
    return os.stat("/proc/self/ns/pid").st_ino == INITIAL_NAMESPACE
