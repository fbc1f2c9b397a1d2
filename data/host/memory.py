"""Free memory of this process's cgroup or machine, and its peak memory."""

import re
import resource
import sys
from pathlib import Path

LOW_SHARE = 0.1
"""Free share below which an unexplained kill may have been an out-of-memory kill."""


def share_left() -> float:
    """Share of available memory, of the machine or of the cgroup, whichever is tighter; 1.0 if unknown."""
    try:
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
        shares = [int(found["MemAvailable"]) / int(found["MemTotal"])]
    except (OSError, KeyError):
        shares = [1.0]
    try:
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        if limit != "max":
            shares.append(1 - used / int(limit))
    except (OSError, ValueError):
        pass
    return round(min(shares), 3)


def peak() -> dict[str, int]:
    """Peak bytes of this process so far: `host` resident, `gpu` allocated by torch, `child` of the largest child waited for. Zeros are
    omitted."""
    found = {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    found["child"] = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.max_memory_allocated()
    return {name: count for name, count in found.items() if count}
