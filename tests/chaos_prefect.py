"""A Prefect server that goes away while runs are shown in it: for `tests/chaos.py` and for the tests of the flow.

    server = PrefectServer(folder)
    run = subprocess.Popen([...], env=environment() | server.environment)
    go_away(server, random.Random(1))   # dead or hanging for a while, then back
    server.stop()

The run neither ends nor waits; nothing is typed again.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

PREFECT = str(Path(sys.executable).parent / "prefect")
START_S = 300.0
AWAY_S = (2.0, 20.0)


class PrefectServer:
    """A server of one's own on loopback, its database on disk."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        folder.mkdir()
        quiet = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        self._own = {**os.environ, **quiet, "PREFECT_HOME": str(folder), "PYTHONFAULTHANDLER": "1"}
        self.log = folder / "server.log"
        self.environment = quiet | {"PREFECT_HOME": str(folder), "PREFECT_API_URL": self.url, "PEDIGREE_PREFECT": "auto"}
        """What a run needs in its environment to be shown here."""
        self.start()

    def start(self) -> None:
        """Also after `kill`; returns when it answers."""
        command = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._own, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while not self.healthy():
            assert self.process.poll() is None and time.monotonic() < deadline, "the Prefect server did not start"
            time.sleep(0.5)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(30)

    def stacks(self) -> str:
        """Ends a server that hangs; returns where its threads stood."""
        self.signal(signal.SIGABRT)
        self.process.wait()
        return self.log.read_text(errors="replace")[-20_000:]

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        self.process.wait(30)


def killed(server: PrefectServer, seconds: float) -> None:
    """Connections are refused, then it starts anew."""
    server.kill()
    time.sleep(seconds)
    server.start()


def hanging(server: PrefectServer, seconds: float) -> None:
    """Connections are taken and never answered, then it goes on."""
    server.signal(signal.SIGSTOP)
    time.sleep(seconds)
    server.signal(signal.SIGCONT)


WAYS: tuple[Callable[[PrefectServer, float], None], ...] = (killed, hanging)


def go_away(server: PrefectServer, rng: random.Random) -> str:
    """Takes the server away for some seconds, in one of the `WAYS`; returns which."""
    way = rng.choice(WAYS)
    way(server, rng.uniform(*AWAY_S))
    return way.__name__
