"""torchrun for the ranks of a job. SIGUSR1 is converted to SIGTERM, which torchrun forwards to the ranks and waits for."""

import os
import signal
import sys
from datetime import timedelta
from typing import Any

from pedigree.data.host.process import leave

PATIENCE = timedelta(days=7)
"""Of a rank that waits for another: rank 0 may start, sample, hash or write for hours. A hang ends the job's heartbeats instead."""


def start(*arguments: str) -> int:
    """Run torchrun to its end; return its exit code."""
    signal.signal(signal.SIGUSR1, _ask_to_stop)
    from torch.distributed.run import main as torchrun

    torchrun(arguments)
    return 0


def _ask_to_stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    leave(start(*sys.argv[1:]))
