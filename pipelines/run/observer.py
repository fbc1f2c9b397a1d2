"""Mirror a run to Prefect without depending on it: `run_graph` does the work, and an observer thread reports progress.

The observer consumes the run's events. The run never waits for Prefect, not even for its import. The observer thread makes every call; a
call that fails or hangs is retried later with the state at that time. A cancellation in Prefect arrives through `RunContext.cancelled`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Protocol

from pedigree.configs.base.problems import PedigreeError
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.events import (
    Notice,
    RunEnded,
    RunEvent,
    StageBusy,
    StageEvent,
    StageStarted,
    StageView,
    StageWaiting,
)
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


Note = tuple[datetime, str, str]
"""Time, address and text of a line for the log of a stage: why it waits, or is retried."""


class AudienceReset(Exception):
    """The audience has lost its record of this run; everything must be reported again from the beginning."""


Connect = Callable[[Collection[str]], AbstractContextManager["Audience"]]
"""Opens a connection to an audience for the stages with these addresses."""


class Audience(Protocol):
    """Receives a run's progress. Any call but `keep` may raise any exception and may block; every call can be repeated."""

    def begin(self) -> None:
        """Register the run, once."""
        ...

    def keep(self, views: dict[str, StageView], end: RunEnded | None) -> None:
        """Immediately record on this machine what must survive this process: the folders of live jobs, and the end."""
        ...

    def update(self, address: str, view: StageView) -> None:
        """Report a stage's new state."""
        ...

    def note(self, when: datetime, address: str, text: str) -> None: ...

    def follow(self, address: str, view: StageView) -> None:
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

    def end(self, end: RunEnded) -> None: ...


def run_observed(
    run: RunContext,
    connect: Connect,
    selection: Collection[str] | None = None,
    forced: Collection[str] = (),
    *,
    server: str = "",
    required: bool = False,
) -> list[StageEnd]:
    """`run_graph`, with progress reported to an audience.

    Args:
        run: the run. It notes when the audience goes away or comes back.
        connect: opens the audience; called and used in the observer's thread, and called again after a failure.
        selection: addresses of the stages; all when None.
        forced: addresses of stages that run even if current.
        server: the audience's address, for these notes.
        required: refuse to start before the audience answers.

    Raises:
        PedigreeError: an audience is required and does not answer.
    """
    chosen = [address for address in run.graph.nodes if selection is None or address in selection]
    with Observer(run, chosen, connect, server) as observer:
        if required:
            observer.wait_for_answer()
        return run_graph(run, selection, forced)


class Observer:
    """Relays a run to its audience for the duration of the block, which ends with the run's last event."""

    def __init__(self, run: RunContext, addresses: Collection[str], connect: Connect, server: str = "") -> None:
        self.run, self._connect, self._at = run, connect, f" ({server})" if server else ""
        self._watch, run.watch = run.watch, self._on_event
        self.cancelled = False
        """Whether the audience has canceled the run."""
        self._audience: Audience | None = None
        self._away, self._failures = "", 0
        self._views = {address: StageView() for address in addresses}
        self._reported: dict[str, StageView] = {}
        self._notes: deque[Note] = deque(maxlen=NOTES)
        self._end: RunEnded | None = None
        self._asked = self._swept = time.monotonic()
        self._changing, self._due, self._answered = threading.Lock(), threading.Event(), threading.Event()
        self._ending, self._over = threading.Event(), threading.Event()
        self._end_reported = False
        self._thread = threading.Thread(target=self._loop, name="observer", daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._end is None and not self._over.is_set():  # it ended before the graph began
            self._close(RunEnded.by(error, self.run.keep_jobs))
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

    # --- the run's side: never waits -----------------------------------------------------------------------------------

    def _on_event(self, event: RunEvent) -> None:
        match event:
            case Notice() | StageBusy(activity="checking" | "hashing"):
                pass
            case RunEnded():
                from_prefect = RunEnded("cancelled", "canceled from Prefect; finished stages and checkpoints are kept")
                self._close(from_prefect if self.cancelled and event.outcome in ("completed", "failed") else event)
            case StageBusy():
                self._change(replace(event, detail=""))  # it changes constantly
            case _:
                self._change(event)
        self._watch(event)

    def _change(self, event: StageEvent) -> None:
        if event.address not in self._views:
            return
        if isinstance(event, StageStarted | StageWaiting) and event.detail:
            state = "running" if isinstance(event, StageStarted) else "waiting"
            self._notes.append((datetime.now(UTC), event.address, f"{state}: {event.detail}"))
        with self._changing:
            before = self._views[event.address]
            self._views[event.address] = after = before.after(event)
            if after == before:
                return
            self._keep()
        self._due.set()

    def _keep(self) -> None:
        if self._audience is not None:
            with suppress(OSError):  # the job itself reports a full disk
                self._audience.keep(self._views, self._end)

    def _close(self, end: RunEnded) -> None:
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
            self.run.ledger.notice(f"{text}{self._at}", urgent=True)

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
            audience.note(*self._notes[0])
            self._notes.popleft()
        for address, view in views.items():
            if self._reported.get(address, StageView()) != view:
                audience.update(address, view)
                self._reported[address] = view
            if view.live:
                audience.follow(address, view)
        if end is not None:
            audience.end(end)
            self._end_reported = True
            self._over.set()
        elif time.monotonic() - self._swept > SWEEP_S:
            self._swept = time.monotonic()
            audience.sweep()
