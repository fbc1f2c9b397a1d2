"""Liveness of jobs and runners on other machines.

A single look shows only that a job elsewhere may be alive, so listen before ending it or removing its files.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pedigree.configs.base.project import Project
from pedigree.data.store import heartbeat
from pedigree.data.store.heartbeat import Listener
from pedigree.pipelines.jobs.lease import LeaseHolder, holder_of
from pedigree.stages.job.job import PULSES

Seen = TypeVar("Seen")
POLL_S = 0.5


class Signs:
    """Follows the heartbeats of everything it was asked about; keep one instance between looks."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._listeners: dict[Path, Listener] = {}
        self._in_doubt: set[Path] = set()
        """Folders from the last look whose remote owner has neither been heard nor timed out."""

    def listener(self, folder: Path) -> Listener:
        """The listener for the job of a scratch folder, or for the holder of a lease."""
        return self._listeners.setdefault(folder, Listener())

    def holder(self, name: str) -> LeaseHolder | None:
        """The holder of a lease; one elsewhere counts until its heartbeat times out."""
        folder = self.project.lease(name)
        holder = holder_of(folder, self.listener(folder))
        if holder is not None and not holder.process.is_local:
            self._doubt(folder)
        return holder

    def silent_s(self, scratch: Path) -> float:
        """Seconds listened to a job elsewhere without hearing from it."""
        silent = self.listener(scratch).silent_s(heartbeat.sign(scratch / PULSES))
        if silent <= heartbeat.SILENCE_S:
            self._doubt(scratch)
        return silent

    def listen(self, look: Callable[[], Seen], patience_s: float | None = None, waiting: Callable[[], None] = lambda: None) -> Seen:
        """Look repeatedly until every owner elsewhere was heard or has timed out; return the last look.

        Args:
            look: queries jobs and leases.
            patience_s: how long to listen at most; by default until the timeout.
            waiting: called once, if there is something to listen to.
        """
        began, notified = time.monotonic(), False
        while True:
            self._in_doubt.clear()
            found = look()
            if not self._in_doubt or (patience_s is not None and time.monotonic() - began > patience_s):
                return found
            if not notified:
                notified = True
                waiting()
            time.sleep(POLL_S)

    def _doubt(self, folder: Path) -> None:
        if not self.listener(folder).heard:
            self._in_doubt.add(folder)
