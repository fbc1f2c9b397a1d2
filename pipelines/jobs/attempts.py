"""A stage's job until it has succeeded: watching, naming what went wrong, and trying again what may pass.

Success is proved, never believed: `unproven` looks at what the job has left.
"""

import shutil
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.base.texts import command
from configs.language.execution import Numerics, Placement
from configs.language.graph import Node
from data.artifacts.artifacts import PARTS, ArtifactError, content_hash, read_json, scan, write_json
from data.store import heartbeat
from data.store.fence import OVERTAKEN, Fence, Overtaken
from data.store.hashing import Beat, Hashed, silent
from pipelines.jobs.context import RunContext, StageFailed
from pipelines.jobs.launcher import Handle, Launcher, Status
from pipelines.jobs.lease import Cancelled, Hold, LeaseLost
from pipelines.jobs.processes import described
from pipelines.jobs.progress_kept import kept_here
from pipelines.jobs.scratch_state import ATTEMPTS, attempts_here, has_reported, read_code, read_spec, write_spec
from stages.job.job import PULSES, Failure, Success, checkpoint_names, is_full, read_done

RETRIED = frozenset({"crashed", "out_of_memory", "storage", "lost", "lost_engine", "collective", "heartbeat"})
"""Causes that may pass: the job goes on from its last checkpoint, after `out_of_memory` in smaller micro-batches. `refused`,
`bug`, `not_finite`, `disk_full`, `not_writable` and `timeout` would end the same way."""
BUG = "a bug in Pedigree, its traceback is at the end of the log; please report it"
REMEDIES = {
    "bug": BUG,
    "disk_full": "free some space and type the command again: it goes on from the last checkpoint",
    "not_writable": "the project's folder, .pedigree and the DVC cache must be writable for whoever runs it",
    "heartbeat": "the stacks of its threads are at the end of its log",
    "timeout": "raise it in the profile, or leave it out; the same command goes on from the last checkpoint",
}
CANCELLED = "cancelled.json"
"""In a scratch folder: `pedigree cancel` has ended its job, which is not to be tried again."""
FORCED = "forced.json"
"""In a scratch folder: `--force` began this work."""
POLL_S = 0.1
LINGER_S = 60.0
"""A job that has reported its end but does not exit is ended after so long."""
BACKOFF_S = (1.0, 5.0, 30.0)
"""Pauses before the further attempts."""
PREEMPTIONS = 10
"""So often in a row a job may be asked to stop without having come further."""
LONGEST_PAUSE_S = 300.0
"""Between two of them the pause doubles, up to this."""


def working(jobs: Launcher, scratch: Path) -> Handle | None:
    """The job of a scratch folder that may still be at work: one that runs here, or one of elsewhere that has not reported its end."""
    handle = jobs.find(scratch)
    state = jobs.poll(handle).state if handle else "lost"
    return handle if state == "running" or (state == "unknown" and not has_reported(scratch)) else None


def is_unrecorded(scratch: Path, artifact: Path) -> bool:
    """Whether the artifact in place is what the job of the scratch folder has made: published, and perhaps not recorded any more."""
    done, record = read_done(scratch), artifact / "record.json"
    if not isinstance(done, Success) or not record.exists():
        return False
    found = read_json(record)
    return (found.get("key"), found.get("content")) == (scratch.name, done.content)


def is_forced(scratch: Path) -> bool:
    """Whether `--force` began this work: what the cache knows is what it is to replace."""
    return (scratch / FORCED).exists()


def begin_again(scratch: Path) -> None:
    """Removes all that a job has left, for `--force`."""
    shutil.rmtree(scratch, ignore_errors=True)
    write_json(scratch / FORCED, {})


def is_elsewhere(jobs: Launcher, handle: Handle) -> bool:
    """Whether this launcher cannot look after a job: another machine's does."""
    return jobs.poll(handle).state == "unknown"


def await_elsewhere(run: RunContext, node: Node, handle: Handle, placement: Placement, hold: Hold, heard: heartbeat.Listener) -> bool:
    """Waits for a job of another machine, which takes no slots of this one; whether it has succeeded.

    Args:
        run: what it belongs to.
        node: its stage.
        handle: the job.
        placement: how it is watched.
        hold: the lease of its key.
        heard: who has listened to its signs of life already, while leases were waited for.

    Raises:
        StageFailed: it was cancelled meanwhile.
        LeaseLost: another runner has taken over.
    """
    scratch = Path(handle.scratch)
    was_cancelled = (scratch / CANCELLED).exists()  # before this run: it goes on from there
    run.watch(node.address, "running", "its job runs on another machine, or ran before a reboot", folder=scratch)
    failure = _wait(run, handle, _Watch(handle, placement, heard), hold) or unproven(scratch, beat=run.telling(node.address).hashed)
    hold.check()
    attempts = attempts_here(scratch)
    if attempts:
        attempts[-1] |= {"ended_at": now(), "cause": failure[0] if failure else "succeeded"} | _told(scratch)
        write_json(scratch / ATTEMPTS, attempts)
    if failure is not None and failure[0] == "cancelled" and not was_cancelled:
        raise StageFailed(node.address, *failure, _shown_log(run, scratch))
    return failure is None


