"""How much memory is left for this process: of its control group, or of the machine; and the most that it has taken."""

import re
import resource
import sys
from pathlib import Path

LOW_SHARE = 0.1
"""Below it a sudden death may have been for lack of memory."""


def share_left() -> float:
    """Share of memory that is free or can be freed, where the group's limit is nearer than the machine's; 1.0 where nothing tells."""
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
    """The most bytes that this process has had so far: `host` in memory, `gpu` allocated by torch, `child` of the largest process that it
    has started and waited for. What is 0 is left out."""
    found = {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    found["child"] = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.max_memory_allocated()
    return {name: count for name, count in found.items() if count}
