"""Whether this process gets anything done: it computes, or bytes move. A call that hangs on a dead disk or a lost peer does neither."""

import re
import time
from pathlib import Path

CPU_SHARE = 0.05
"""Of one core. The threads that only keep the pulse need a hundredth."""
BYTES = 1 << 20


class Effort:
    """What a process has done since somebody last asked."""

    def __init__(self) -> None:
        self._asked, self._cpu, self._bytes = time.monotonic(), time.process_time(), _moved()

    def made(self) -> bool:
        """Whether there was any since the last call."""
        now, cpu, moved = time.monotonic(), time.process_time(), _moved()
        made = cpu - self._cpu > CPU_SHARE * (now - self._asked) or moved - self._bytes >= BYTES
        self._asked, self._cpu, self._bytes = now, cpu, moved
        return made


def _moved() -> int:
    """Bytes that this process has read and written so far."""
    try:
        return sum(map(int, re.findall(r"^[rw]char: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)))
    except OSError:
        return 0
