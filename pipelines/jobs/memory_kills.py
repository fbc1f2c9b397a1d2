"""Detect whether the kernel killed one of a job's own processes for lack of memory; a neighbor's kill must not shrink the micro-batch.

In this order:

1. The kernel counts its kills, per control group or for the machine. If the count has not changed since the job began, memory did not
   run out.
2. The kernel's log names the killed processes. Where it is readable and uses the same PIDs, only processes of the job count.
3. Otherwise a process of the job must have died of a SIGKILL that Pedigree did not send, and the job's last heartbeat must have
   reported that little memory was left.
"""

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pedigree.configs.base.frozen import Frozen
from pedigree.data.host.machine import LOW_MEMORY
from pedigree.data.store import heartbeat
from pedigree.stages.job.job import PULSES

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
KERNEL_LOG = Path("/dev/kmsg")
CLOCKS_APART_S = 60.0
"""Tolerance for the clock of the kernel's log, which counts from boot and is never corrected."""
INITIAL_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial PID namespace, whose PIDs the kernel's log uses."""


class Before(Frozen):
    """Kernel counters at the start of a job."""

    kills: int = 0
    uptime_s: float = 0.0

    @classmethod
    def now(cls) -> "Before":
        return cls(kills=_kills(), uptime_s=time.clock_gettime(time.CLOCK_MONOTONIC))

    @classmethod
    def parse(cls, raw: Any) -> "Before":
        """Parse stored counters; the current values for an unknown format."""
        try:
            return cls.model_validate(raw)
        except ValidationError:
            return cls.now()


def ran_out(before: Before, scratch: Path, members: set[int], exit_code: int | None) -> str | None:
    """Evidence that the kernel killed a process of the job for lack of memory; None if it did not.

    Args:
        before: counters from the start of the job.
        scratch: its folder, with the last heartbeats of its processes.
        members: its processes, as far as they were seen.
        exit_code: of its first process, if known.
    """
    kills = _kills() - before.kills
    if kills <= 0:
        return None
    beats = heartbeat.read_heartbeats(scratch / PULSES)
    named = killed(KERNEL_LOG, before.uptime_s - CLOCKS_APART_S) if _sees_the_kernels_numbers() else None
    if named is not None:
        mine = sorted(named & (members | {int(beat["pid"]) for beat in beats if "pid" in beat}))
        return f"the kernel killed its process {mine[0]} because memory ran out" if mine else None
    if exit_code is not None and exit_code not in (-signal.SIGKILL, 1):  # 1: another of its processes died and was reported
        return None
    low = [beat for beat in beats if beat.get("memory_share", 1.0) < LOW_MEMORY]
    if not low:
        return None
    share = 100 * min(float(beat["memory_share"]) for beat in low)
    return f"one of its processes was killed with {share:.0f} % of the memory left, and the kernel counted an out-of-memory kill"


def killed(log: Path, since_s: float) -> set[int] | None:
    """PIDs that the kernel's log reports as killed for lack of memory after this uptime; None if the log is unreadable."""
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
        except BrokenPipeError:  # records were overwritten in the meantime; the next read continues after them
            continue
        except OSError:
            return
        if not record:
            return
        yield record.decode(errors="replace")


def _kills() -> int:
    """Kills for lack of memory in our control group, or on the whole machine if the group does not count them."""
    for path in (_group("") / "memory.events", _group("memory") / "memory.oom_control", PROC / "vmstat"):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def _group(controller: str) -> Path:
    """The folder of our control group, of cgroup v2 or of a v1 controller."""
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
