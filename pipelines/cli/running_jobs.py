"""Running jobs, on all machines: how they are listed, and how they are canceled."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import PlainSerializer

from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.store import heartbeat
from pedigree.data.store.fence import Fence, Superseded
from pedigree.pipelines.cli.console import echo, print_table
from pedigree.pipelines.cli.progress import numbers_text
from pedigree.pipelines.jobs.attempts import CANCELLED
from pedigree.pipelines.jobs.launchers import Launchers
from pedigree.pipelines.jobs.live import BEATS_LISTENED, LiveJob, Signs, live_jobs
from pedigree.pipelines.jobs.processes import catches, send
from pedigree.pipelines.json_documents import Opaque
from pedigree.pipelines.quantities import duration
from pedigree.stages.job.job import PULSES

POLL_S = 0.5
BEATS_TO_END = 5
"""A fenced job that missed this many heartbeats has ended itself: it checks its fencing token once per beat."""


@dataclass(frozen=True)
class JobDocument:
    """A running job."""

    address: str
    kind: str
    pid: int | None
    """Null for a job elsewhere or of a scheduler."""
    waiting: str | None
    """What a job in the queue of a scheduler waits for; null if it runs."""
    elsewhere: bool
    """It runs on another machine or in another container; `pid` is then null, and `host` names it if known."""
    host: str | None
    alive: Literal[True] | None
    """Null if a job elsewhere has sent no heartbeat for `seconds_since_heartbeat` but may still be alive."""
    step: int
    total_steps: int
    numbers: dict[str, float]
    seconds_since_heartbeat: float
    waited_for_by: str | None


def job_document(job: LiveJob) -> JobDocument:
    return JobDocument(
        address=job.address,
        kind=job.kind,
        pid=job.pid,
        waiting=job.waiting or None,
        elsewhere=job.elsewhere,
        host=job.host,
        alive=True if job.seen_alive else None,
        step=job.step,
        total_steps=job.total,
        numbers=job.numbers,
        seconds_since_heartbeat=round(max(job.silent_s, 0.0), 1),
        waited_for_by=job.holder.what if job.holder else None,
    )


Job = Annotated[LiveJob, Opaque(), PlainSerializer(job_document)]


@dataclass(frozen=True)
class Jobs:
    """Running jobs, on this machine and others."""

    jobs: tuple[Job, ...]


def running_word(job: LiveJob) -> str:
    if job.waiting:
        return "queued" + ("" if job.holder else ", no command attached")
    step = f"step {job.step}/{job.total}" if job.total else "starting"
    place = " elsewhere" if job.elsewhere else ""
    return f"running{place}, {step}" + ("" if job.holder else ", no command attached")


def print_jobs(jobs: Sequence[LiveJob]) -> None:
    if not jobs:
        echo("no job is running")
        return
    cells = [
        (
            job.address,
            job.kind,
            f"elsewhere{f' ({job.host})' if job.host else ''}" if job.elsewhere else job.scheduled or str(job.pid or job.launcher),
            "queued" if job.waiting else f"{job.step}/{job.total}" if job.total else "starting",
            numbers_text(job.numbers),
            job.waiting or (f"{duration(max(job.silent_s, 0))} ago" if job.seen_alive else f"no heartbeat for {duration(job.silent_s)}"),
            job.holder.what if job.holder else f"no command; {command('run', job.address.partition('/')[0])} takes over",
        )
        for job in jobs
    ]
    print_table(("stage", "kind", "process", "step", "numbers", "last heartbeat", "owner"), cells)
    if not all(job.seen_alive for job in jobs):
        echo(f"\nHeartbeats can be delayed on a network disk. A job is considered dead after {heartbeat.SILENCE_S:g} s without one.")
    echo("\n`pedigree logs -f STAGE` follows a job's log; `pedigree cancel STAGE` ends the job.")


def cancel(project: Project, name: str, waiting: Callable[[LiveJob], None] = lambda job: None) -> list[LiveJob]:
    """End the jobs of a stage or recipe, on any machine, and return them. Checkpoints are kept.

    A marker in each scratch folder keeps the waiting runner from restarting the job. For a whole recipe, its runner on this machine is
    interrupted too. Jobs on other machines end themselves when they see a newer fencing token; `waiting` is called with each of them first.

    Raises:
        UsageProblem: no running job matches.
        PedigreeError: a job on another machine is still running.
    """
    jobs = live_jobs(project)
    chosen = [job for job in jobs if job.address == name or name in job.address.split("/")]
    if not chosen:
        running = ", ".join(job.address for job in jobs) or "none"
        raise UsageProblem(f"no running job matches {name!r}; running: {running}. `pedigree jobs` lists running jobs")
    launcher = Launchers(project)
    for job in chosen:
        write_json(job.scratch / CANCELLED, {"by": "pedigree cancel"})
    recipe = [job for job in chosen if job.address.partition("/")[0] == name]
    for runner in {job.holder.process.pid for job in recipe if job.holder and job.holder.process.alive}:
        send(runner, signal.SIGINT if catches(runner, signal.SIGINT) else signal.SIGTERM)  # the background jobs of a script ignore SIGINT
    for job in chosen:
        if job.handle and not job.elsewhere:
            launcher.cancel(job.handle)
    _end_elsewhere(project, [job for job in chosen if job.elsewhere], waiting)
    return chosen


def runs_elsewhere(project: Project, recipe: str) -> bool:
    """Whether a command on another machine holds a lease of a recipe."""
    signs = Signs(project)
    names = [path.name for path in (project.private / "leases").glob(f"{recipe}--*/")]

    def look() -> bool:
        return any(holder is not None and not holder.process.is_local for holder in map(signs.holder, names))

    return signs.listen(look, BEATS_LISTENED * heartbeat.BEAT_S)


def _end_elsewhere(project: Project, jobs: list[LiveJob], waiting: Callable[[LiveJob], None]) -> None:
    for job in jobs:
        waiting(job)
        try:
            Fence.closed(project.lease(job.scratch.name))
        except Superseded as error:
            raise PedigreeError(f"{job.address} was restarted meanwhile and is running; retry to end it") from error
    listeners, began = {job.address: heartbeat.Listener() for job in jobs}, time.monotonic()
    longest = BEATS_TO_END * heartbeat.BEAT_S
    while alive := [job for job in jobs if listeners[job.address].silent_s(heartbeat.sign(job.scratch / PULSES)) <= longest]:
        if time.monotonic() - began > heartbeat.SILENCE_S:
            names = ", ".join(f"{job.address} on {job.place}" for job in alive)
            raise PedigreeError(f"{names}: still running after {heartbeat.SILENCE_S:g} s; retry, or end it on that machine")
        time.sleep(POLL_S)
