"""Progress display of a run: a live tree on a terminal, plain lines elsewhere; and a status line for other slow operations.

`Board` consumes the run's events and holds a row per stage. `render` is a pure function from these rows to a renderable.

All times are from this process's clock (`time.monotonic`), because a job may run on a machine whose clock is off by minutes.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pedigree.configs.language.graph import shown_name
from pedigree.data.store.hashing import Beat
from pedigree.pipelines.cli.console import discard, echo, one_line, redraws
from pedigree.pipelines.estimate.rates import Rates, known, measured
from pedigree.pipelines.estimate.schedule import Forecast
from pedigree.pipelines.jobs import events
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.quantities import counted, duration, number, rough, transferred

PLAIN_INTERVAL_S = 15.0
OUTLOOK_INTERVAL_S = 2.0

ICONS = {
    "pending": ("·", "dim"),
    "checking": ("?", "dim"),
    "waiting": ("◌", "yellow"),
    "running": ("●", "cyan"),
    "fetching": ("↓", "cyan"),
    "restoring": ("↓", "cyan"),
    "hashing": ("●", "cyan"),
    "sending": ("↑", "cyan"),
    "unchanged": ("✓", "green"),
    "remote": ("✓", "green"),
    "sent": ("✓", "green"),
    "restored": ("✓", "green"),
    "ran": ("✓", "green"),
    "attached": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "skipped": ("–", "dim"),
}
LONG_STEP_S = 30.0
"""After this time, the display shows how long the current step has taken."""
ALARMING = 0.7
"""Fraction of the heartbeat timeout after which the display warns about silence."""
DONE = ("unchanged", "remote", "sent", "restored", "ran", "attached")
BEGUN = ("running", "waiting", "restored", "ran", "attached", "failed")
"""States of stages that the run has started to work on."""
NOT_DONE = ("not_finished", "cancelled")
"""Causes that are not failures of the stage."""
STATE_TEXTS = {
    "unchanged": "up to date",
    "remote": "done; files are in the remote",
    "restored": "restored",
    "ran": "done",
    "attached": "done (job of an earlier run)",
    "skipped": "not run: an upstream stage failed",
}
SHOWN_FIRST = ("loss", "reward", "score", "accuracy", "kl")
RATES = {"tokens_per_second": "tok/s", "requests_per_second": "req/s", "rows_per_second": "rows/s"}


@dataclass(frozen=True)
class Row(events.StageView):
    """A stage on the board: its state, and when this process saw what."""

    name: str = ""
    timeout: float | None = None
    """Seconds without a heartbeat before the job is terminated."""
    started: float | None = None
    """When it started to run or, before that, to wait."""
    first_step: tuple[float, int] | None = None
    """(time, step) of this attempt's first heartbeat with a step; baseline of the ETA."""
    last_heartbeat: float | None = None
    """When the last heartbeat arrived, or when observation of the job started."""

    def at(self, event: events.StageEvent, now: float) -> "Row":
        """The row after an event. A decreasing step means a new attempt and resets the baseline of the ETA."""
        row, has_run = self.after(event), self.folder is not None
        row = replace(
            row, state="skipped" if row.cause in NOT_DONE else row.state, detail=one_line(row.detail.partition("\n")[0].removesuffix(":"))
        )
        match event:
            case events.StageProgressed(step=step):
                base = self.first_step
                if base is None or step < base[1]:
                    base = (now, step) if step > 0 else None
                return replace(row, last_heartbeat=now, first_step=base)
            case events.StageStarted():
                return replace(row, last_heartbeat=now, started=self.started if has_run else now)
            case events.StageWaiting() | events.StageBusy(activity="fetching" | "restoring" | "hashing" | "sending"):
                return replace(row, started=now if self.started is None else self.started)
            case events.StageEnded() if self.started is not None and event.outcome != "skipped" and (event.seconds is None or has_run):
                return replace(row, seconds=now - self.started)
        return row


def eta_seconds(row: Row) -> float | None:
    """Remaining seconds at the mean speed since the first reported step; None if there is nothing to measure yet."""
    beat = row.progress
    if row.first_step is None or row.last_heartbeat is None or beat.total <= 0:
        return None
    done = beat.step - row.first_step[1]
    elapsed = row.last_heartbeat - row.first_step[0]
    return elapsed / done * (beat.total - beat.step) if done > 0 and elapsed > 0 else None


def numbers_text(numbers: Mapping[str, float]) -> str:
    """Format the key metrics of a heartbeat: loss or reward first, then throughput."""
    named = [key for key in SHOWN_FIRST if key in numbers]
    named += [key for key in numbers if key not in SHOWN_FIRST and key not in RATES]
    parts = [f"{key.replace('_', ' ')} {number(numbers[key])}" for key in named[:3]]
    parts += [f"{number(numbers[key])} {unit}" for key, unit in RATES.items() if key in numbers]
    return "  ".join(parts)


