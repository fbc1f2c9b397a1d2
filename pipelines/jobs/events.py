"""What happens in a run, as one stream of events, and the state of a stage that its events add up to.

Every event is made where it happens and passed to `RunContext.watch`. Consumers are functions of an event: the terminal's board, the status
line, Prefect (`pipelines/prefect/observer.py`), and the callback of `pedigree.run`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

Outcome = Literal["unchanged", "remote", "restored", "ran", "attached"]
"""How a stage became current. `remote`: recorded as done; the files stay in the remote until something needs them."""
Moving = Literal["fetching", "restoring", "hashing", "sending"]
"""What a stage does with files; the detail is its progress, which changes constantly."""
MOVING: tuple[Moving, ...] = ("fetching", "restoring", "hashing", "sending")


@dataclass(frozen=True)
class StageDue:
    """A stage must run, or depends on one that must."""

    address: str


@dataclass(frozen=True)
class StageBusy:
    """A stage is examined, or its files are moved or hashed."""

    address: str
    activity: Literal["checking"] | Moving
    detail: str = ""


@dataclass(frozen=True)
class StageWaiting:
    """A stage waits: for a slot, for another runner, or for the next attempt of its job."""

    address: str
    detail: str


@dataclass(frozen=True)
class StageStarted:
    """The job of a stage runs: an attempt of this run, or a job of an earlier one."""

    address: str
    folder: Path
    """Its scratch folder, with `log.txt`."""
    detail: str = ""


@dataclass(frozen=True)
class StageProgressed:
    """The job of a stage has sent a heartbeat."""

    address: str
    step: int
    total: int
    """0 if unknown."""
    numbers: Mapping[str, float]
    work: str = ""
    """Work outside the steps, as text: `hashing 12 of 100 GB`."""


@dataclass(frozen=True)
class StageEnded:
    """A stage is current, was sent to the remote, has failed, or was skipped."""

    address: str
    outcome: Outcome | Literal["sent", "failed", "skipped"]
    detail: str = ""
    cause: str = ""
    """One word on why it failed, e.g. `out_of_memory`, `refused` or `cancelled`."""
    seconds: float | None = None


@dataclass(frozen=True)
class Notice:
    """A message about the run as a whole."""

    text: str
    urgent: bool = False
    """Shown during the run, not only after it."""


@dataclass(frozen=True)
class RunEnded:
    """The last event of a run."""

    outcome: Literal["completed", "failed", "cancelled", "crashed"]
    detail: str = ""

    @classmethod
    def by(cls, error: BaseException, keep_jobs: bool) -> "RunEnded":
        """The end of a run that an exception ended."""
        if isinstance(error, Exception):
            return cls("crashed", f"{type(error).__name__}: {error}")
        kept = "its jobs keep running" if keep_jobs else "its jobs are stopped, finished stages and checkpoints are kept"
        return cls("cancelled", f"interrupted; {kept}")


StageEvent = StageDue | StageBusy | StageWaiting | StageStarted | StageProgressed | StageEnded
RunEvent = StageEvent | Notice | RunEnded
Watch = Callable[[RunEvent], None]
"""Called with every event, from any thread."""


def unwatched(event: RunEvent) -> None:
    """Ignore all events."""


@dataclass(frozen=True)
class StageView:
    """The state of a stage in a run."""

    state: str = "pending"
    """`pending`, `waiting`, `running`, an activity of `StageBusy`, or an outcome of `StageEnded`."""
    detail: str = ""
    cause: str = ""
    folder: Path | None = None
    """Scratch folder of its job, also after the job has ended."""
    seconds: float | None = None
    progress: StageProgressed = field(default=StageProgressed("", 0, 0, {}), compare=False)
    """Last heartbeat of its job; heartbeats arrive constantly and change nothing else."""

    @property
    def live(self) -> bool:
        return self.state == "running" and self.folder is not None

    def after(self, event: StageEvent) -> Self:
        """The state after an event of this stage."""
        match event:
            case StageProgressed():
                return replace(self, progress=event)
            case StageStarted():
                return self._now("running", event.detail, folder=event.folder)
            case StageWaiting():
                return self._now("waiting", event.detail)
            case StageBusy():
                return self._now(event.activity, event.detail)
            case StageEnded():
                return self._now(event.outcome, event.detail, cause=event.cause, seconds=event.seconds)
            case StageDue():
                return self._now("pending")

    def _now(self, state: str, detail: str = "", *, cause: str = "", folder: Path | None = None, seconds: float | None = None) -> Self:
        return replace(self, state=state, detail=detail, cause=cause, folder=folder or self.folder, seconds=seconds)