def run_job(run: RunContext, node: Node, scratch: Path, handle: Handle | None, placement: Placement, names: list[str], hold: Hold) -> None:
    """Runs the job until it succeeds; failures that may pass are tried again, and every attempt is noted.

    Args:
        run: what it belongs to.
        node: its stage.
        scratch: its folder.
        handle: of a job that is at work already.
        placement: how it is watched.
        names: of the slots that it takes.
        hold: the lease of its key.

    Raises:
        StageFailed: a cause that will not pass, or no retry left.
        LeaseLost: another runner has taken over.
    """
    history, attempts = scratch / ATTEMPTS, attempts_here(scratch)
    failures, preemptions, reached = 0, 0, _reached(scratch)
    detail = "re-attached to the job of an earlier run" if handle else ""
    while True:
        if handle is None:
            fence = _fence(hold)
            for left in ("done.json", "progress.json", CANCELLED):
                (scratch / left).unlink(missing_ok=True)
            shutil.rmtree(scratch / "out", ignore_errors=True)
            shutil.rmtree(scratch / PULSES, ignore_errors=True)
            spec = read_spec(scratch)
            attempts.append(_attempt(scratch, spec.code))
            write_json(history, attempts)
            handle = run.jobs().submit(scratch, spec.numerics, len(attempts), names, fence)
        run.watch(node.address, "running", detail, folder=scratch)
        failure = _wait(run, handle, _Watch(handle, placement, heartbeat.Listener()), hold)
        if failure is None:
            failure = unproven(scratch, beat=run.telling(node.address).hashed)
        hold.check()
        if attempts:
            attempts[-1] |= {"ended_at": now(), "cause": failure[0] if failure else "succeeded"} | _told(scratch)
            write_json(history, attempts)
        if failure is None:
            return
        cause, message = failure
        further = _reached(scratch) != reached
        if further:  # what goes wrong now and then may go wrong any number of times
            failures, preemptions, reached = 0, 0, _reached(scratch)
        preemptions, failures = (preemptions + 1, failures) if cause == "preempted" else (0, failures + 1)
        if preemptions > PREEMPTIONS:
            raise StageFailed(node.address, cause, _stormy(preemptions, node), _shown_log(run, scratch))
        if cause not in RETRIED | {"preempted"} or failures > placement.retries:
            tried = f" (attempt {failures} of {placement.retries + 1})" if cause in RETRIED else ""
            remedy = f": {REMEDIES[cause]}" if cause in REMEDIES else ""
            raise StageFailed(node.address, cause, f"{message}{tried}{remedy}", _shown_log(run, scratch))
        if cause == "out_of_memory":
            message += f"; {_shrink(node, scratch, message)}"
        detail = f"attempt {len(attempts) + 1} after: {message}"
        run.watch(node.address, "waiting", detail)
        if run.cancelled.wait(_pause_s(failures, preemptions, further)):
            raise Cancelled("cancelled before a further attempt")
        handle = None


def _fence(hold: Hold) -> Fence:
    """The token of a new submission: jobs of all earlier ones end when they see it."""
    try:
        fence = Fence.raised(hold.folder, hold.number)
    except Overtaken as error:
        hold.check()  # says it better
        raise LeaseLost(str(error)) from error
    hold.check()
    return fence


def _pause_s(failures: int, preemptions: int, further: bool) -> float:
    """Before the next attempt: none after a pre-emption that had left time to work."""
    if preemptions:
        return 0.0 if further else min(BACKOFF_S[0] * 2 ** (preemptions - 1), LONGEST_PAUSE_S)
    return BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]


def _stormy(count: int, node: Node) -> str:
    again = command("run", node.recipe)
    return (
        f"it was asked to stop {count} times in a row without coming further: whoever pre-empts jobs here leaves it no time. Let it write "
        f"checkpoints more often (placement.checkpoint_every_s), or give it a quieter machine, then type {again} again"
    )


