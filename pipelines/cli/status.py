"""Project state: running jobs on all machines, their logs and cancellation, stage status, code drift."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import PlainSerializer

from pedigree.configs.base.mistakes import nearest
from pedigree.configs.base.problems import PedigreeError, UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.base.texts import command
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.store import heartbeat
from pedigree.data.store.fence import Fence, Superseded
from pedigree.pipelines.cli.console import echo, print_table
from pedigree.pipelines.cli.progress import numbers_text
from pedigree.pipelines.jobs.attempts import CANCELLED
from pedigree.pipelines.jobs.context import RunContext
from pedigree.pipelines.jobs.launchers import Launchers
from pedigree.pipelines.jobs.live import BEATS_LISTENED, LiveJob, Signs, jobs_now, live_jobs
from pedigree.pipelines.jobs.scratch_state import UNKNOWN, address_of
from pedigree.pipelines.json_documents import ONE_WORD, Opaque
from pedigree.pipelines.lineage.ancestry import opened
from pedigree.pipelines.publish.commits import uncommitted
from pedigree.pipelines.quantities import duration
from pedigree.pipelines.run.ensure import log_file
from pedigree.pipelines.run.plans import StageSummary, drift, plan
from pedigree.stages.job.job import PULSES

FOLLOW_POLL_S = 0.5
BEATS_TO_END = 5
"""A fenced job that missed this many heartbeats has ended itself: it checks its fencing token once per beat."""


@dataclass(frozen=True)
class JobDocument:
    """A running job."""

    address: str
    kind: str
    pid: int | None
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
    """A job as JSON."""
    return JobDocument(
        address=job.address,
        kind=job.kind,
        pid=job.pid,
        elsewhere=job.elsewhere,
        host=job.host,
        alive=True if job.heard else None,
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


@dataclass(frozen=True, kw_only=True)
class StageStatus(StageSummary):
    """Status of one stage."""

    state: Annotated[Literal["done", "in the remote", "stale", "not built", "running"], ONE_WORD]
    changed_code: tuple[str, ...]
    """Source files that changed since its artifact was built."""
    job: Job | None

    @property
    def words(self) -> str:
        return running_word(self.job) if self.job else self.state


@dataclass(frozen=True)
class RecipeStatus:
    """Status of a recipe."""

    stages: tuple[StageStatus, ...]
    uncommitted: tuple[str, ...]
    """Ledger files that are not committed to git."""


def status(run: RunContext) -> RecipeStatus:
    """Return the status of a recipe, with its stages in order; read-only."""
    jobs = {job.address: job for job in jobs_now(run.project) if job.heard}
    found = []
    for entry in plan(run):
        node, job = entry.node, jobs.get(entry.node.address)
        done = "in the remote" if entry.remote else "done"
        state = "running" if job else done if not entry.reasons else "stale" if opened(run.project, node) else "not built"
        found.append(StageStatus.of(run.graph, entry, state, changed_code=tuple(drift(run, node)), job=job))
    return RecipeStatus(tuple(found), tuple(uncommitted(run.project, run.graph)))


def print_status(recipe: str, status: RecipeStatus) -> None:
    """Print the stages of a recipe, code that has changed, and what to do next."""
    stages = status.stages
    print_table(("stage", "kind", "state", "why"), [(stage.shown, stage.kind, stage.words, stage.why) for stage in stages])
    drifted = [stage for stage in stages if stage.changed_code]
    for stage in drifted:
        echo(f"\n{stage.shown}: code changed since it was built: {', '.join(stage.changed_code)}")
    if drifted:
        echo("\nCode makes a stage stale only if it decides what rows are kept or how answers are scored. If other code would change")
        echo(f"results, raise the stage's `version` in its kind.py, or re-run with {command('run', recipe, '--on-code-change', 'rerun')}.")
    if status.uncommitted:
        echo(f"\nNot committed to git: {', '.join(status.uncommitted)}.")
        echo(f"{command('run', recipe, '--commit')} commits them, with ids and scores in the message.")
    if any(stage.state in ("stale", "not built") for stage in stages):
        echo(f"\n{command('plan', recipe)} shows what a run would do; {command('run', recipe)} does it.")


def print_jobs(jobs: Sequence[LiveJob]) -> None:
    """Print running jobs."""
    if not jobs:
        echo("no job is running")
        return
    cells = [
        (
            job.address,
            job.kind,
            f"elsewhere{f' ({job.host})' if job.host else ''}" if job.elsewhere else str(job.pid or "?"),
            f"{job.step}/{job.total}" if job.total else "starting",
            numbers_text(job.numbers),
            f"{duration(max(job.silent_s, 0))} ago" if job.heard else f"no heartbeat for {duration(job.silent_s)}",
            job.holder.what if job.holder else f"no command; {command('run', job.address.partition('/')[0])} takes over",
        )
        for job in jobs
    ]
    print_table(("stage", "kind", "process", "step", "numbers", "last heartbeat", "owner"), cells)
    if not all(job.heard for job in jobs):
        echo(f"\nHeartbeats can be delayed on a network disk. A job is considered dead after {heartbeat.SILENCE_S:g} s without one.")
    echo("\n`pedigree logs -f STAGE` follows a job's log; `pedigree cancel STAGE` ends the job.")


def cancel(project: Project, name: str, waiting: Callable[[LiveJob], None] = lambda job: None) -> list[LiveJob]:
    """End the jobs of a stage or recipe, on any machine, and return them. Checkpoints are kept.

    A marker in each scratch folder keeps the waiting runner from restarting the job. For a whole recipe, its runner on this machine is
    interrupted too. Jobs on other machines end themselves when they see a newer fencing token.

    Args:
        project: the project of the jobs.
        name: stage name or address, or recipe name.
        waiting: called with each remote job before waiting for its end.

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
        os.kill(runner, signal.SIGINT)
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
        time.sleep(FOLLOW_POLL_S)