def doing(row: Row, now: float) -> str:
    """Describe on one line what a stage is doing."""
    beat = row.progress
    if row.state == "running":
        if beat.total <= 0 or beat.step <= 0:
            activity = beat.work or row.detail or "starting"
            return f"{activity}  {numbers_text(beat.numbers)}".rstrip()
        parts = [f"step {beat.step}/{beat.total}", numbers_text(beat.numbers)]
        left = eta_seconds(row)
        parts.append(beat.work or (f"{duration(left)} left" if left is not None else ""))
        parts.append(_silence(row, now))
        parts.append(row.detail)
        return "  ".join(part for part in parts if part)
    return row.detail or STATE_TEXTS.get(row.state, "")


def _silence(row: Row, now: float) -> str:
    """Report how long a slow step has taken, since jobs send a heartbeat per step; warn if the timeout is near."""
    silent = now - row.last_heartbeat if row.last_heartbeat is not None else 0.0
    if row.timeout is not None and silent > ALARMING * row.timeout:
        return f"no heartbeat for {duration(silent)}; the job is terminated after {duration(row.timeout)}"
    return f"{duration(silent)} into this step" if silent > LONG_STEP_S else ""


def time_left(row: Row, whole: float | None, now: float) -> float | None:
    """Remaining seconds of a running stage; None if it is not running or the time is unknown."""
    if row.state != "running" or row.started is None:
        return None
    measured = eta_seconds(row)
    if measured is not None and row.last_heartbeat is not None:
        return max(0.0, measured - (now - row.last_heartbeat))
    return max(0.0, whole - (now - row.started)) if whole is not None else None


def took(row: Row, now: float) -> str:
    if row.seconds is not None:
        return duration(row.seconds) if row.seconds >= 0.5 else ""
    return duration(now - row.started) if row.started is not None and row.state in ("running", "waiting", *events.MOVING) else ""


