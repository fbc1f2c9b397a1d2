"""Progress display of a run: a live tree on a terminal, plain lines elsewhere.

`Board` holds the state of every stage; `ensure` reports changes to it through `watch`, and it reads the heartbeats of running jobs.
`render` is a pure function from that state to a renderable.

All times are from this process's clock (`time.monotonic`), because a job may run on a machine whose clock is off by minutes.
"""

import json
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pedigree.configs.language.graph import shown_name
from pedigree.pipelines.cli.console import echo, one_line
from pedigree.pipelines.estimate.schedule import Forecast
from pedigree.pipelines.jobs.context import MOVING, RunContext
from pedigree.pipelines.quantities import counted, duration, number, reported, rough

PLAIN_INTERVAL_S = 15.0
OUTLOOK_INTERVAL_S = 2.0
REFRESH_INTERVAL_S = 0.25

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
class StageView:
    """Displayed state of one stage."""

    name: str
    kind: str
    state: str = "pending"
    """A key of `ICONS`."""
    detail: str = ""
    """Why it waits, failed or re-runs."""
    step: int = 0
    total: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    started: float | None = None
    """When it started to run or, before that, to wait."""
    first_step: tuple[float, int] | None = None
    """(time, step) of this attempt's first heartbeat with a step; baseline of the ETA."""
    said: Mapping[str, object] = field(default_factory=dict)
    """The last heartbeat."""
    heard: float | None = None
    """When the last heartbeat was first seen, or when observation of the job started."""
    work: str = ""
    """Work outside the training steps: loading, tokenizing, hashing."""
    seconds: float | None = None
    """Duration once ended, excluding the wait for slots."""
    timeout: float | None = None
    """Seconds without a heartbeat before the job is terminated."""


def with_heartbeat(view: StageView, beat: Mapping[str, object], now: float) -> StageView:
    """Update a view from `progress.json`; a decreasing step means a new attempt and resets the ETA baseline."""
    if beat == view.said:
        return view
    step, total = int(str(beat["step"])), int(str(beat["total"]))
    base = view.first_step
    if base is not None and step < base[1]:
        base = None
    if base is None and step > 0:
        base = (now, step)
    numbers, work = reported(beat.get("numbers")), work_text(beat.get("doing"))
    return replace(view, step=step, total=total, numbers=numbers, first_step=base, said=beat, heard=now, work=work)


def work_text(doing: object) -> str:
    """Format other work: `hashing 12 of 100 GB`; empty if the job only reports steps."""
    if not isinstance(doing, dict) or "what" not in doing:
        return ""
    done, of = float(doing.get("done") or 0), float(doing.get("of") or 0)
    shown = [number(done) if done == int(done) else f"{done:.1f}", f"of {number(of) if of == int(of) else f'{of:.1f}'}"] if of else []
    return " ".join([str(doing["what"]), *shown, *([str(doing["unit"])] if of and doing.get("unit") else [])])


def eta_seconds(view: StageView) -> float | None:
    """Remaining seconds at the mean speed since the first reported step; None if there is nothing to measure yet."""
    if view.first_step is None or view.heard is None or view.total <= 0:
        return None
    done = view.step - view.first_step[1]
    elapsed = view.heard - view.first_step[0]
    return elapsed / done * (view.total - view.step) if done > 0 and elapsed > 0 else None


def numbers_text(numbers: Mapping[str, float], most: int = 3) -> str:
    """Format the key metrics of a heartbeat: loss or reward first, then throughput."""
    named = [key for key in SHOWN_FIRST if key in numbers]
    named += [key for key in numbers if key not in SHOWN_FIRST and key not in RATES]
    parts = [f"{key.replace('_', ' ')} {number(numbers[key])}" for key in named[:most]]
    parts += [f"{number(numbers[key])} {unit}" for key, unit in RATES.items() if key in numbers]
    return "  ".join(parts)


def doing(view: StageView, now: float) -> str:
    """Describe on one line what a stage is doing."""
    if view.state == "running":
        if view.total <= 0 or view.step <= 0:
            activity = view.work or view.detail or "starting"
            extra = numbers_text(view.numbers)
            return f"{activity}  {extra}".rstrip()
        parts = [f"step {view.step}/{view.total}", numbers_text(view.numbers)]
        left = eta_seconds(view)
        parts.append(view.work or (f"{duration(left)} left" if left is not None else ""))
        parts.append(_silence(view, now))
        parts.append(view.detail)
        return "  ".join(part for part in parts if part)
    return view.detail or STATE_TEXTS.get(view.state, "")


