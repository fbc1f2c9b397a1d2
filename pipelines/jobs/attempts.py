"""Run a stage's job until it succeeds: watch it, classify failures, and retry transient ones.

Success is verified, never assumed: `unproven` checks what the job has written.
"""

import shutil
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pedigree.configs.base.texts import command
from pedigree.configs.language.execution import Numerics, Placement, Scheduler
from pedigree.configs.language.graph import Node
from pedigree.data.artifacts.artifacts import PARTS, ArtifactError, content_hash, read_json, scan, write_json
from pedigree.data.store import heartbeat
from pedigree.data.store.fence import OVERTAKEN, Fence, Superseded
from pedigree.data.store.hashing import Beat, Hashed, silent
from pedigree.pipelines.jobs.context import RunContext, StageFailed
from pedigree.pipelines.jobs.events import StageProgressed, StageStarted, StageWaiting
from pedigree.pipelines.jobs.launcher import HUNG_GRACE_S, Deferred, Status
from pedigree.pipelines.jobs.launchers import Launchers
from pedigree.pipelines.jobs.lease import Cancelled, HeldLease, LeaseLost
from pedigree.pipelines.jobs.processes import described
from pedigree.pipelines.jobs.scratch_state import (
    ATTEMPTS,
    DEFERRED,
    Handle,
    Heartbeat,
    answers_size,
    attempts_here,
    checkpoints_here,
    has_reported,
    read_code,
    read_heartbeat,
    read_spec,
    write_spec,
)
from pedigree.pipelines.jobs.slots import HeldSlots
from pedigree.pipelines.quantities import reported
from pedigree.stages.job.failures import is_full, storage_cause
from pedigree.stages.job.job import PULSES
from pedigree.stages.job.meeting import MEETING
from pedigree.stages.job.outcome import Failure, Success, read_done

RETRIED = frozenset({"crashed", "out_of_memory", "storage", "lost", "lost_engine", "collective", "heartbeat"})
"""Transient causes: the job resumes from its last checkpoint, after `out_of_memory` with smaller micro-batches. `refused`, `bug`,
`not_finite`, `disk_full`, `not_writable` and `timeout` would fail the same way again.
"""
RESUMED = RETRIED | {"preempted"}
"""Causes after which the job is started again."""
BUG = "a bug in Pedigree; please report it with the traceback at the end of the log"
REMEDIES = {
    "bug": BUG,
    "disk_full": "free some space and run the command again; it resumes from the last checkpoint",
    "not_writable": "the project folder, .pedigree and the DVC cache must be writable by the current user",
    "heartbeat": "the stack of each thread is at the end of its log",
    "timeout": "raise or remove the limit in the profile; the same command resumes from the last checkpoint",
}
CANCELLED = "cancelled.json"
"""In a scratch folder: `pedigree cancel` has ended the job; it must not be retried."""
FORCED = "forced.json"
"""In a scratch folder: the work was started by `--force`."""
POLL_S = 0.1
LINGER_S = 60.0
"""A job that has reported its end but does not exit is ended after this time."""
BACKOFF_S = (1.0, 5.0, 30.0)
"""Pauses before successive retries."""
PREEMPTIONS = 10
"""Consecutive preemptions allowed without progress."""
LONGEST_PAUSE_S = 300.0
"""Upper bound of the pause between preemptions, which doubles each time."""


def working(jobs: Launchers, scratch: Path) -> Handle | None:
    """The job of a scratch folder that may still be active: queued, running, or elsewhere and without a reported end."""
    handle = jobs.find(scratch)
    state = jobs.poll(handle).state if handle else "lost"
    return handle if state in ("queued", "running") or (state == "unknown" and not has_reported(scratch)) else None


def is_unrecorded(scratch: Path, artifact: Path) -> bool:
    """Whether the artifact in place was made by the job of the scratch folder: published, but possibly not yet recorded."""
    done, record = read_done(scratch), artifact / "record.json"
    if not isinstance(done, Success) or not record.exists():
        return False
    found = read_json(record)
    return (found.get("key"), found.get("content")) == (scratch.name, done.content)


