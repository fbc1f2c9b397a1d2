"""Mirror a run to Prefect without depending on it: `run_graph` does the work, and an observer thread reports progress.

The observer consumes the run's events. The run never waits for Prefect, not even for its import. The observer thread makes every call; a
call that fails or hangs is retried later with the state at that time. A cancellation in Prefect arrives through `RunContext.cancelled`.
"""

import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import UUID

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.host.process import uncollected
from pedigree.pipelines.jobs import events
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.prefect.record import FlowRunLost
from pedigree.pipelines.run.plans import Plan
from pedigree.pipelines.run.runs import StageEnd, run_graph

if TYPE_CHECKING:
    from pedigree.pipelines.prefect.shown import PrefectRun

HOW_TO_PREFECT = "Run `prefect server start`, then `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
TICK_S = 1.0
"""Interval between looks at logs and progress."""
POLL_S = 3.0
"""Interval between looks for a cancellation, and for other runs that have died: heartbeats of those on other machines are followed."""
AWAY_S = 5.0
"""Pause before retrying a server that does not answer."""
AWAY_AFTER = 2
"""Consecutive failures before the user is notified: a busy server rejects a call now and then."""
END_S, END_ATTEMPTS = 15.0, 2
"""Seconds and attempts that a finished run waits for its end to be reported."""
NOTES = 1000
"""Notes buffered while the server does not answer; older ones are dropped."""


def run_observed(
    run: RunContext,
    selection: Collection[str] | None = None,
    forced: Collection[str] = (),
    planned: Collection[Plan] | None = None,
    *,
    flow_run_id: UUID | None = None,
    server: str = "",
    required: bool = False,
) -> list[StageEnd]:
    """`run_graph`, with progress reported to Prefect at `server`, which may go away and come back.

    `flow_run_id` is a flow run that Prefect started and will end itself; None creates one.

    Raises:
        PedigreeError: a server is `required` before the start, and does not answer.
    """
    chosen = [address for address in run.graph.nodes if selection is None or address in selection]
    with Observer(run, chosen, flow_run_id, server) as observer:
        if required:
            observer.wait_for_answer()
        return run_graph(run, selection, forced, planned)