class _Watch:
    """What is listened to while a job is at work. Every length of time is counted here, by one clock, from the moment this began."""

    def __init__(self, handle: Handle, placement: Placement, heard: heartbeat.Listener) -> None:
        self.handle, self.placement, self.scratch = handle, placement, Path(handle.scratch)
        self._began = time.monotonic()
        self._progress, self._done, self._pulse = heartbeat.Listener(), heartbeat.Listener(), heard

    def seconds(self) -> float:
        """How long the job has been running, as it says itself; it may have begun long before it was watched."""
        said = [float(entry.get("seconds", 0.0)) for entry in heartbeat.told(self.scratch / PULSES)]
        return max([time.monotonic() - self._began, *said])

    def overdue(self) -> tuple[str, str] | None:
        """(cause, message) of a job that must be ended; `lingers`: it has a result and does not exit."""
        placement = self.placement
        done = read_done(self.scratch)
        if self._done.silent_s(done is None) > LINGER_S and done is not None:
            return ("crashed", _first_line(done.message)) if isinstance(done, Failure) else ("lingers", "")
        silent = self._progress.silent_s(heartbeat.sign(self.scratch / "progress.json"))
        alive = "though its process lives" if not self.gone() else "nor of its process"
        if silent > placement.heartbeat_timeout_s:
            allowed = f"placement.heartbeat_timeout_s allows {placement.heartbeat_timeout_s:g}"
            return "heartbeat", f"no sign of work for {silent:.0f} s, {alive}; {allowed}"
        if placement.timeout_s is not None and self.seconds() > placement.timeout_s:
            return "timeout", f"still running after {self.seconds():.0f} s; placement.timeout_s allows {placement.timeout_s:g}"
        return None

    def gone(self) -> bool:
        """Whether a job of elsewhere has been silent for so long that nothing of it is left."""
        return self._pulse.silent_s(heartbeat.sign(self.scratch / PULSES)) > heartbeat.SILENCE_S


def _wait(run: RunContext, handle: Handle, watch: _Watch, hold: Hold) -> tuple[str, str] | None:
    """Until the job has ended; returns (cause, message) of a failure. On every other way out a job of this machine is ended first."""
    jobs, checked = run.jobs(), time.monotonic()
    try:
        while True:
            status = jobs.poll(handle)
            if status.state == "unknown":
                if read_done(watch.scratch) is not None or watch.gone():
                    return _failure(Status("lost"), handle)
            elif status.state != "running":
                jobs.cancel(handle, grace_s=0.0)  # children that it has left behind
                return _failure(status, handle)
            late = watch.overdue()
            if late:
                left = jobs.cancel(handle, stacks=late[0] == "heartbeat")
                return None if late[0] == "lingers" else (late[0], late[1] + _undying(left))
            if time.monotonic() - checked > heartbeat.BEAT_S:
                hold.check()
                checked = time.monotonic()
            if run.cancelled.wait(POLL_S):
                raise Cancelled("its job goes on" if run.keep_jobs or status.state == "unknown" else "cancelled; its checkpoints are kept")
    except LeaseLost:
        raise  # the job is another runner's now
    except ArtifactError as error:  # what it has left is no report
        return "refused", str(error).replace(f"{run.project.root}/", "") + _undying(jobs.cancel(handle))
    except Cancelled as error:
        left = [] if run.keep_jobs else jobs.cancel(handle)
        raise Cancelled(f"{error}{_undying(left)}") from error
    except BaseException:
        if not run.keep_jobs:
            jobs.cancel(handle)
        raise


def _undying(left: list[int]) -> str:
    return f"; {described(left)}" if left else ""


def _failure(status: Status, handle: Handle) -> tuple[str, str] | None:
    scratch = Path(handle.scratch)
    done = read_done(scratch)
    if status.state == "succeeded":
        return None
    if (scratch / CANCELLED).exists():
        return "cancelled", "cancelled; its checkpoints are kept"
    if status.memory_ran_out and (done is None or (isinstance(done, Failure) and done.cause in ("lost_engine", "collective"))):
        return "out_of_memory", status.memory_ran_out
    if done is not None:
        return (done.cause, _first_line(done.message)) if isinstance(done, Failure) else None
    if is_full(scratch):
        return "disk_full", f"it left no result, and the disk of {scratch.parent} is full"
    if status.state == "lost":
        return "lost", "its process is gone and left no result"
    if status.exit_code == OVERTAKEN:
        return "lost", "a later submission of the same job exists, so it has ended itself"
    if status.exit_code in (-signal.SIGTERM, -signal.SIGUSR1):
        return "preempted", "it was asked to stop before it had started"
    if status.exit_code is not None and status.exit_code < 0:
        return "crashed", f"it was killed by signal {-status.exit_code}"
    return "crashed", f"it exited with code {status.exit_code} and left no result: {_last_line(scratch / 'log.txt')}"