def is_forced(scratch: Path) -> bool:
    """Whether `--force` started this work, so that its result replaces the cached one."""
    return (scratch / FORCED).exists()


def will_replace(scratch: Path, artifact: Path) -> bool:
    """Whether `--force` started this work to replace the artifact in place, and has not done so yet."""
    return is_forced(scratch) and not is_unrecorded(scratch, artifact)


def begin_again(scratch: Path) -> None:
    """Remove everything a job has left, for `--force`."""
    shutil.rmtree(scratch, ignore_errors=True)
    write_json(scratch / FORCED, {})


def await_elsewhere(run: RunContext, node: Node, handle: Handle, placement: Placement, hold: HeldLease, pulse: heartbeat.Listener) -> bool:
    """Wait for a job on another machine, which takes no slots here; return whether it succeeded.

    `pulse` has followed the job's heartbeat since the leases were requested.

    Raises:
        StageFailed: it was canceled in the meantime, or failed in a way that another attempt would repeat.
        LeaseLost: another runner has taken over.
    """
    scratch = Path(handle.scratch)
    was_cancelled = (scratch / CANCELLED).exists()  # canceled before this run, which resumes it
    run.watch(StageStarted(node.address, scratch, "its job runs on another machine, or ran before a reboot"))
    failure = _outcome(run, node, _Watch(handle, placement, pulse), hold)
    _record_end(scratch, attempts_here(scratch), failure)
    if failure is not None and failure[0] not in RESUMED and not (failure[0] == "cancelled" and was_cancelled):
        _fence(hold)  # ends the job if it still runs
        raise StageFailed(node.address, failure[0], _with_remedy(*failure), _shown_log(run, scratch))
    return failure is None


def run_job(
    run: RunContext, node: Node, scratch: Path, handle: Handle | None, placement: Placement, place: HeldSlots | Scheduler, hold: HeldLease
) -> None:
    """Run the job until it succeeds; retry transient failures and record every attempt.

    `handle`: of a job that is already running. `place`: where attempts start.

    Raises:
        StageFailed: the cause is permanent, or no retry is left.
        LeaseLost: another runner has taken over.
    """
    failures, preemptions, reached = 0, 0, _reached(scratch)
    attempts = attempts_here(scratch)
    detail = "re-attached to the job of an earlier run" if handle else ""
    while True:
        if handle is None:
            fence = _fence(hold)
            for left in ("done.json", "progress.json", CANCELLED, MEETING):
                (scratch / left).unlink(missing_ok=True)
            shutil.rmtree(scratch / "out", ignore_errors=True)
            shutil.rmtree(scratch / PULSES, ignore_errors=True)
            attempts.append(_attempt(scratch, read_spec(scratch).code))
            write_json(scratch / ATTEMPTS, attempts)
            handle = submit(run, node, scratch, len(attempts), place, hold, fence)
        run.watch(StageStarted(node.address, scratch, detail))
        failure = _outcome(run, node, _Watch(handle, placement, heartbeat.Listener()), hold)
        attempts = attempts_here(scratch)
        _record_end(scratch, attempts, failure)
        if failure is None:
            return
        cause, message = failure
        further = _reached(scratch) != reached
        if further:  # progress resets the counters, so that occasional failures never exhaust the retries
            failures, preemptions, reached = 0, 0, _reached(scratch)
        preemptions, failures = (preemptions + 1, failures) if cause == "preempted" else (0, failures + 1)
        if preemptions > PREEMPTIONS:
            raise StageFailed(node.address, cause, _preempted(preemptions, node), _shown_log(run, scratch))
        if cause not in RESUMED or failures > placement.retries:
            tried = f" (attempt {failures} of {placement.retries + 1})" if cause in RETRIED else ""
            raise StageFailed(node.address, cause, _with_remedy(cause, f"{message}{tried}"), _shown_log(run, scratch))
        if cause == "out_of_memory":
            message += f"; {_shrink(node, scratch, message)}"
        detail = f"attempt {len(attempts) + 1} after: {message}"
        run.watch(StageWaiting(node.address, detail))
        if run.cancelled.wait(_pause_s(failures, preemptions, further)):
            raise Cancelled("canceled before the next attempt")
        handle = None


