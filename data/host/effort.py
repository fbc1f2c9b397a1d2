"""Detect whether this process makes progress: CPU time or I/O. A call that hangs on a dead disk or a lost peer shows neither."""

import re
import time
from pathlib import Path

CPU_SHARE = 0.05
"""Share of one core. Heartbeats alone need about a hundredth."""
BYTES = 1 << 20


class Effort:
    """Tracks this process's CPU time and I/O since the last check, without the CPU time of the thread that checks: where it reports each
    progress, it would take its own reports for more."""

    def __init__(self) -> None:
        self._asked, self._cpu, self._bytes = time.monotonic(), _cpu_of_others(), _moved()

    def progressed(self) -> bool:
        """Whether there was progress since the last call."""
        now, cpu, moved = time.monotonic(), _cpu_of_others(), _moved()
        made = cpu - self._cpu > CPU_SHARE * (now - self._asked) or moved - self._bytes >= BYTES
        self._asked, self._cpu, self._bytes = now, cpu, moved
        return made


def _cpu_of_others() -> float:
    return time.process_time() - time.thread_time()


def _moved() -> int:
    """Total bytes read and written by this process."""
    try:
        return sum(map(int, re.findall(r"^[rw]char: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)))
    except OSError:
        return 0
