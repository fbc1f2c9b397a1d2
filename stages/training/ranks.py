"""torchrun for the ranks of one job; SIGUSR1 reaches them as SIGTERM, which torchrun passes on and waits for."""

import os
import signal
from typing import Any

from data.host.process import leave


def main() -> None:
    signal.signal(signal.SIGUSR1, _ask_to_stop)
    from torch.distributed.run import main as torchrun

    torchrun()


def _ask_to_stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
    leave(0)