def submit(run: RunContext, node: Node, scratch: Path, attempt: int, place: HeldSlots | Scheduler, hold: HeldLease, fence: Fence) -> Handle:
    """Submit a job, again and again while its scheduler accepts none."""
    numerics, tries = read_spec(scratch).numerics, 0
    try:
        while True:
            try:
                return run.jobs().submit(scratch, numerics, attempt, place, fence)
            except Deferred as error:
                write_json(scratch / DEFERRED, {"waiting": str(error)})
                run.watch(StageWaiting(node.address, str(error)))
            until = time.monotonic() + BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            while time.monotonic() < until:
                if run.cancelled.wait(POLL_S) or (scratch / CANCELLED).exists():
                    _fence(hold)
                    raise Cancelled("canceled before its job was submitted")
            tries, fence = tries + 1, _fence(hold)  # had the scheduler accepted the job after all, that job would stop itself
    finally:
        (scratch / DEFERRED).unlink(missing_ok=True)


def _fence(hold: HeldLease) -> Fence:
    """The fencing token of a new submission; jobs of earlier submissions stop when they see it."""
    try:
        fence = Fence.raised(hold.folder, hold.number)
    except Superseded as error:
        hold.check()  # its message is more precise
        raise LeaseLost(str(error)) from error
    hold.check()
    return fence


def _pause_s(failures: int, preemptions: int, further: bool) -> float:
    """Pause before the next attempt; none after a preemption if the job made progress."""
    if preemptions:
        return 0.0 if further else min(BACKOFF_S[0] * 2 ** (preemptions - 1), LONGEST_PAUSE_S)
    return BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]


def _preempted(count: int, node: Node) -> str:
    again = command("run", node.recipe)
    return (
        f"preempted {count} times in a row without progress. Checkpoint more often (placement.checkpoint_every_s) or use a less contended "
        f"machine, then run {again} again"
    )


class _Watch:
    """Watches a running job. All durations are measured here, with one monotonic clock, from the moment watching began."""

    def __init__(self, handle: Handle, placement: Placement, pulse: heartbeat.Listener) -> None:
        self.handle, self.placement, self.scratch = handle, placement, Path(handle.scratch)
        self._began = time.monotonic()
        self._progress, self._done, self._pulse = heartbeat.Listener(), heartbeat.Listener(), pulse
        self._beat, self._silent = (), 0.0
        self.checked = time.monotonic()
        """When the lease was last seen to be held."""
        self.status = Status("queued")
        self.failure: tuple[str, str] | None = None
        """(cause, message) of an ended job that has failed."""

    def seconds(self) -> float:
        """Seconds the job has been running, by its own report if that is longer: it may have started long before it was watched."""
        return max(time.monotonic() - self._began, reported_s(self.scratch))

    def rest(self) -> None:
        """The job is in a queue: its time has not begun."""
        self._began, self._progress, self._pulse = time.monotonic(), heartbeat.Listener(), heartbeat.Listener()

    def new_beat(self) -> Heartbeat | None:
        """The job's heartbeat if it has changed since the last look."""
        before, self._beat = self._beat, heartbeat.sign(self.scratch / "progress.json")
        self._silent = self._progress.silent_s(self._beat)
        return read_heartbeat(self.scratch) if self._beat and self._beat != before else None

    def overdue(self) -> tuple[str, str] | None:
        """(cause, message) of a job that must be ended; `lingers`: it has a result but does not exit."""
        placement = self.placement
        done = read_done(self.scratch)
        if self._done.silent_s(done is None) > LINGER_S and done is not None:
            return _failure(Status("succeeded" if done.ok else "failed"), self.handle) or ("lingers", "")
        alive = "although its process is alive" if not self.gone() else "and its process is silent"
        if self._silent > placement.heartbeat_timeout_s:
            allowed = f"placement.heartbeat_timeout_s allows {placement.heartbeat_timeout_s:g}"
            return "heartbeat", f"no heartbeat for {self._silent:.0f} s {alive}; {allowed}"
        if placement.timeout_s is not None and self.seconds() > placement.timeout_s:
            return "timeout", f"still running after {self.seconds():.0f} s; placement.timeout_s allows {placement.timeout_s:g}"
        return None

    def gone(self) -> bool:
        """Whether a job elsewhere has been silent past the liveness timeout."""
        return self._pulse.silent_s(heartbeat.sign(self.scratch / PULSES)) > heartbeat.SILENCE_S


