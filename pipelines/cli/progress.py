"""What a person sees while a recipe runs: a live tree on a terminal, plain lines elsewhere.

`Board` holds the state of every stage; `ensure` tells it what changes through `watch`, and it reads the heartbeats of running
jobs itself. `render` turns that state into something to show and knows nothing of threads, files or terminals.

All times are those of this process's own clock (`time.monotonic`): a job may run on a machine whose clock is minutes apart.
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

from configs.language.graph import shown_name
from pipelines.cli.console import one_line, say
from pipelines.estimate.schedule import Forecast
from pipelines.jobs.context import MOVING, RunContext
from pipelines.quantities import counted, duration, number, reported, rough

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
"""A step that takes longer is told for how long it has been going on."""
ALARMING = 0.7
"""Share of the heartbeat time-out after which silence is called so."""
DONE = ("unchanged", "remote", "sent", "restored", "ran", "attached")
BEGUN = ("running", "waiting", "restored", "ran", "attached", "failed")
"""States of a stage with which a run has something to do."""
SAID = {
    "unchanged": "up to date",
    "remote": "done, its files are in the remote",
    "restored": "restored",
    "ran": "done",
    "attached": "done (job of an earlier run)",
    "skipped": "not run: a stage that it needs failed",
}
SHOWN_FIRST = ("loss", "reward", "score", "accuracy", "kl")
RATES = {"tokens_per_second": "tok/s", "requests_per_second": "req/s", "rows_per_second": "rows/s"}


@dataclass(frozen=True)
class StageView:
    """One stage as the display knows it."""

    name: str
    kind: str
    state: str = "pending"
    """A key of `ICONS`."""
    detail: str = ""
    """Why it waits, failed or runs again."""
    step: int = 0
    total: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    started: float | None = None
    """When it began to wait, and once it runs, when that began."""
    first_step: tuple[float, int] | None = None
    """(when it was seen, step) of the first heartbeat of this attempt that counted a step: the ETA is measured from here."""
    said: Mapping[str, object] = field(default_factory=dict)
    """The last heartbeat."""
    heard: float | None = None
    """When it was first seen, or when the job was begun to be looked at."""
    work: str = ""
    """What it does beside its steps: loading, tokenising, hashing."""
    seconds: float | None = None
    """How long it took, once it has ended, without the time that it waited for slots."""
    timeout: float | None = None
    """Seconds without a heartbeat after which its job is ended."""


def with_heartbeat(view: StageView, beat: Mapping[str, object], now: float) -> StageView:
    """The view after one more look at `progress.json`; a step that goes back means a new attempt, and a new base for the ETA."""
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
    """`hashing 12 of 100 GB`; empty where a job only counts its steps."""
    if not isinstance(doing, dict) or "what" not in doing:
        return ""
    done, of = float(doing.get("done") or 0), float(doing.get("of") or 0)
    shown = [number(done) if done == int(done) else f"{done:.1f}", f"of {number(of) if of == int(of) else f'{of:.1f}'}"] if of else []
    return " ".join([str(doing["what"]), *shown, *([str(doing["unit"])] if of and doing.get("unit") else [])])


def eta_seconds(view: StageView) -> float | None:
    """Time left at the mean speed since the first counted step; None while there is nothing to measure."""
    if view.first_step is None or view.heard is None or view.total <= 0:
        return None
    done = view.step - view.first_step[1]
    elapsed = view.heard - view.first_step[0]
    return elapsed / done * (view.total - view.step) if done > 0 and elapsed > 0 else None


def numbers_text(numbers: Mapping[str, float], most: int = 3) -> str:
    """The telling numbers of a heartbeat: loss or reward first, then a rate."""
    named = [key for key in SHOWN_FIRST if key in numbers]
    named += [key for key in numbers if key not in SHOWN_FIRST and key not in RATES]
    parts = [f"{key.replace('_', ' ')} {number(numbers[key])}" for key in named[:most]]
    parts += [f"{number(numbers[key])} {unit}" for key, unit in RATES.items() if key in numbers]
    return "  ".join(parts)


def doing(view: StageView, now: float) -> str:
    """One line on what a stage is doing."""
    if view.state == "running":
        if view.total <= 0 or view.step <= 0:
            words = view.work or view.detail or "starting"
            extra = numbers_text(view.numbers)
            return f"{words}  {extra}".rstrip()
        parts = [f"step {view.step}/{view.total}", numbers_text(view.numbers)]
        left = eta_seconds(view)
        parts.append(view.work or (f"{duration(left)} left" if left is not None else ""))
        parts.append(_silence(view, now))
        parts.append(view.detail)
        return "  ".join(part for part in parts if part)
    return view.detail or SAID.get(view.state, "")


def _silence(view: StageView, now: float) -> str:
    """How long the step has been going on, where it is a long one: a job says something after each. A warning where that may end it."""
    silent = now - view.heard if view.heard is not None else 0.0
    if view.timeout is not None and silent > ALARMING * view.timeout:
        return f"no heartbeat for {duration(silent)}, the job is ended after {duration(view.timeout)}"
    return f"{duration(silent)} into this step" if silent > LONG_STEP_S else ""


def time_left(view: StageView, whole: float | None, now: float) -> float | None:
    """Seconds that are left of a stage that runs; None for others, or where nobody knows."""
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
    """The tree of stages at one moment; where it is higher than the screen, finished and coming stages fold into a line each."""
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
    """The state of all stages of a run; safe to tell from several threads."""

    def __init__(
        self, title: str, stages: Iterable[tuple[str, str, str]], forecast: Forecast | None = None, jobs: Collection[str] = ()
    ) -> None:
        """
        Args:
            title: the recipe.
            stages: (address, shown name, kind) in the order of the graph.
            forecast: of the run.
            jobs: addresses of the stages that take time: others are there, or are restored.
        """
        self.title = title
        self._forecast, self._jobs, self._outlook = forecast, frozenset(jobs), (0.0, "")
        self._views = {address: StageView(name, kind) for address, name, kind in stages}
        self.note = ""
        """What is to be said of the run itself."""
        self._folders: dict[str, Path] = {}
        self._lock = threading.Lock()

    def tell(self, address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None:
        """A stage has come into a state; `folder` is the scratch folder of its job, where the heartbeat lies."""
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
        """Says for how long a stage's job may be silent."""
        self._views[address] = replace(self._views[address], timeout=timeout)

    def read_heartbeats(self) -> None:
        """Takes in what running jobs have written since the last look."""
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
        """How long the rest of the run takes: `about 14 minutes left`; empty before its first stage runs, and where nobody knows."""
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
        except Exception:  # it reads what runs are changing, and what others have made: none of it may end what is shown
            found = None
        text = f"{rough(found.seconds)} left" if found and due and found.how else ""
        self._outlook = now, text + (f", and {counted(found.unknown, 'stage')} of unknown time" if text and found and found.unknown else "")
        return self._outlook[1]


