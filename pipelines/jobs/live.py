"""The jobs that run now: those of this machine, and those elsewhere that may be alive."""

import time
from dataclasses import dataclass
from pathlib import Path

from configs.base.project import Project
from data.store import heartbeat
from pipelines.jobs.launcher import Handle, LocalLauncher, process_of
from pipelines.jobs.lease import Holder
from pipelines.jobs.liveness import Signs
from pipelines.jobs.scratch_state import SPEC, address_of, has_reported, read_heartbeat, read_mapping, scratch_folders
from pipelines.quantities import reported
from stages.job.job import PULSES

BEATS_LISTENED = 3
"""How long a list waits for signs of life from other machines."""


@dataclass(frozen=True)
class LiveJob:
    """A job whose process lives; one of another machine, as far as is known."""

    address: str
    kind: str
    scratch: Path
    handle: Handle | None
    """None: its runner elsewhere was killed before it could write one."""
    elsewhere: bool
    """Whether only signs of life tell of it: on another machine, in another container."""
    heard: bool
    """Whether it lives for certain: here, or heard since it is listened to."""
    host: str | None
    """The machine it runs on, as that calls itself."""
    holder: Holder | None
    """Who waits for it; None: nobody does, the next run will."""
    step: int
    total: int
    numbers: dict[str, float]
    silent_s: float
    """Seconds since its last heartbeat, by this machine's clock, which is that of the job; of a job elsewhere: how long it was listened
    to in vain."""

    @property
    def pid(self) -> int | None:
        """Of its first process, on this machine."""
        process = process_of(self.handle) if self.handle else None
        return process.pid if process and process.is_local else None

    @property
    def place(self) -> str:
        return f"another machine{f' ({self.host})' if self.host else ''}" if self.elsewhere else "this machine"


def live_jobs(project: Project, signs: Signs | None = None) -> list[LiveJob]:
    """All jobs of this project, sorted by address: those that run here, and those elsewhere that may be alive.

    Args:
        project: theirs.
        signs: who has listened to jobs elsewhere; without, each of those counts that has not reported its end.
    """
    launcher, signs = LocalLauncher(project), signs or Signs(project)
    found = []
    for folder in scratch_folders(project):
        handle = launcher.find(folder)
        state = launcher.poll(handle).state if handle else "unknown" if (folder / PULSES).exists() else "lost"
        elsewhere = state == "unknown"
        if state != "running" and not (elsewhere and not has_reported(folder)):
            continue
        beat, since = read_heartbeat(folder), handle.submitted_at if handle else 0.0
        silent = signs.silent_s(folder) if elsewhere else time.time() - (since if beat.time is None else beat.time)
        if elsewhere and silent > heartbeat.SILENCE_S:
            continue
        address = address_of(folder)
        hosts = [str(told["host"]) for told in heartbeat.told(folder / PULSES) if "host" in told]
        found.append(
            LiveJob(
                address=address,
                kind=str(read_mapping(folder / SPEC).get("kind", "?")),
                scratch=folder,
                handle=handle,
                elsewhere=elsewhere,
                heard=not elsewhere or signs.listener(folder).heard,
                host=hosts[0] if hosts else None,
                holder=signs.holder(address.replace("/", "--")),
                step=beat.step,
                total=beat.total,
                numbers=reported(beat.numbers),
                silent_s=silent,
            )
        )
    return sorted(found, key=lambda job: job.address)


def jobs_now(project: Project) -> list[LiveJob]:
    """Live jobs for a list. Those elsewhere are listened to for a few beats; who was not heard by then may be alive all the same."""
    signs = Signs(project)
    return signs.listen(lambda: live_jobs(project, signs), BEATS_LISTENED * heartbeat.BEAT_S)