def _outcome(run: RunContext, node: Node, watch: _Watch, hold: HeldLease) -> tuple[str, str] | None:
    """Wait until the job has ended and verify its success; return (cause, message) of a failure."""
    failure = _wait(run, node, watch, hold)
    _note_start(watch)
    failure = failure or unproven(watch.scratch, beat=run.transfer_progress(node.address).hashed)
    hold.check()
    return failure


def reported_s(scratch: Path) -> float:
    """Seconds a job has been running, by its own report; 0 without one."""
    return max([0.0, *(float(entry.get("seconds", 0.0)) for entry in heartbeat.read_heartbeats(scratch / PULSES))])


def left_queue(handle: Handle | None, now: datetime, ran_s: float) -> dict[str, str]:
    """The moment at which a scheduler started a job that has run for `ran_s` seconds; none for a job without a queue."""
    queued = handle is not None and handle.launcher != "local"
    return {"left_queue_at": (now - timedelta(seconds=ran_s)).isoformat(timespec="seconds")} if queued else {}


def _note_start(watch: _Watch) -> None:
    """Record when the job left its queue, for a run that finds it later."""
    attempts = attempts_here(watch.scratch)
    if attempts and (known := left_queue(watch.handle, datetime.now(UTC), watch.seconds()) | attempts[-1]) != attempts[-1]:
        write_json(watch.scratch / ATTEMPTS, [*attempts[:-1], known])


def _record_end(scratch: Path, attempts: list[dict[str, Any]], failure: tuple[str, str] | None) -> None:
    if attempts:
        attempts[-1] |= {"ended_at": now(), "cause": failure[0] if failure else "succeeded"} | _attempt_report(scratch)
        write_json(scratch / ATTEMPTS, attempts)


def _wait(run: RunContext, node: Node, watch: _Watch, hold: HeldLease) -> tuple[str, str] | None:
    """Wait until the job has ended; return (cause, message) of a failure. A job that is not left to a later run is ended first."""
    jobs, handle, well = run.jobs(), watch.handle, time.monotonic()
    try:
        while True:
            try:
                if _has_ended(run, node, watch, hold):
                    return watch.failure
                well = time.monotonic()
            except OSError as error:  # of this machine or a disk, which says nothing about the job
                if time.monotonic() - well > heartbeat.SILENCE_S:
                    raise
                _show(run, node, watch, Status(watch.status.state, waiting=f"to look after its job: {error}"))
            if run.cancelled.wait(POLL_S):
                raise Cancelled(
                    "its job keeps running" if run.keep_jobs or watch.status.state == "unknown" else "canceled; its checkpoints are kept"
                )
    except LeaseLost:
        raise  # the job now belongs to another runner
    except OSError as error:
        left = f"its job continues, and {command('run', node.recipe)} finds it again"
        raise StageFailed(node.address, storage_cause(error), f"{error}; {left}".replace(f"{run.project.root}/", "")) from error
    except ArtifactError as error:  # its report is unreadable
        return "refused", str(error).replace(f"{run.project.root}/", "") + _survivors(jobs.cancel(handle))
    except Cancelled as error:
        left = [] if run.keep_jobs else jobs.cancel(handle)
        raise Cancelled(f"{error}{_survivors(left)}") from error
    except BaseException:
        if not run.keep_jobs:
            jobs.cancel(handle)
        raise