def watching(context: RunContext, addresses: Collection[str], jobs: Collection[str] = ()) -> Board:
    """The state of some stages of a run, which tells it what changes from now on.

    Args:
        context: of the run.
        addresses: of the stages.
        jobs: those whose jobs will run; the time left is theirs.
    """
    nodes = [node for node in context.graph.nodes.values() if node.address in addresses]
    stages = [(node.address, shown_name(context.graph, node), node.kind) for node in nodes]
    forecast = Forecast(context.project, context.graph, context.execution) if jobs else None
    board = Board(context.graph.recipe, stages, forecast, jobs)
    for node in nodes:
        board.allow(node.address, context.execution.of(node.kind, node.name)[1].heartbeat_timeout_s)
    context.watch = board.tell
    return board


def _heartbeat(folder: Path) -> dict[str, object] | None:
    try:
        beat = json.loads((folder / "progress.json").read_text())
    except (OSError, ValueError):  # not there yet, or of a job that is being replaced
        return None
    return beat if isinstance(beat, dict) and {"step", "total"} <= beat.keys() else None


class Display:
    """Shows a board until it is left: a live tree on a terminal, otherwise a line per change and one every 15 seconds."""

    def __init__(self, board: Board, stream: TextIO | None = None, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self.board = board
        self.stream = stream or sys.stdout
        self.console = Console(file=self.stream, highlight=False, soft_wrap=not self.stream.isatty())
        self.interval_s = interval_s
        self._live = Live(console=self.console, auto_refresh=False, transient=False) if self.console.is_terminal else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="display", daemon=True)
        self._last: dict[str, tuple[str, str]] = {}
        self._spoken: dict[str, float] = {}
        self._said = ""
        self._left = (0.0, "")
        """When the time left was told last, and how."""

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
                say(line, file=self.stream, flush=True)

    def lines(self, now: float) -> list[str]:
        """Plain lines that are due: every change of state, and running stages every `interval_s`."""
        due = []
        left, (told, words) = self.board.left(now), self._left
        if left and left != words and now - told >= 4 * self.interval_s:
            self._left = now, left
            due.append(f"{self.board.title}: {left}")
        if self.board.note != self._said:
            self._said = self.board.note
            due += [self._said] if self._said else []
        for address, view in self.board.views.items():
            state = (view.state, "" if view.state in MOVING else view.detail)
            changed = self._last.get(address, ("pending", "")) != state
            silent = now - self._spoken.get(address, 0.0)
            if not changed and not (view.state in ("running", *MOVING) and silent >= self.interval_s):
                continue
            self._last[address], self._spoken[address] = state, now
            if view.state in ("pending", "checking"):
                continue
            words = view.state if view.state in ("running", "waiting", *MOVING, "failed") and changed else ""
            body = "  ".join(part for part in (words, doing(view, now)) if part)
            spent = took(view, now)
            due.append(f"{ICONS[view.state][0]} {view.name:<18} {body}{f'  ({spent})' if spent else ''}")
        return due
