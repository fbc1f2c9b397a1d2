"""What can be known here of jobs and runners of other machines: that they were heard, or for how long they were not.

One look tells of a job elsewhere only that it may be alive. So whoever would end it, or remove what it works on, listens first.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from configs.base.project import Project
from data.store import heartbeat
from data.store.heartbeat import Listener
from pipelines.jobs.lease import Holder, holder_of
from stages.job.job import PULSES

Seen = TypeVar("Seen")
POLL_S = 0.5


class Signs:
    """Listens to whatever it was asked about once: keep it between two looks."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._listeners: dict[Path, Listener] = {}
        self._in_doubt: set[Path] = set()
        """Folders of the last look whose owner elsewhere has been neither heard nor silent for long enough."""

    def listener(self, folder: Path) -> Listener:
        """Who listens to the job of a scratch folder, or to the holder of a lease."""
        return self._listeners.setdefault(folder, Listener())

    def holder(self, name: str) -> Holder | None:
        """Who holds a lease; one elsewhere counts until it has been silent for long enough."""
        folder = self.project.lease(name)
        holder = holder_of(folder, self.listener(folder))
        if holder is not None and not holder.process.is_local:
            self._doubt(folder)
        return holder

    def silent_s(self, scratch: Path) -> float:
        """How long a job elsewhere has been listened to in vain."""
        silent = self.listener(scratch).silent_s(heartbeat.sign(scratch / PULSES))
        if silent <= heartbeat.SILENCE_S:
            self._doubt(scratch)
        return silent

    def listen(self, look: Callable[[], Seen], patience_s: float | None = None, waiting: Callable[[], None] = lambda: None) -> Seen:
        """Looks again and again, until all that is elsewhere was heard or has been silent for long enough; returns the last look.

        Args:
            look: asks about jobs and leases.
            patience_s: how long to listen at most; by default for as long as silence takes.
            waiting: called once, when there is something to listen to.
        """
        began, told = time.monotonic(), False
        while True:
            self._in_doubt.clear()
            found = look()
            if not self._in_doubt or (patience_s is not None and time.monotonic() - began > patience_s):
                return found
            if not told:
                told = True
                waiting()
            time.sleep(POLL_S)

    def _doubt(self, folder: Path) -> None:
        if not self.listener(folder).heard:
            self._in_doubt.add(folder)
