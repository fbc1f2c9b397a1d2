"""Named points at which a test may kill the process: what a crash just there leaves behind must be put right by the next run."""

import os
import signal
from pathlib import Path

FAULTS = "PEDIGREE_FAULTS"
"""Environment variable: a folder. A process that comes by the point `publish renamed` with a file `publish renamed` in it removes
the file and dies; the file holds how often the point is to be passed first."""


def fault_point(name: str) -> None:
    """Kills this process, as a power cut would, when a test has asked for that."""
    folder = os.environ.get(FAULTS)
    if folder is None:
        return
    asked = Path(folder) / name
    try:
        passes = int(asked.read_text())
    except FileNotFoundError:
        return
    if passes > 0:
        asked.write_text(str(passes - 1))
        return
    asked.unlink(missing_ok=True)  # who asked may have given up just now
    with (Path(folder) / "died.log").open("a") as stream:
        stream.write(f"{name}\n")
    os.kill(os.getpid(), signal.SIGKILL)
