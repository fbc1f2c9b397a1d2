"""Fault injection: named points at which tests kill the process, to check that the next run recovers."""

import os
import signal
from pathlib import Path

FAULTS = "PEDIGREE_FAULTS"
"""Environment variable with a folder. A process that reaches the point `publish renamed` when the folder has a file of that name removes
the file and dies; the file contains the number of times to pass the point first."""


def fault_point(name: str) -> None:
    """Kill this process with SIGKILL if a test requested it."""
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
    asked.unlink(missing_ok=True)  # the test may have removed it in the meantime
    with (Path(folder) / "died.log").open("a") as stream:
        stream.write(f"{name}\n")
    os.kill(os.getpid(), signal.SIGKILL)
