"""Mirror a run to Prefect without depending on it: `run_graph` does the work, and an observer thread reports progress.

The run never waits for Prefect, not even for its import. The observer thread makes every call; a call that fails or hangs is retried
later with the state at that time. A cancellation in Prefect arrives through `RunContext.cancelled`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from pedigree.configs.base.problems import PedigreeError
from pedigree.pipelines.jobs.context import MOVING, RunContext, StageFailed
from pedigree.pipelines.run.runs import StageEnd, run_graph

HOW_TO_PREFECT = "Run `prefect server start`, then `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
TICK_S = 1.0
"""Interval between looks at logs and progress."""
CANCEL_POLL_S = 5.0
SWEEP_S = 3.0
"""Interval between sweeps of other runs, whose heartbeats are followed where they run on other machines."""
AWAY_S = 5.0
"""Pause before retrying an unavailable audience."""
AWAY_AFTER = 2
"""Consecutive failures before the user is notified: a busy server rejects a call now and then."""
END_S, END_ATTEMPTS = 15.0, 2
"""Seconds and attempts that a finished run waits for its end to be reported."""
NOTES = 1000
"""Notes buffered while the audience is unavailable; older ones are dropped."""


@dataclass(frozen=True)
class StageView:
    """The state of a stage as shown to an audience."""

    state: str = "pending"
    """A state of `Watch`, or `pending`, `skipped` or `cancelled`."""
    detail: str = ""
    folder: Path | None = None
    """Scratch folder of its job, also after the job has ended."""
    seconds: float | None = None

    @property
    def live(self) -> bool:
        return self.state == "running" and self.folder is not None


@dataclass(frozen=True)
class Note:
    """A line for the log of a stage: why it waits, or is retried."""

    when: datetime
    address: str
    text: str


End = tuple[Literal["completed", "failed", "cancelled", "crashed"], str]
"""How a run ended, and why."""


class AudienceReset(Exception):
    """The audience has lost its record of this run; everything must be reported again from the beginning."""


Connect = Callable[[Collection[str]], AbstractContextManager["Audience"]]
"""Opens a connection to an audience for the stages with these addresses."""


class Audience(Protocol):
    """Receives a run's progress. Any call but `keep` may raise any exception and may block; every call can be repeated."""

    def begin(self) -> None:
        """Register the run, once."""
        ...

    def keep(self, views: dict[str, StageView], end: End | None) -> None:
        """Immediately record on this machine what must survive this process: the folders of live jobs, and the end."""
        ...

    def update(self, address: str, view: StageView) -> None:
        """Report a stage's new state."""
        ...

    def note(self, note: Note) -> None: ...

    def follow(self, address: str, folder: Path) -> None:
        """Forward the log and progress of a live job."""
        ...

    def cancelling(self) -> bool:
        """Whether the audience requests cancellation of the run.

        Raises:
            AudienceReset: the audience has no record of this run.
        """
        ...

    def sweep(self) -> None:
        """Report the end of other runs that can no longer do so themselves."""
        ...

    def end(self, end: End) -> None: ...


def run_observed(
    run: RunContext,
    connect: Connect,
    say: Callable[[str], None],
    selection: Collection[str] | None = None,
    forced: Collection[str] = (),
    *,
    required: bool = False,
) -> list[StageEnd]:
    """`run_graph`, with progress reported to an audience.

    Args:
        run: the run; its `watch` is called as well.
        connect: opens the audience; called and used in the observer's thread, and called again after a failure.
        say: receives a message when the audience goes away or comes back.
        selection: addresses of the stages; all when None.
        forced: addresses of stages that run even if current.
        required: refuse to start before the audience answers.

    Raises:
        PedigreeError: an audience is required and does not answer.
    """
    chosen = [address for address in run.graph.nodes if selection is None or address in selection]
    with Observer(run, chosen, connect, say) as observer:
        if required:
            observer.wait_for_answer()
        ends = run_graph(run, selection, forced)
        observer.finish(ends)
    return ends