def render(title: str, rows: Sequence[Row], now: float, note: str = "", height: int = 50, left: str = "") -> RenderableType:
    """Render the tree of stages; if it exceeds the screen height, finished and pending stages collapse into one line each."""
    table = Table.grid(padding=(0, 2), expand=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    done = [row for row in rows if row.state in DONE]
    coming = [row for row in rows if row.state == "pending"]
    fold_done = len(rows) + 2 > height
    fold_coming = fold_done and len(rows) - len(done) + 3 > height
    if fold_done and done:
        table.add_row(Text("✓", "green"), Text(f"{len(done)} stages"), Text("done", "dim"), Text(""))
    for row in rows:
        if not (fold_done and row.state in DONE) and not (fold_coming and row.state == "pending"):
            table.add_row(*_cells(row, now))
    if fold_coming and coming:
        table.add_row(Text("·", "dim"), Text(f"{len(coming)} stages", "dim"), Text("to come", "dim"), Text(""))
    head = Text.assemble(
        (f"{title}  {len(done)}/{len(rows)} stages", "bold"), f"  {left}" if left else "", (f"  {note}" if note else "", "dim")
    )
    return Group(head, table)


def _cells(row: Row, now: float) -> tuple[Text, Text, Text, Text]:
    icon, style = ICONS[row.state]
    tone = "red" if row.state == "failed" else "dim" if row.state in ("pending", "skipped", "unchanged", "remote") else ""
    return Text(icon, style), Text(row.name, tone), Text(doing(row, now), tone or "default"), Text(took(row, now), "dim")


class Board:
    """State of all stages of a run; thread-safe."""

    def __init__(self, title: str, rows: Mapping[str, Row], forecast: Forecast | None = None, jobs: Collection[str] = ()) -> None:
        """`rows`: address → row, in graph order; `jobs`: addresses of the stages that run a job, the others are up to date or restored."""
        self.title = title
        self._forecast, self._jobs, self._outlook = forecast, frozenset(jobs), (0.0, "")
        self._rows = dict(rows)
        self.note = ""
        """Message about the run as a whole."""
        self._lock = threading.Lock()

    def update(self, event: events.RunEvent) -> None:
        """Consume an event of the run."""
        with self._lock:
            if isinstance(event, events.Notice):
                self.note = event.text if event.urgent else self.note
            elif not isinstance(event, events.RunEnded) and event.address in self._rows:
                self._rows[event.address] = self._rows[event.address].at(event, time.monotonic())

    @property
    def rows(self) -> Mapping[str, Row]:
        with self._lock:
            return dict(self._rows)

    def left(self, now: float) -> str:
        """Format the remaining time: `about 14 minutes left`; empty before the first stage runs or if unknown."""
        looked, text = self._outlook
        if self._forecast is None or now - looked < OUTLOOK_INTERVAL_S:
            return text
        rows = self.rows
        ended = frozenset(address for address, row in rows.items() if row.state in (*DONE, "failed", "skipped"))
        due = self._jobs - ended
        if not any(row.state in BEGUN for row in rows.values()):
            return ""
        try:
            found = self._forecast.left(ended, due, lambda address, whole: time_left(rows[address], whole, now))
        except Exception:  # it reads files that other processes change; no error there may stop the display
            found = None
        text = f"{rough(found.seconds)} left" if found and due and found.how else ""
        if text and found and found.unknown:
            text += f", plus {counted(found.unknown, 'stage')} with no time estimate"
        self._outlook = now, text
        return self._outlook[1]


def watching(context: RunContext, addresses: Collection[str], jobs: Collection[str] = ()) -> Board:
    """Create a board for some stages of a run and subscribe it to the run's changes. `jobs` are the stages that run a job; they determine
    the remaining time.
    """
    rows = {}
    for node in context.graph.nodes.values():
        if node.address in addresses:
            placement = context.execution.of(node.kind, node.name)[1]
            rows[node.address] = Row(name=shown_name(context.graph, node), timeout=placement.heartbeat_timeout_s)
    forecast = Forecast(context.project, context.graph, context.execution) if jobs else None
    board = Board(context.graph.recipe, rows, forecast, jobs)
    context.watch = board.update
    return board


class Display:
    """Context manager that displays a board: a live tree on a terminal, else a line per change and every 15 seconds."""

    def __init__(self, board: Board, stream: TextIO | None = None, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self.board = board
        self.stream = stream or sys.stdout
        self.console = Console(file=self.stream, highlight=False, soft_wrap=not self.stream.isatty())
        self.interval_s = interval_s
        self._live = Live(console=self.console, get_renderable=self._tree, transient=False) if redraws(self.console) else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._print_until_ended, name="display", daemon=True)
        self._last: dict[str, tuple[str, str]] = {}
        self._printed: dict[str, float] = {}
        self._last_note = ""
        self._left = (0.0, "")
        """Time and text of the last remaining-time line."""

    def __enter__(self) -> "Display":
        (self._live or self._thread).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        else:
            self._stop.set()
            self._thread.join(timeout=5)
            self._print()

    def _tree(self) -> RenderableType:
        now, board = time.monotonic(), self.board
        return render(board.title, list(board.rows.values()), now, board.note, self.console.height, board.left(now))

    def _print_until_ended(self) -> None:
        while not self._stop.wait(min(1.0, self.interval_s)):
            self._print()

    def _print(self) -> None:
        try:
            for line in self.lines(time.monotonic()):
                echo(line, file=self.stream, flush=True)
        except OSError as error:
            discard(self.stream, error)

    def lines(self, now: float) -> list[str]:
        """Return the plain lines that are due: each state change, and running stages every `interval_s` seconds."""
        due = []
        rows = self.board.rows  # before the forecast, which can take seconds: a row that changes meanwhile is newer than `now`
        left, (printed, last) = self.board.left(now), self._left
        if left and left != last and now - printed >= 4 * self.interval_s:
            self._left = now, left
            due.append(f"{self.board.title}: {left}")
        if self.board.note != self._last_note:
            self._last_note = self.board.note
            due += [self._last_note] if self._last_note else []
        for address, row in rows.items():
            state = (row.state, "" if row.state in events.MOVING else row.detail)
            changed = self._last.get(address, ("pending", "")) != state
            silent = now - self._printed.get(address, 0.0)
            if not changed and not (row.state in ("running", *events.MOVING) and silent >= self.interval_s):
                continue
            self._last[address], self._printed[address] = state, now
            if row.state in ("pending", "checking"):
                continue
            change = row.state if row.state in ("running", "waiting", *events.MOVING, "failed") and changed else ""
            body = "  ".join(part for part in (change, doing(row, now)) if part)
            spent = took(row, now)
            due.append(f"{ICONS[row.state][0]} {row.name:<18} {body}{f'  ({spent})' if spent else ''}")
        return due


class StatusLine:
    """On stderr, so that stdout has only the command's result: a transient line on a terminal, elsewhere one every 15 seconds at most."""

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

    def watch(self, event: events.RunEvent) -> None:
        """Show file operations of a stage."""
        if isinstance(event, events.StageBusy) and event.activity in events.MOVING:
            self(f"{event.address}: {event.activity} {event.detail}")

    def far(self, what: str) -> Beat:
        """Return a callback that shows the bytes done of an operation."""
        return lambda done, total: self(f"{what} {transferred(done, total)}")

    def _start(self) -> None:
        console = Console(file=self.stream, highlight=False)
        if redraws(console):  # must not capture the command's own output
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
