"""Status line for slow operations; on stderr, so that stdout has only the command's result."""

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from pedigree.data.store.hashing import Beat
from pedigree.pipelines.cli.console import echo, one_line
from pedigree.pipelines.cli.progress import PLAIN_INTERVAL_S
from pedigree.pipelines.estimate.rates import Rates, known, measured
from pedigree.pipelines.jobs.events import MOVING, RunEvent, StageBusy
from pedigree.pipelines.quantities import transferred


class StatusLine:
    """A transient status line on a terminal; elsewhere at most one line every 15 seconds, and none for faster operations."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self.stream = stream or sys.stderr
        self.interval_s = interval_s
        self._words = ""
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._starting = threading.Lock()

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def __call__(self, words: str) -> None:
        """Set the status text; thread-safe."""
        self._words = words
        with self._starting:
            if self._live is None and self._thread is None:
                self._start()

    def watch(self, event: RunEvent) -> None:
        """Show file operations of a stage."""
        if isinstance(event, StageBusy) and event.activity in MOVING:
            self(f"{event.address}: {event.activity} {event.detail}")

    def far(self, what: str) -> Beat:
        """Return a callback that shows the bytes done of an operation."""
        return lambda done, total: self(f"{what} {transferred(done, total)}")

    def _start(self) -> None:
        console = Console(file=self.stream, highlight=False)
        if console.is_terminal:  # must not capture the command's own output
            self._live = Live(console=console, get_renderable=self._shown, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._speak, daemon=True, name="telling")
            self._thread.start()

    def _shown(self) -> RenderableType:
        self._spinner.update(text=Text(one_line(self._words)))
        return self._spinner

    def _speak(self) -> None:
        printed = ""
        while not self._ended.wait(self.interval_s):
            if self._words != printed:
                printed = self._words
                echo(printed, file=self.stream, flush=True)


def measured_by(telling: StatusLine) -> Callable[[], Rates | None]:
    """Return a function that measures the speed of this machine's cores, with a status message if it is not cached."""

    def rates() -> Rates | None:
        if known() is None:
            telling("measuring this machine's matmul speed once; takes a few seconds")
        return measured()

    return rates
