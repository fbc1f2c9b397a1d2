"""The context of one run of a recipe, and how a stage fails in it."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.base.shrink import Reduced
from pedigree.configs.base.texts import command
from pedigree.configs.language.execution import ONE_PROCESS, Execution, Numerics, Placement
from pedigree.configs.language.graph import Graph, Node
from pedigree.data.store.hashing import LONG_BYTES
from pedigree.pipelines.jobs.events import Moving, Notice, StageBusy, Watch, unwatched
from pedigree.pipelines.jobs.launchers import Launchers
from pedigree.pipelines.ledger.identity import Identities
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.transfers import ProgressCallback, TransferProgress
from pedigree.pipelines.quantities import transferred

OnCodeChange = Literal["keep", "take", "rerun"]


class StageFailed(PedigreeError):
    """A stage could not be made current. Everything that existed before still exists."""

    def __init__(self, address: str, cause: str, message: str, log: str | None = None) -> None:
        self.address, self.cause, self.message, self.log = address, cause, message, log
        where = (["; ", "\n"]["\n" in message] + f"its log is {log}, {command('logs', address)} prints it") if log else ""
        super().__init__(f"{address} failed ({cause}): {message}{where}")


@dataclass
class RunContext:
    """One run of a recipe: the settings and services that `ensure` needs."""

    project: Project
    graph: Graph
    execution: Execution
    ledger: Ledger
    watch: Watch = unwatched
    """Consumes the run's events. To add a consumer, replace it by one that calls both."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    launcher: Launchers | None = None
    keep_jobs: bool = False
    """Jobs keep running when the run is interrupted; the next run re-attaches to them."""
    allow_numerics_change: bool = False
    """Accept checkpoints made under other numerics; the record is marked."""
    record_new_files: bool = False
    """Include files unknown to git in the recorded patch; otherwise only their number is recorded."""
    fetch: bool = False
    """Fetch the files of finished stages from the remote even if nothing needs them."""
    make: bool = True
    """Run unfinished stages; otherwise they fail."""
    on_code_change: OnCodeChange = "keep"
    """How to resume unfinished work whose code has changed: `keep` uses the original code, `take` the current code (the record is marked),
    `rerun` starts over. `rerun` also reruns finished stages.
    """
    changes: tuple[Reduced, ...] = ()
    """Of a rehearsal: every difference from the real recipe and profile."""
    require_checkpoint: frozenset[str] = frozenset()
    """Addresses of stages that are refused unless there is a checkpoint to resume from."""
    too_large: Mapping[str, str] = field(default_factory=dict)
    """Address → why its job would run out of memory, for stages expected from the cache; refused only if that fails."""

    def __post_init__(self) -> None:
        self.ledger.noticed = lambda text, urgent: self.watch(Notice(text, urgent))

    @property
    def code_root(self) -> Path:
        """Folder of the packages that jobs get a snapshot of; a project may use the code of another clone."""
        return self.ledger.code_root

    @code_root.setter
    def code_root(self, value: Path) -> None:
        self.ledger.code_root = value

    @property
    def title(self) -> str:
        return f"pedigree run {self.graph.recipe}"

    def settings(self, node: Node) -> tuple[Numerics, Placement]:
        """Numerics and placement of a stage's job."""
        numerics, placement = self.execution.of(node.kind, node.name)
        return (numerics if "deepspeed" in node.declaration.engine else numerics.model_copy(update=ONE_PROCESS)), placement

    def identities(self) -> Identities:
        """Keys of the stages at this moment."""
        return Identities(self.project, self.graph, self.ledger)

    def transfer_progress(self, address: str) -> TransferProgress:
        """Callbacks that report progress on a stage's files."""

        def placed(done: int, total: int) -> None:
            self.watch(StageBusy(address, "restoring", f"{done} of {total} files"))

        def hashed(done: int, total: int) -> None:
            if total >= LONG_BYTES:
                self.watch(StageBusy(address, "hashing", transferred(done, total)))

        return TransferProgress(self.transferring(address, "fetching"), placed, hashed)

    def transferring(self, address: str, activity: Moving) -> ProgressCallback:
        """Callback that reports the progress of a transfer of a stage's files."""
        return lambda done, total: self.watch(StageBusy(address, activity, transferred(done, total)))

    def jobs(self) -> Launchers:
        if self.launcher is None:
            self.launcher = Launchers(self.project)
        return self.launcher
