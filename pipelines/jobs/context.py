"""One run of a recipe: what making a stage current needs to know of the outside, and how it fails."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from configs.base.problems import PedigreeError
from configs.base.project import Project
from configs.base.shrink import Reduced
from configs.base.texts import command
from configs.language.execution import Execution
from configs.language.graph import Graph
from data.artifacts.provenance import CODE_ROOT
from data.store.hashing import LONG_BYTES
from pipelines.jobs.launcher import Launcher, LocalLauncher
from pipelines.ledger.ledger import Ledger
from pipelines.ledger.transfers import Tell, Told
from pipelines.quantities import transferred

OnCodeChange = Literal["keep", "take", "rerun"]
MOVING = ("fetching", "restoring", "hashing", "sending")
"""States of a stage whose files are at work; the detail, which changes all the time, is how far they are."""


class StageFailed(PedigreeError):
    """A stage could not be made current; everything that existed before still does."""

    def __init__(self, address: str, cause: str, message: str, log: str | None = None) -> None:
        self.address, self.cause, self.message, self.log = address, cause, message, log
        told = f"; its log is {log}, {command('logs', address)} prints it" if log else ""
        super().__init__(f"{address} failed ({cause}): {message}{told}")


class Watch(Protocol):
    """Told what changes, from any thread. States: pending, checking, waiting, running, failed, `MOVING`, and those of `Outcome`."""

    def __call__(self, address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None: ...


def unwatched(address: str, state: str, detail: str = "", *, folder: Path | None = None, seconds: float | None = None) -> None:
    """Tells nobody."""


@dataclass
class RunContext:
    """One run of a recipe: what `ensure` needs to know of the outside."""

    project: Project
    graph: Graph
    execution: Execution
    ledger: Ledger
    watch: Watch = unwatched
    cancelled: threading.Event = field(default_factory=threading.Event)
    launcher: Launcher | None = None
    """The local one when absent."""
    keep_jobs: bool = False
    """Jobs go on when the run is interrupted; the next run re-attaches to them."""
    allow_numerics_change: bool = False
    """Checkpoints that were made under other numerics are taken too; the record is marked."""
    record_new_files: bool = False
    """Files that git does not know are part of the recorded patch; otherwise only their number is recorded."""
    fetch: bool = False
    """Files of finished stages come out of the remote, whether something needs them or not."""
    make: bool = True
    """Stages that are not finished are run; otherwise they fail."""
    on_code_change: OnCodeChange = "keep"
    """What becomes of unfinished work whose code has changed since: it goes on with the code that it began with, with that of now
    (the record is marked), or begins again. `rerun` makes finished stages again, too."""
    code_root: Path = CODE_ROOT
    """Folder of our packages, of which jobs get a snapshot; a project may use the code of another clone."""
    changes: tuple[Reduced, ...] = ()
    """Of a rehearsal: all that is otherwise than in the real recipe and profile."""
    require_checkpoint: frozenset[str] = frozenset()
    """Addresses of stages that are refused where there is nothing to go on from."""
    too_large: Mapping[str, str] = field(default_factory=dict)
    """Address → why there is not enough memory for its job, of stages that the cache should give back: refused only where it does not."""

    @property
    def title(self) -> str:
        return f"pedigree run {self.graph.recipe}"

    def telling(self, address: str) -> Told:
        """Shows how far it is with the files of a stage."""

        def placed(done: int, total: int) -> None:
            self.watch(address, "restoring", f"{done} of {total} files")

        def hashed(done: int, total: int) -> None:
            if total >= LONG_BYTES:
                self.watch(address, "hashing", transferred(done, total))

        return Told(self.transferring(address, "fetching"), placed, hashed)

    def transferring(self, address: str, state: str) -> Tell:
        """Shows how far a transfer of a stage's files is."""
        return lambda done, total: self.watch(address, state, transferred(done, total))

    def jobs(self) -> Launcher:
        if self.launcher is None:
            self.launcher = LocalLauncher(self.project)
        return self.launcher
