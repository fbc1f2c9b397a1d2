"""A Prefect server of one's own, which may be killed and come back: for `tests/chaos.py` and for the tests of the flow."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from free_ports import free_ports
from waiting import deadline, until

PREFECT = str(Path(sys.executable).parent / "prefect")
START_S = 300.0


MENDED = Path(__file__).parent / "prefect_server"


class PrefectServer:
    """A server of one's own on loopback, its database on disk."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}/api"
        folder.mkdir(parents=True, exist_ok=True)
        quiet = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        path = os.pathsep.join(filter(None, [str(MENDED), os.environ.get("PYTHONPATH")]))
        self._own = {**os.environ, **quiet, "PREFECT_HOME": str(folder), "PYTHONFAULTHANDLER": "1", "PYTHONPATH": path}
        self.log = folder / "server.log"
        self.environment = quiet | {"PREFECT_HOME": str(folder), "PREFECT_API_URL": self.url, "PEDIGREE_PREFECT": "auto"}
        """What a run needs in its environment to be shown here."""
        self.start()

    def start(self) -> None:
        """Also after `kill`; returns when it answers."""
        command = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._own, stdout=log, stderr=log, start_new_session=True)
        until(self.healthy, START_S, alive=lambda: self.process.poll() is None)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=deadline(5)) as answer:
                return answer.status == 200
        except OSError:
            return False

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(deadline(30))

    def stacks(self) -> str:
        """Ends a server that hangs; returns where its threads stood."""
        self.signal(signal.SIGABRT)
        self.process.wait()
        return self.log.read_text(errors="replace")[-20_000:]

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        self.process.wait(deadline(30))