def _silence(view: StageView, now: float) -> str:
    """Report how long a slow step has taken, since jobs send a heartbeat per step; warn if the timeout is near."""
    silent = now - view.heard if view.heard is not None else 0.0
    if view.timeout is not None and silent > ALARMING * view.timeout:
        return f"no heartbeat for {duration(silent)}; the job is terminated after {duration(view.timeout)}"
    return f"{duration(silent)} into this step" if silent > LONG_STEP_S else ""


def time_left(view: StageView, whole: float | None, now: float) -> float | None:
    """Remaining seconds of a running stage; None if it is not running or the time is unknown."""
    if view.state != "running" or view.started is None:
        return None
    measured = eta_seconds(view)
    if measured is not None and view.heard is not None:
        return max(0.0, measured - (now - view.heard))
    return max(0.0, whole - (now - view.started)) if whole is not None else None


def took(view: StageView, now: float) -> str:
    if view.seconds is not None:
        return duration(view.seconds) if view.seconds >= 0.5 else ""
    return duration(now - view.started) if view.started is not None and view.state in ("running", "waiting", *MOVING) else ""


def render(title: str, views: Sequence[StageView], now: float, note: str = "", height: int = 50, left: str = "") -> RenderableType:
    """Render the tree of stages; if it exceeds the screen height, finished and pending stages collapse into one line each."""
    table = Table.grid(padding=(0, 2), expand=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    done = [view for view in views if view.state in DONE]
    coming = [view for view in views if view.state == "pending"]
    fold_done = len(views) + 2 > height
    fold_coming = fold_done and len(views) - len(done) + 3 > height
    if fold_done and done:
        table.add_row(Text("✓", "green"), Text(f"{len(done)} stages"), Text("done", "dim"), Text(""))
    for view in views:
        if not (fold_done and view.state in DONE) and not (fold_coming and view.state == "pending"):
            table.add_row(*_cells(view, now))
    if fold_coming and coming:
        table.add_row(Text("·", "dim"), Text(f"{len(coming)} stages", "dim"), Text("to come", "dim"), Text(""))
    head = Text.assemble(
        (f"{title}  {len(done)}/{len(views)} stages", "bold"), f"  {left}" if left else "", (f"  {note}" if note else "", "dim")
    )
    return Group(head, table)


def _cells(view: StageView, now: float) -> tuple[Text, Text, Text, Text]:
    icon, style = ICONS[view.state]
    tone = "red" if view.state == "failed" else "dim" if view.state in ("pending", "skipped", "unchanged", "remote") else ""
    return Text(icon, style), Text(view.name, tone), Text(doing(view, now), tone or "default"), Text(took(view, now), "dim")


class Board:
    """State of all stages of a run; thread-safe."""

    def __init__(
        self, title: str, stages: Iterable[tuple[str, str, str]], forecast: Forecast | None = None, jobs: Collection[str] = ()
    ) -> None:
        """
        Args:
            title: name of the recipe.
            stages: (address, display name, kind) in graph order.
            forecast: time forecast of the run.
            jobs: addresses of the stages that run a job; others are up to date or restored.
        """
        self.title = title
        self._forecast, self._jobs, self._outlook = forecast, frozenset(jobs), (0.0, "")
        self._views = {address: StageView(name, kind) for address, name, kind in stages}
        self.note = ""
        """Message about the run as a whole."""
        self._folders: dict[str, Path] = {}
        self._lock = threading.Lock()

    def update(self, address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None:
        """Set the state of a stage; `folder` is its job's scratch folder, which holds the heartbeat."""
        with self._lock:
            view = self._views.get(address)
            if view is None:
                return
            now, has_run = time.monotonic(), address in self._folders
            if state in ("running", "waiting", *MOVING) and (view.started is None or (state == "running" and not has_run)):
                view = replace(view, started=now)
            if folder is not None:
                self._folders[address] = folder
                view = replace(view, heard=now)
            if view.started is not None and state in (*DONE, "failed") and (seconds is None or has_run):
                seconds = now - view.started
            self._views[address] = replace(view, state=state, detail=one_line(detail), seconds=seconds)

    def allow(self, address: str, timeout: float) -> None:
        """Set the heartbeat timeout of a stage's job, in seconds."""
        self._views[address] = replace(self._views[address], timeout=timeout)

    def read_heartbeats(self) -> None:
        """Update the views of running jobs from their heartbeats."""
        with self._lock:
            running = [(address, self._folders[address]) for address, view in self._views.items()
                       if view.state == "running" and address in self._folders]  # fmt: skip
        for address, folder in running:
            beat = _heartbeat(folder)
            if beat is not None:
                with self._lock:
                    self._views[address] = with_heartbeat(self._views[address], beat, time.monotonic())

    @property
    def views(self) -> Mapping[str, StageView]:
        with self._lock:
            return dict(self._views)

    def left(self, now: float) -> str:
        """Format the remaining time: `about 14 minutes left`; empty before the first stage runs or if unknown."""
        looked, text = self._outlook
        if self._forecast is None or now - looked < OUTLOOK_INTERVAL_S:
            return text
        views = self.views
        ended = frozenset(address for address, view in views.items() if view.state in (*DONE, "failed", "skipped"))
        due = self._jobs - ended
        if not any(view.state in BEGUN for view in views.values()):
            return ""
        try:
            found = self._forecast.left(ended, due, lambda address, whole: time_left(views[address], whole, now))
        except Exception:  # it reads files that other processes change; no error there may stop the display
            found = None
        text = f"{rough(found.seconds)} left" if found and due and found.how else ""
        if text and found and found.unknown:
            text += f", plus {counted(found.unknown, 'stage')} with no time estimate"
        self._outlook = now, text
        return self._outlook[1]


def watching(context: RunContext, addresses: Collection[str], jobs: Collection[str] = ()) -> Board:
    """Create a board for some stages of a run and subscribe it to the run's changes.

    Args:
        context: the run.
        addresses: the stages to show.
        jobs: stages that run a job; they determine the remaining time.
    """
    nodes = [node for node in context.graph.nodes.values() if node.address in addresses]
    stages = [(node.address, shown_name(context.graph, node), node.kind) for node in nodes]
    forecast = Forecast(context.project, context.graph, context.execution) if jobs else None
    board = Board(context.graph.recipe, stages, forecast, jobs)
    for node in nodes:
        board.allow(node.address, context.execution.of(node.kind, node.name)[1].heartbeat_timeout_s)
    context.watch = board.update
    return board


def _heartbeat(folder: Path) -> dict[str, object] | None:
    try:
        beat = json.loads((folder / "progress.json").read_text())
    except (OSError, ValueError):  # not written yet, or being replaced by a new attempt
        return None
    return beat if isinstance(beat, dict) and {"step", "total"} <= beat.keys() else None


class Display:
    """Context manager that displays a board: a live tree on a terminal, else a line per change and every 15 seconds."""

    def __init__(self, board: Board, stream: TextIO | None = None, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self.board = board
        self.stream = stream or sys.stdout
        self.console = Console(file=self.stream, highlight=False, soft_wrap=not self.stream.isatty())
        self.interval_s = interval_s
        self._live = Live(console=self.console, auto_refresh=False, transient=False) if self.console.is_terminal else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="display", daemon=True)
        self._last: dict[str, tuple[str, str]] = {}
        self._printed: dict[str, float] = {}
        self._last_note = ""
        self._left = (0.0, "")
        """Time and text of the last remaining-time line."""

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        try:
            self._show()
        finally:
            if self._live:
                self._live.stop()

    def _loop(self) -> None:
        while not self._stop.wait(REFRESH_INTERVAL_S if self._live else min(1.0, self.interval_s)):
            self._show()

    def _show(self) -> None:
        self.board.read_heartbeats()
        if self._live:
            views = list(self.board.views.values())
            now = time.monotonic()
            tree = render(self.board.title, views, now, self.board.note, self.console.height, self.board.left(now))
            self._live.update(tree, refresh=True)
        else:
            for line in self.lines(time.monotonic()):
                echo(line, file=self.stream, flush=True)

    def lines(self, now: float) -> list[str]:
        """Return the plain lines that are due: each state change, and running stages every `interval_s` seconds."""
        due = []
        left, (printed, last) = self.board.left(now), self._left
        if left and left != last and now - printed >= 4 * self.interval_s:
            self._left = now, left
            due.append(f"{self.board.title}: {left}")
        if self.board.note != self._last_note:
            self._last_note = self.board.note
            due += [self._last_note] if self._last_note else []
        for address, view in self.board.views.items():
            state = (view.state, "" if view.state in MOVING else view.detail)
            changed = self._last.get(address, ("pending", "")) != state
            silent = now - self._printed.get(address, 0.0)
            if not changed and not (view.state in ("running", *MOVING) and silent >= self.interval_s):
                continue
            self._last[address], self._printed[address] = state, now
            if view.state in ("pending", "checking"):
                continue
            change = view.state if view.state in ("running", "waiting", *MOVING, "failed") and changed else ""
            body = "  ".join(part for part in (change, doing(view, now)) if part)
            spent = took(view, now)
            due.append(f"{ICONS[view.state][0]} {view.name:<18} {body}{f'  ({spent})' if spent else ''}")
        return due
