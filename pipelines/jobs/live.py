"""Running jobs: those on this machine, and those elsewhere that may be alive.

A single look shows only that a job or a runner elsewhere may be alive, so listen before ending it or removing its files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pedigree.configs.base.project import Project
from pedigree.data.store import heartbeat
from pedigree.data.store.heartbeat import Listener
from pedigree.pipelines.jobs.launcher import Status, process_of
from pedigree.pipelines.jobs.launchers import Launchers
from pedigree.pipelines.jobs.lease import LeaseHolder, holder_of
from pedigree.pipelines.jobs.scratch_state import (
    DEFERRED,
    SPEC,
    Handle,
    address_of,
    has_reported,
    read_heartbeat,
    read_mapping,
    scratch_folders,
)
from pedigree.pipelines.quantities import reported
from pedigree.stages.job.job import PULSES

Seen = TypeVar("Seen")
POLL_S = 0.5
BEATS_LISTENED = 3
"""Heartbeats that a listing waits for from other machines."""


class Signs:
    """Follows the heartbeats of everything it was asked about; keep one instance between looks."""

    def __init__(self, project: Project) -> None:
        self.project, self.launchers = project, Launchers(project)
        self._listeners: dict[Path, Listener] = {}
        self._in_doubt: set[Path] = set()
        """Folders from the last look whose remote owner has neither been heard nor timed out, or whose job's report is awaited."""

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
        """Look repeatedly until every owner elsewhere was heard or has timed out, but at most `patience_s`; return the last look.

        `look` queries jobs and leases; `waiting` is called once, if there is something to listen to.
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

    def await_report(self, scratch: Path) -> None:
        """Count the job of a scratch folder, which has ended, as in doubt until its launcher has waited for its report."""
        self._in_doubt.add(scratch)

    def _doubt(self, folder: Path) -> None:
        if not self.listener(folder).seen_alive:
            self._in_doubt.add(folder)


@dataclass(frozen=True)
class LiveJob:
    """A job whose process is alive, or, on another machine, may be."""

    address: str
    kind: str
    scratch: Path
    handle: Handle | None
    """None if its runner elsewhere was killed before writing one, or its scheduler does not accept the job yet."""
    elsewhere: bool
    """Whether only its heartbeat shows it: on another machine, or in another container."""
    seen_alive: bool
    """Whether it is certainly alive: here, or heard from since listening began."""
    host: str | None
    """Its machine, by that machine's own name."""
    holder: LeaseHolder | None
    """The runner that waits for it; None if no runner does, in which case the next run picks it up."""
    step: int
    total: int
    numbers: dict[str, float]
    waiting: str
    """What a queued job waits for; empty if it runs."""
    scheduled: str
    """Where a scheduler runs it; empty for jobs of other launchers."""
    silent_s: float
    """Seconds since its last heartbeat, by this machine's clock; for a job elsewhere, seconds listened without hearing from it."""

    @property
    def pid(self) -> int | None:
        """PID of its first process on this machine."""
        process = process_of(self.handle) if self.handle else None
        return process.pid if process and process.is_local else None

    @property
    def launcher(self) -> str:
        return self.handle.launcher if self.handle else "?"

    @property
    def place(self) -> str:
        return f"another machine{f' ({self.host})' if self.host else ''}" if self.elsewhere else "this machine"


def live_jobs(project: Project, signs: Signs | None = None) -> list[LiveJob]:
    """All jobs of this project, sorted by address: those that run here, and those elsewhere that may be alive.

    Without `signs`, which have followed the heartbeats of jobs elsewhere, every one of those that has not reported its end counts.
    """
    signs = signs or Signs(project)
    launcher, found = signs.launchers, list[LiveJob]()
    for folder in scratch_folders(project):
        handle = launcher.find(folder)
        status = launcher.poll(handle) if handle else _without_job(folder)
        state = status.state
        elsewhere = state == "unknown"
        if status.has_ended:
            signs.await_report(folder)
        if state not in ("queued", "running") and not (elsewhere and not has_reported(folder)):
            continue
        beat, since = read_heartbeat(folder), handle.submitted_at if handle else 0.0
        silent = signs.silent_s(folder) if elsewhere else time.time() - (since if beat.time is None else beat.time)
        if elsewhere and silent > heartbeat.SILENCE_S:
            continue
        address = address_of(folder)
        holder = signs.holder(address.replace("/", "--"))
        if handle is None and state == "queued" and holder is None:  # its runner was killed
            continue
        hosts = [str(pulse["host"]) for pulse in heartbeat.read_heartbeats(folder / PULSES) if "host" in pulse]
        found.append(
            LiveJob(
                address=address,
                kind=str(read_mapping(folder / SPEC).get("kind", "?")),
                scratch=folder,
                handle=handle,
                elsewhere=elsewhere,
                seen_alive=not elsewhere or signs.listener(folder).seen_alive,
                host=hosts[0] if hosts else None,
                holder=holder,
                step=beat.step,
                total=beat.total,
                numbers=reported(beat.numbers),
                waiting=status.waiting,
                scheduled=status.place,
                silent_s=silent,
            )
        )
    return sorted(found, key=lambda job: job.address)


def _without_job(scratch: Path) -> Status:
    """Status of a scratch folder in which no submitted job is known."""
    if waiting := read_mapping(scratch / DEFERRED).get("waiting"):
        return Status("queued", waiting=str(waiting), place="not submitted")
    return Status("unknown" if (scratch / PULSES).exists() else "lost")


def jobs_now(project: Project) -> list[LiveJob]:
    """Live jobs for a listing. Listens to jobs elsewhere for a few heartbeats; those not heard by then may still be alive."""
    signs = Signs(project)
    return signs.listen(lambda: live_jobs(project, signs), BEATS_LISTENED * heartbeat.BEAT_S)
