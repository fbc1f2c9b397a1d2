"""What a command tells while it reads for long: on stderr, so that its result stays alone on stdout."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from data.store.hashing import Beat
from pipelines.cli.console import one_line, say
from pipelines.cli.progress import PLAIN_INTERVAL_S
from pipelines.estimate.rates import Rates, known, measured
from pipelines.jobs.context import MOVING
from pipelines.quantities import transferred


class Telling:
    """One line that changes on a terminal and goes away; elsewhere a line every 15 seconds, and none of what takes less."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self.stream = stream or sys.stderr
        self.interval_s = interval_s
        self._words = ""
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._starting = threading.Lock()

    def __enter__(self) -> "Telling":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def __call__(self, words: str) -> None:
        """What is being done now; from any thread."""
        self._words = words
        with self._starting:
            if self._live is None and self._thread is None:
                self._start()

    def watch(self, address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None:
        """As `Watch`: tells what happens to the files of a stage."""
        if state in MOVING:
            self(f"{address}: {state} {detail}")

    def far(self, what: str) -> Beat:
        """Tells how many bytes something has done."""
        return lambda done, total: self(f"{what} {transferred(done, total)}")

    def _start(self) -> None:
        console = Console(file=self.stream, highlight=False)
        if console.is_terminal:  # what the command prints meanwhile is its result, and none of ours
            self._live = Live(console=console, get_renderable=self._shown, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._speak, daemon=True, name="telling")
            self._thread.start()

    def _shown(self) -> RenderableType:
        self._spinner.update(text=Text(one_line(self._words)))
        return self._spinner

    def _speak(self) -> None:
        said = ""
        while not self._ended.wait(self.interval_s):
            if self._words != said:
                said = self._words
                say(said, file=self.stream, flush=True)


def measured_by(telling: Telling) -> Callable[[], Rates | None]:
    """How fast this machine's cores are; where that has to be measured it says so."""

    def rates() -> Rates | None:
        if known() is None:
            telling("measuring this machine's matmul speed, once: a few seconds")
        return measured()

    return rates