def _has_ended(run: RunContext, node: Node, watch: _Watch, hold: HeldLease) -> bool:
    """Look at the job once; what must not go on is ended. How it has failed is `watch.failure`."""
    if time.monotonic() - watch.checked > heartbeat.BEAT_S:
        hold.check()
        watch.checked = time.monotonic()
    jobs, handle = run.jobs(), watch.handle
    status = jobs.poll(handle)
    if status.state == "running" and watch.status.state != "running":
        _note_start(watch)
    _show(run, node, watch, status)
    if status.state == "queued":
        watch.rest()
        if (watch.scratch / CANCELLED).exists():  # since before its scheduler listed it
            jobs.cancel(handle)
    elif status.state == "unknown":
        if (done := read_done(watch.scratch)) is not None or watch.gone():
            never_ran = "preempted", "its scheduler did not answer while the job was in the queue"
            watch.failure = _failure(Status("lost", end=never_ran if status.waiting and done is None else None), handle)
            return True
    elif status.state != "running":
        jobs.cancel(handle, grace_s=0.0)  # child processes left behind
        watch.failure = _failure(status, handle)
        return True
    if beat := watch.new_beat():
        run.watch(StageProgressed(node.address, beat.step, beat.total, reported(beat.numbers), beat.work))
    late = None if status.waiting else watch.overdue()
    if late:
        hung = late[0] != "timeout"  # what still computes may write a checkpoint
        grace_s = min(HUNG_GRACE_S, watch.placement.grace_s) if hung else None
        left = jobs.cancel(handle, grace_s=grace_s, stacks=late[0] == "heartbeat")
        watch.failure = None if late[0] == "lingers" else (late[0], late[1] + _survivors(left))
        return True
    return False


def _show(run: RunContext, node: Node, watch: _Watch, status: Status) -> None:
    """Report what the job waits for if that has changed."""
    before, watch.status = watch.status.waiting, status
    if status.waiting != before:
        run.watch(StageWaiting(node.address, status.waiting) if status.waiting else StageStarted(node.address, watch.scratch, status.place))


def _with_remedy(cause: str, message: str) -> str:
    return f"{message}: {REMEDIES[cause]}" if cause in REMEDIES else message


def _survivors(left: list[int]) -> str:
    return f"; {described(left)}" if left else ""


def _failure(status: Status, handle: Handle) -> tuple[str, str] | None:
    scratch = Path(handle.scratch)
    done = read_done(scratch)
    if status.state == "succeeded":
        return None
    if status.end is not None and not (scratch / CANCELLED).exists():
        return status.end
    if (scratch / CANCELLED).exists():
        return "cancelled", "canceled; its checkpoints are kept"
    if status.memory_ran_out and (done is None or (isinstance(done, Failure) and done.cause in ("lost_engine", "collective"))):
        return "out_of_memory", status.memory_ran_out
    if done is not None:
        return (done.cause, _reason(done)) if isinstance(done, Failure) else None
    if is_full(scratch):
        return "disk_full", f"the job left no result, and the disk of {scratch.parent} is full"
    if status.state == "lost":
        return "lost", "the process disappeared without a result"
    if status.exit_code == OVERTAKEN:
        return "lost", "the job stopped itself because a later submission of it exists"
    if status.exit_code in (-signal.SIGTERM, -signal.SIGUSR1):
        return "preempted", "the job was stopped before it started"
    if status.exit_code is not None and status.exit_code < 0:
        return "crashed", f"the job was killed by signal {-status.exit_code}"
    return "crashed", f"the job exited with code {status.exit_code} and left no result: {_last_line(scratch / 'log.txt')}"