def find_log(project: Project, name: str) -> tuple[str, Path]:
    """Return (address, log file) of a stage, by name or address: the log of its unfinished job, else of its last finished one.

    Raises:
        UsageProblem: no log or several logs match.
    """
    found: dict[str, Path] = {}
    finished = project.private / "logs"
    for path in sorted(finished.glob("*/*.log")):
        found[path.relative_to(finished).with_suffix("").as_posix()] = path
    for path in sorted((project.private / "scratch").glob("*/log.txt"), key=lambda path: path.stat().st_mtime):
        found[address_of(path.parent)] = path
    found.pop(UNKNOWN, None)
    chosen = [address for address in found if address == name or address.partition("/")[2] == name]
    if len(chosen) == 1:
        return chosen[0], found[chosen[0]]
    if chosen:
        raise UsageProblem(f"{name!r} is ambiguous: specify one of {', '.join(chosen)}")
    raise UsageProblem(
        f"no log of {name!r}: it has not run here. Available logs: {', '.join(sorted(found)) or 'none'}{nearest(name, [*found])}"
    )


def follow(project: Project, address: str, log: Path) -> Iterator[str]:
    """Yield a log's text as it grows, until the stage's job ends."""
    offset, signs = 0, Signs(project)
    while True:
        alive = any(job.address == address for job in live_jobs(project, signs))
        text, offset = _text_from(log, offset)
        if not text and not log.exists():  # the stage ended and its log was moved
            log = log_file(project, address)
            text, offset = _text_from(log, offset)
        if text:
            yield text
        if not alive:
            return
        time.sleep(FOLLOW_POLL_S)


CHATTER = re.compile(
    r"(?:\(\w+ pid=\d+\) )?"
    r"(?:\[[-\d :,.]+\] \[(?:INFO|DEBUG)\]|(?:INFO|DEBUG)[ :]|\S*site-packages/\S+: \w*Warning: |\s+warnings\.warn\(|.*\d+%\|"
    r"|DeepSpeed \S+ built |(?:begin|end) bf16_ ?optimizer$|(?:before|after) (?:initializing group|GatheredParameters)|MA [\d.]+ GB "
    r"|CPU Virtual Memory: |_load_legacy_checkpoint |Triton is installed, but )"
)
"""Lines of libraries: messages below warnings, Python's warnings about code that is not the user's, progress bars, memory."""


def without_chatter(texts: Iterable[str]) -> Iterator[str]:
    """The lines of a growing log without those of libraries; of a line that was overwritten, the last state."""
    rest = ""
    for text in texts:
        *lines, rest = f"{rest}{text}".split("\n")
        yield from (f"{line}\n" for line in lines if not CHATTER.match(line.rstrip("\r").rpartition("\r")[2]))
    if rest and not CHATTER.match(rest.rpartition("\r")[2]):
        yield rest


def running_word(job: LiveJob) -> str:
    step = f"step {job.step}/{job.total}" if job.total else "starting"
    place = " elsewhere" if job.elsewhere else ""
    return f"running{place}, {step}" + ("" if job.holder else ", no command attached")


def _text_from(path: Path, offset: int) -> tuple[str, int]:
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
    except OSError:
        return "", offset
    return data.decode(errors="replace"), offset + len(data)