def unproven(scratch: Path, *, thorough: bool = False, beat: Beat = silent) -> tuple[str, str] | None:
    """Success is proved: the payload is there, and is what the job reported.

    Files that look from outside as they did when the job hashed them are not read again, unless `thorough`; `beat` hears of it.
    """
    done = read_done(scratch)
    if not isinstance(done, Success):
        return "lost", "it left no result"
    payload = scratch / "out" / "payload"
    if not payload.is_dir():
        return "lost", "its output is gone"
    seen = seen_files(done)
    try:
        files = done.files if not thorough and _looks_as_seen(payload, seen) else scan(payload, beat)
    except ArtifactError as error:
        return "refused", str(error)
    if not files:
        return "refused", "it ended without an error and without output"
    if files is not done.files and content_hash(files) != done.content:
        return "storage", "its output has changed since it reported it"
    strange = sorted(path.name for path in (scratch / "out").iterdir() if path.name not in PARTS)
    if strange:
        return "refused", f"it wrote {', '.join(strange)} beside payload/ and evidence/"
    return None


def seen_files(done: Success) -> dict[str, Hashed]:
    """Payload file → what the job saw when it hashed it."""
    return {name: found.hashed() for name, found in done.seen.items()}


def _looks_as_seen(payload: Path, seen: Mapping[str, Hashed]) -> bool:
    there = {path.relative_to(payload).as_posix() for path in payload.rglob("*") if not path.is_dir() or path.is_symlink()}
    return there == seen.keys() and all(found.is_of(payload / name) for name, found in seen.items())


def _attempt(scratch: Path, code: str) -> dict[str, Any]:
    found = checkpoint_names(scratch)
    return {"started_at": now(), "resumed_from": found[-1] if found else None, "code": read_code(scratch, code)}


def _reached(scratch: Path) -> tuple[list[str], int]:
    """What an attempt would go on from: the latest checkpoint, and bytes of what was generated, here or by an endpoint."""
    return checkpoint_names(scratch)[-1:], kept_here(scratch).size


def resumable(scratch: Path) -> bool:
    """Whether a job of this scratch folder would go on from something: a checkpoint, finished chunks, kept answers or replies."""
    return bool(checkpoint_names(scratch) or kept_here(scratch))


def numerics_changes(before: Numerics, now: Numerics) -> list[str]:
    """But how products of bf16 are computed: only the job knows what `auto` becomes, and it asks the checkpoint, not its last spec."""
    pairs = ((name, old, new) for (name, old), (_, new) in zip(before, now, strict=True))
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new and name != "bf16_products"]


def _shrink(node: Node, scratch: Path, message: str) -> str:
    """Rewrites the job's spec for half the micro-batch: the gradient stays what it was, to rounding, and the record will say so.

    Raises:
        StageFailed: there is nothing left to make smaller.
    """
    spec = read_spec(scratch)
    smaller = spec.numerics.smaller(node.config) if "deepspeed" in node.declaration.engine else None
    if smaller is None:
        raise StageFailed(node.address, "out_of_memory", f"{message}, and nothing is left to make smaller: take a larger machine, or a "
                          "profile with a higher zero_stage, gradient_checkpointing or more ranks")  # fmt: skip
    change = ", ".join(numerics_changes(spec.numerics, smaller))
    marks = (*spec.marks, f"{change}: memory had run out")
    update = {"numerics": smaller, "asked": spec.asked or spec.numerics, "allow_numerics_change": True, "marks": marks}
    write_spec(scratch, spec.model_copy(update=update))
    return change


def _told(scratch: Path) -> dict[str, Any]:
    """What an attempt that lived to tell says of itself: the checkpoint that it went on from, what its own took, and its
    peak memory."""
    try:
        done = read_done(scratch)
    except ArtifactError:
        done = None
    costs = {"checkpoints": done.checkpoints} if done and any(done.checkpoints.values()) else {}
    costs |= {"peak": done.peak} if done and done.peak else {}
    return {"resumed_from": done.resumed_from} | costs if done else {}


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "it gave no reason"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1][:300] if lines else "its log is empty"


def _shown_log(run: RunContext, scratch: Path) -> str:
    return (scratch / "log.txt").relative_to(run.project.root).as_posix()