def unproven(scratch: Path, *, thorough: bool = False, beat: Beat = silent) -> tuple[str, str] | None:
    """Verify success: the payload exists and matches the job's report.

    Files whose metadata is unchanged since the job hashed them are not read again unless `thorough`; `beat` reports hashing progress.
    """
    done = read_done(scratch)
    if not isinstance(done, Success):
        return "lost", "the job left no result"
    payload = scratch / "out" / "payload"
    if not payload.is_dir():
        return "lost", "the job's output is missing"
    seen = seen_files(done)
    try:
        files = done.files if not thorough and _looks_as_seen(payload, seen) else scan(payload, beat)
    except ArtifactError as error:
        return "refused", str(error)
    if not files:
        return "refused", "the job ended without an error but wrote no output"
    if files is not done.files and content_hash(files) != done.content:
        return "storage", "the job's output changed after it was reported"
    strange = sorted(path.name for path in (scratch / "out").iterdir() if path.name not in PARTS)
    if strange:
        return "refused", f"the job wrote {', '.join(strange)} next to payload/ and evidence/"
    return None


def seen_files(done: Success) -> dict[str, Hashed]:
    """Payload file → its hash and metadata when the job hashed it."""
    return {name: found.hashed() for name, found in done.seen.items()}


def _looks_as_seen(payload: Path, seen: Mapping[str, Hashed]) -> bool:
    there = {path.relative_to(payload).as_posix() for path in payload.rglob("*") if not path.is_dir() or path.is_symlink()}
    return there == seen.keys() and all(found.is_of(payload / name) for name, found in seen.items())


def _attempt(scratch: Path, code: str) -> dict[str, Any]:
    found = checkpoints_here(scratch)
    return {"started_at": now(), "resumed_from": found[-1] if found else None, "code": read_code(scratch, code)}


def _reached(scratch: Path) -> tuple[list[str], int]:
    """What an attempt would resume from: the latest checkpoint, and bytes of kept answers."""
    return checkpoints_here(scratch)[-1:], answers_size(scratch)


def resumable(scratch: Path) -> bool:
    """Whether there is something to resume from: a checkpoint or kept answers."""
    return bool(checkpoints_here(scratch) or answers_size(scratch))


def numerics_changes(before: Numerics, now: Numerics) -> list[str]:
    """Numerics that changed, except `bf16_products`: only the job can resolve `auto`, from the checkpoint rather than the last spec."""
    old, new = before.deciding(), now.deciding()
    names = [name for name in new if old.get(name) != new[name] and name != "bf16_products"]
    return [f"{name} {old.get(name)} -> {new[name]}" for name in names]


def _shrink(node: Node, scratch: Path, message: str) -> str:
    """Halve the micro-batch in the job's spec. The gradient is unchanged up to rounding, and the record states the change.

    Raises:
        StageFailed: nothing is left to shrink.
    """
    spec = read_spec(scratch)
    trains = "deepspeed" in node.declaration.engine
    smaller = spec.numerics.smaller(node.config) if trains else None
    if smaller is None:
        less = "a higher zero_stage, gradient_checkpointing or more ranks" if trains else "fewer threads or engines for this stage"
        raise StageFailed(node.address, "out_of_memory", f"{message}, and nothing is left to shrink: use a larger machine, or a "
                          f"profile with {less}")  # fmt: skip
    change = ", ".join(numerics_changes(spec.numerics, smaller))
    marks = (*spec.marks, f"{change}: memory had run out")
    update = {"numerics": smaller, "asked": spec.asked or spec.numerics, "allow_numerics_change": True, "marks": marks}
    write_spec(scratch, spec.model_copy(update=update))
    return change


def _attempt_report(scratch: Path) -> dict[str, Any]:
    """What an attempt reported of itself: the checkpoint that it resumed from, its checkpoint costs and its peak memory."""
    try:
        done = read_done(scratch)
    except ArtifactError:
        done = None
    costs = {"checkpoints": done.checkpoints} if done and any(done.checkpoints.values()) else {}
    costs |= {"peak": done.peak} if done and done.peak else {}
    return {"resumed_from": done.resumed_from} | costs if done else {}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _reason(done: Failure) -> str:
    """What a job reports: all lines of an expected failure, which show rows or fields; the first line of others, which may be traces."""
    return done.message.strip() if done.cause == "refused" and done.message.strip() else _first_line(done.message)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1][:300] if lines else "the log is empty"


def _shown_log(run: RunContext, scratch: Path) -> str:
    return (scratch / "log.txt").relative_to(run.project.root).as_posix()
