"""Shows a run in Prefect, which may be away: `run_graph` does the work, and an observer beside it tells what happens.

The run never waits for Prefect, not even for its import. A thread of its own makes every call; one that fails or hangs is made again
later, with what is true by then. A cancellation over there comes back through `RunContext.cancelled`.
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

from configs.base.problems import PedigreeError
from pipelines.jobs.context import MOVING, RunContext, StageFailed
from pipelines.run.runs import StageEnd, run_graph

HOW_TO_PREFECT = "Start one with `prefect server start`, and name it: `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
TICK_S = 1.0
"""How often logs and progress are looked at."""
CANCEL_POLL_S = 5.0
SWEEP_S = 3.0
"""How often other runs are looked after; those of other machines are listened to."""
AWAY_S = 5.0
"""Pause before somebody who is away is tried again."""
AWAY_AFTER = 2
"""Attempts that must fail in a row before anybody is told: a busy server refuses a call now and then."""
END_S, END_ATTEMPTS = 15.0, 2
"""A run that is over waits so long for its end to be told, and for so many attempts."""
NOTES = 1000
"""What is kept to be told while nobody listens; older notes are forgotten."""


@dataclass(frozen=True)
class StageView:
    """A stage as an audience is told of it."""

    state: str = "pending"
    """One of `Watch`, or `pending`, `skipped` and `cancelled`."""
    detail: str = ""
    folder: Path | None = None
    """Scratch folder of its job, also after the job has ended."""
    seconds: float | None = None

    @property
    def live(self) -> bool:
        return self.state == "running" and self.folder is not None


@dataclass(frozen=True)
class Note:
    """Something worth a line in the log of a stage: why it waits, or is tried again."""

    when: datetime
    address: str
    text: str


End = tuple[Literal["completed", "failed", "cancelled", "crashed"], str]
"""How a run ended, and why."""


class Forgotten(Exception):
    """The audience knows nothing of this run any more: it has lost its memory, and is to be told again from the beginning."""


class Unavailable(PedigreeError):
    """Somebody has to see the run (`--prefect always`), and nobody answers."""


Connect = Callable[[Collection[str]], AbstractContextManager["Audience"]]
"""Opens the way to an audience, for the stages with these addresses."""


class Audience(Protocol):
    """Whom a run is shown to. Any call but `keep` may raise anything and take its time; it can be made again."""

    def begin(self) -> None:
        """Makes the run known, once."""
        ...

    def keep(self, views: dict[str, StageView], end: End | None) -> None:
        """Notes on this machine, at once, what must be known after this process: the folders of live jobs, the end."""
        ...

    def tell(self, address: str, view: StageView) -> None:
        """A stage has come into a state."""
        ...

    def note(self, note: Note) -> None: ...

    def follow(self, address: str, folder: Path) -> None:
        """Log and progress of a live job."""
        ...

    def cancelling(self) -> bool:
        """Whether somebody wants the run to be cancelled.

        Raises:
            Forgotten: nobody knows this run.
        """
        ...

    def sweep(self) -> None:
        """Tells how other runs have ended that cannot tell it themselves any more."""
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
    """`run_graph`, shown to an audience.

    Args:
        run: the run; its `watch` is told as well.
        connect: finds the audience; called and used in the observer's thread, and called again when it fails.
        say: told when the audience goes away and comes back.
        selection: addresses of the stages; all when None.
        forced: addresses of stages that run although they are current.
        required: refuse to begin before the audience answers.

    Raises:
        Unavailable: it is required, and does not answer.
    """
    chosen = [address for address in run.graph.nodes if selection is None or address in selection]
    with Observer(run, chosen, connect, say) as observer:
        if required:
            observer.wait_for_answer()
        ends = run_graph(run, selection, forced)
        observer.finish(ends)
    return ends


class Observer:
    """Stands between a run and its audience while the block runs."""

    def __init__(self, run: RunContext, addresses: Collection[str], connect: Connect, say: Callable[[str], None]) -> None:
        self.run, self._connect, self._told_to = run, connect, say
        self._watch, run.watch = run.watch, self._hear
        self.cancelled = False
        """Whether the audience has cancelled the run."""
        self._audience: Audience | None = None
        self._away, self._failures = "", 0
        self._views = {address: StageView() for address in addresses}
        self._told: dict[str, StageView] = {}
        self._notes: deque[Note] = deque(maxlen=NOTES)
        self._end: End | None = None
        self._asked = self._swept = time.monotonic()
        self._changing, self._due, self._answered = threading.Lock(), threading.Event(), threading.Event()
        self._ending, self._over = threading.Event(), threading.Event()
        self._end_told = False
        self._thread = threading.Thread(target=self._loop, name="observer", daemon=True)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Unavailable):
            self._over.set()
        elif error is not None:
            interrupted = not isinstance(error, Exception)
            kept = "its jobs go on" if self.run.keep_jobs else "its jobs are ended, finished stages and checkpoints are kept"
            self._close(("cancelled", f"interrupted; {kept}") if interrupted else ("crashed", f"{type(error).__name__}: {error}"))
        self.run.watch = self._watch

    def wait_for_answer(self) -> None:
        """Waits until the audience has been told of the run.

        Raises:
            Unavailable: it cannot be.
        """
        self._answered.wait()
        if self._away:
            raise Unavailable(f"--prefect always: {self._away}. Nothing was run. {HOW_TO_PREFECT}; or leave the option out")

    def finish(self, ends: Sequence[StageEnd]) -> None:
        """Tells how the run has ended."""
        for end in ends:
            if isinstance(end, StageFailed):
                state = "cancelled" if end.cause == "cancelled" else "failed"
                self._change(end.address, replace(self._views[end.address], state=state, detail=end.message))
        failed = [end for end in ends if isinstance(end, StageFailed)]
        if self.cancelled:
            self._close(("cancelled", "cancelled by whom it was shown to; finished stages and checkpoints are kept"))
        else:
            self._close(("failed", "; ".join(map(str, failed))) if failed else ("completed", ""))

    # --- the run's side: never waits -----------------------------------------------------------------------------------

    def _hear(self, address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None:
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
            with suppress(OSError):  # a full disk is met by the job itself
                self._audience.keep(self._views, self._end)

    def _close(self, end: End) -> None:
        with self._changing:
            self._end = end
            self._keep()
        self._ending.set()
        self._due.set()
        self._over.wait(END_S)
        if not self._end_told:
            self._say("Prefect has not heard how this run ended; the next run tells it")

    def _say(self, text: str) -> None:
        with suppress(BaseException):  # a worker that is gone has left a broken pipe, which rich turns into SystemExit
            self._told_to(text)

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
                except Forgotten:
                    connection.close()
                    self._audience = None
                    self._told.clear()
                except Exception as error:  # the boundary: whatever happens over there, the run goes on
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
            self._say("Prefect answers again")
        self._answered.set()

    def _lose(self, error: Exception) -> None:
        self._failures += 1
        if self._failures < AWAY_AFTER:
            return
        told, self._away = bool(self._away), (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not told:
            self._say(f"Prefect does not answer ({self._away}); the run goes on without it")
        self._answered.set()

    def _round(self, audience: Audience) -> None:
        """Asks whether the run is to go on, and tells all that has not been told."""
        end = self._end  # before the states: what is told below is then complete
        audience.begin()
        if self._failures or time.monotonic() - self._asked > CANCEL_POLL_S:  # what has failed may know nothing of the run any more
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
            if self._told.get(address, StageView()) != view:
                audience.tell(address, view)
                self._told[address] = view
            if view.live and view.folder is not None:
                audience.follow(address, view.folder)
        if end is not None:
            audience.end(end)
            self._end_told = True
            self._over.set()
        elif time.monotonic() - self._swept > SWEEP_S:
            self._swept = time.monotonic()
            audience.sweep()