class Observer:
    """Reports a run to Prefect for the duration of the block, which ends with the run's last event."""

    def __init__(self, run: RunContext, addresses: Collection[str], flow_run_id: UUID | None = None, server: str = "") -> None:
        self.run, self._flow_run_id, self._at = run, flow_run_id, f" ({server})" if server else ""
        self._watch, run.watch = run.watch, self._on_event
        self.cancelled = False
        """Whether the run was canceled in Prefect."""
        self._shown: PrefectRun | None = None
        self._away, self._failures, self._polled = "", 0, time.monotonic()
        self._views = {address: events.StageView() for address in addresses}
        self._notes: deque[tuple[datetime, str, str]] = deque(maxlen=NOTES)
        """Time, address and text of lines for the log of a stage: why it waits, or is retried."""
        self._end: events.RunEnded | None = None
        self._changing, self._due, self._answered = threading.Lock(), threading.Event(), threading.Event()
        self._ending, self._over = threading.Event(), threading.Event()
        self._end_reported = False
        self._thread = threading.Thread(target=self._loop, name="observer", daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._end is None and not self._over.is_set():  # it ended before the graph began
            self._close(events.RunEnded.by(error, self.run.keep_jobs))
        self.run.watch = self._watch

    def wait_for_answer(self) -> None:
        """Wait until the run is registered with Prefect; PedigreeError if that failed."""
        self._answered.wait()
        if self._away:
            self._over.set()
            raise PedigreeError(f"--prefect always: {self._away}. Nothing was run. {HOW_TO_PREFECT}; or omit the option")

    # --- the run's side: never waits -----------------------------------------------------------------------------------

    def _on_event(self, event: events.RunEvent) -> None:
        match event:
            case events.Notice() | events.StageBusy(activity="checking" | "hashing"):
                pass
            case events.RunEnded():
                from_prefect = events.RunEnded("cancelled", "canceled from Prefect; finished stages and checkpoints are kept")
                self._close(from_prefect if self.cancelled and event.outcome in ("completed", "failed") else event)
            case events.StageBusy():
                self._change(replace(event, detail=""))  # it changes constantly
            case _:
                self._change(event)
        self._watch(event)

    def _change(self, event: events.StageEvent) -> None:
        if event.address not in self._views:
            return
        if isinstance(event, events.StageStarted | events.StageWaiting) and event.detail:
            state = "running" if isinstance(event, events.StageStarted) else "waiting"
            self._notes.append((datetime.now(UTC), event.address, f"{state}: {event.detail}"))
        with self._changing:
            before = self._views[event.address]
            self._views[event.address] = after = before.after(event)
            if after == before:
                return
            self._keep()
        self._due.set()

    def _keep(self) -> None:
        if self._shown is not None:
            with suppress(OSError):  # the job itself reports a full disk
                self._shown.keep(self._views, self._end)

    def _close(self, end: events.RunEnded) -> None:
        with self._changing:
            self._end = end
            self._keep()
        self._ending.set()
        self._due.set()
        self._over.wait(END_S)
        if not self._end_reported:
            self._log("the end of this run could not be reported to Prefect; the next run will report it")

    def _log(self, text: str) -> None:
        with suppress(BaseException):  # a dead worker leaves a broken pipe, which rich turns into SystemExit
            self.run.ledger.notice(f"{text}{self._at}", urgent=True)

    # --- Prefect's side: its own thread --------------------------------------------------------------------------------

    def _loop(self) -> None:
        attempts = 0
        with ExitStack() as connection:
            while not self._over.is_set():
                (self._ending if self._failures else self._due).wait(AWAY_S if self._away else TICK_S)
                self._due.clear()
                attempts += self._ending.is_set()
                try:
                    self._round(self._shown or self._connect(connection))
                except FlowRunLost:
                    connection.close()
                    self._shown = None
                except Exception as error:  # boundary: no failure of Prefect may stop the run
                    self._lose(error)
                    if attempts >= END_ATTEMPTS:
                        self._over.set()
                    elif attempts:
                        self._over.wait(TICK_S)
                else:
                    self._find_again()

    def _connect(self, connection: ExitStack) -> "PrefectRun":
        with uncollected():  # the import parses code at the same time as stage threads do
            from pedigree.pipelines.prefect.shown import connected

        shown = connection.enter_context(connected(self.run, list(self._views), self._flow_run_id))
        with self._changing:
            self._shown = shown
            self._keep()
        return shown

    def _find_again(self) -> None:
        self._failures = 0
        if self._away:
            self._away = ""
            self._log("Prefect is reachable again")
        self._answered.set()

    def _lose(self, error: Exception) -> None:
        self._failures += 1
        if self._failures < AWAY_AFTER:
            return
        notified, self._away = bool(self._away), (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not notified:
            self._log(f"Prefect does not answer ({self._away}); the run continues without it")
        self._answered.set()

    def _round(self, shown: "PrefectRun") -> None:
        """Check for cancellation and report everything that has changed."""
        end = self._end  # read before the states, so that the states reported below are final
        shown.begin()
        due = self._failures > 0 or time.monotonic() - self._polled > POLL_S  # a server that failed may have lost the run
        if due:
            self._polled = time.monotonic()
            if shown.cancelling() and not self.run.cancelled.is_set() and end is None:
                self.cancelled, self.run.keep_jobs = True, False
                self.run.cancelled.set()
        with self._changing:
            views = dict(self._views)
        while self._notes:
            shown.note(*self._notes[0])
            self._notes.popleft()
        for address, view in views.items():
            shown.update(address, view)
            if view.live:
                shown.follow(address, view)
        if end is not None:
            shown.end(end)
            self._end_reported = True
            self._over.set()
        elif due:
            shown.sweep()