class Observer:
    """Relays a run to its audience for the duration of the block."""

    def __init__(self, run: RunContext, addresses: Collection[str], connect: Connect, say: Callable[[str], None]) -> None:
        self.run, self._connect, self._message = run, connect, say
        self._watch, run.watch = run.watch, self._on_change
        self.cancelled = False
        """Whether the audience has canceled the run."""
        self._audience: Audience | None = None
        self._away, self._failures = "", 0
        self._views = {address: StageView() for address in addresses}
        self._reported: dict[str, StageView] = {}
        self._notes: deque[Note] = deque(maxlen=NOTES)
        self._end: End | None = None
        self._asked = self._swept = time.monotonic()
        self._changing, self._due, self._answered = threading.Lock(), threading.Event(), threading.Event()
        self._ending, self._over = threading.Event(), threading.Event()
        self._end_reported = False
        self._thread = threading.Thread(target=self._loop, name="observer", daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._over.is_set():
            interrupted = not isinstance(error, Exception)
            kept = "its jobs keep running" if self.run.keep_jobs else "its jobs are stopped, finished stages and checkpoints are kept"
            self._close(("cancelled", f"interrupted; {kept}") if interrupted else ("crashed", f"{type(error).__name__}: {error}"))
        self.run.watch = self._watch

    def wait_for_answer(self) -> None:
        """Wait until the run is registered with the audience.

        Raises:
            PedigreeError: registration failed.
        """
        self._answered.wait()
        if self._away:
            self._over.set()
            raise PedigreeError(f"--prefect always: {self._away}. Nothing was run. {HOW_TO_PREFECT}; or omit the option")

    def finish(self, ends: Sequence[StageEnd]) -> None:
        """Report how the run ended."""
        for end in ends:
            if isinstance(end, StageFailed):
                state = "cancelled" if end.cause == "cancelled" else "failed"
                self._change(end.address, replace(self._views[end.address], state=state, detail=end.message))
        failed = [end for end in ends if isinstance(end, StageFailed)]
        if self.cancelled:
            self._close(("cancelled", "canceled from Prefect; finished stages and checkpoints are kept"))
        else:
            self._close(("failed", "; ".join(map(str, failed))) if failed else ("completed", ""))

    # --- the run's side: never waits -----------------------------------------------------------------------------------

    def _on_change(self, address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None:
        self._watch(address, state, detail, folder=folder, seconds=seconds)
        if state in ("checking", "hashing") or address not in self._views:
            return
        if detail and state in ("running", "waiting"):
            self._notes.append(Note(datetime.now(UTC), address, f"{state}: {detail}"))
        view = self._views[address]
        self._change(address, StageView(state, "" if state in MOVING else detail, folder or view.folder, seconds))

    def _change(self, address: str, view: StageView) -> None:
        with self._changing:
            if view == self._views[address]:
                return
            self._views[address] = view
            self._keep()
        self._due.set()

    def _keep(self) -> None:
        if self._audience is not None:
            with suppress(OSError):  # the job itself reports a full disk
                self._audience.keep(self._views, self._end)

    def _close(self, end: End) -> None:
        with self._changing:
            self._end = end
            self._keep()
        self._ending.set()
        self._due.set()
        self._over.wait(END_S)
        if not self._end_reported:
            self._say("the end of this run could not be reported to Prefect; the next run will report it")

    def _say(self, text: str) -> None:
        with suppress(BaseException):  # a dead worker leaves a broken pipe, which rich turns into SystemExit
            self._message(text)

    # --- the audience's side: its own thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        attempts = 0
        with ExitStack() as connection:
            while not self._over.is_set():
                (self._ending if self._failures else self._due).wait(AWAY_S if self._away else TICK_S)
                self._due.clear()
                attempts += self._ending.is_set()
                try:
                    self._round(self._audience or self._find(connection))
                except AudienceReset:
                    connection.close()
                    self._audience = None
                    self._reported.clear()
                except Exception as error:  # boundary: no failure of the audience may stop the run
                    self._lose(error)
                    if attempts >= END_ATTEMPTS:
                        self._over.set()
                    elif attempts:
                        self._over.wait(TICK_S)
                else:
                    self._find_again()

    def _find(self, connection: ExitStack) -> Audience:
        audience = connection.enter_context(self._connect(list(self._views)))
        with self._changing:
            self._audience = audience
            self._keep()
        return audience

    def _find_again(self) -> None:
        self._failures = 0
        if self._away:
            self._away = ""
            self._say("Prefect is reachable again")
        self._answered.set()

    def _lose(self, error: Exception) -> None:
        self._failures += 1
        if self._failures < AWAY_AFTER:
            return
        notified, self._away = bool(self._away), (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not notified:
            self._say(f"Prefect does not answer ({self._away}); the run continues without it")
        self._answered.set()

    def _round(self, audience: Audience) -> None:
        """Check for cancellation and report everything that has changed."""
        end = self._end  # read before the states, so that the states reported below are final
        audience.begin()
        if self._failures or time.monotonic() - self._asked > CANCEL_POLL_S:  # an audience that failed may have lost the run
            self._asked = time.monotonic()
            if audience.cancelling() and not self.run.cancelled.is_set() and end is None:
                self.cancelled, self.run.keep_jobs = True, False
                self.run.cancelled.set()
        with self._changing:
            views = dict(self._views)
        while self._notes:
            audience.note(self._notes[0])
            self._notes.popleft()
        for address, view in views.items():
            if self._reported.get(address, StageView()) != view:
                audience.update(address, view)
                self._reported[address] = view
            if view.live and view.folder is not None:
                audience.follow(address, view.folder)
        if end is not None:
            audience.end(end)
            self._end_reported = True
            self._over.set()
        elif time.monotonic() - self._swept > SWEEP_S:
            self._swept = time.monotonic()
            audience.sweep()
