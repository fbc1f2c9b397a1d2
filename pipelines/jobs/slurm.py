"""Jobs in the queue of a Slurm cluster, whose nodes see the project, its environment and DVC's cache under the paths of this machine.

A job is found by the token of its submission, which is its comment: a controller that has lost its state gives the number of a job away
again. A controller that does not answer says nothing about a job.
"""

import shlex
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics, Slurm
from pedigree.data.artifacts.artifacts import write_json, write_text
from pedigree.data.host.faults import fault_point
from pedigree.data.store.fence import Fence
from pedigree.data.store.heartbeat import SILENCE_S
from pedigree.pipelines.jobs.job_environment import job_environment
from pedigree.pipelines.jobs.launcher import STACKS, STACKS_S, Away, Deferred, Polled, Status, job_command
from pedigree.pipelines.jobs.scratch_state import JOB, Handle, read_spec, reported_success
from pedigree.pipelines.jobs.slurm_client import ask, batch_script, deferral, exit_code, is_away, is_installed, message, resources
from pedigree.stages.job.outcome import RESUME_ME

SCRIPT = "job.sh"
ASK_S = 2.0
"""Seconds between two queries, each about all jobs of this user."""
AWAY_S = 60.0
"""How long to try to end a job while the controller does not answer."""
ARRIVAL_S = 20.0
"""How long to look for a job in the queue when the answer to its submission was lost."""
KILL_S = 60.0
"""Longest wait for the end of a job that Slurm kills: its KillWait is 30 s by default."""
QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED", "STOPPED")
ACTIVE = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING")
ENDS = {
    "TIMEOUT": ("preempted", "Slurm ended the job at its time limit"),
    "DEADLINE": ("timeout", "Slurm ended the job at its deadline"),
    "NODE_FAIL": ("lost", "Slurm lost the job's node"),
    "BOOT_FAIL": ("lost", "Slurm could not boot the job's node"),
    "PREEMPTED": ("preempted", "Slurm preempted the job"),
    "CANCELLED": ("cancelled", "the job was canceled in Slurm; its checkpoints are kept"),
    "OUT_OF_MEMORY": ("out_of_memory", "the job exceeded the memory that Slurm gave it"),
}
"""State of a job that ended without a result → (cause, message)."""
REPORTED = (0, 1, RESUME_ME, None)
"""Exit codes of a job that has written a report; None: unknown."""


@dataclass(frozen=True)
class _Entry:
    """A job in Slurm's list."""

    number: str
    state: str
    nodes: str
    reason: str


def _jobs(_: None) -> dict[str, _Entry] | None:
    """Token → job of this user; None if the controller does not answer, or Slurm is not installed here."""
    if not is_installed():
        return None
    answer = ask("squeue", "--noheader", "--me", "--states=all", "--format=%A|%T|%N|%r|%k")
    rows = [line.split("|", 4) for line in answer.stdout.splitlines() if line.count("|") >= 4]
    return None if answer.returncode else {row[4]: _Entry(*row[:4]) for row in rows}


class SlurmLauncher:
    """Submits each job as one allocation. Slurm does not requeue it: the next attempt resumes from its checkpoint."""

    name = "slurm"

    def __init__(self, project: Project) -> None:
        self.project, self._queue = project, Polled(_jobs)
        self._running: set[str] = set()
        """Tokens of jobs that were seen running, and so go on while the controller is away."""
        self._ends: dict[str, tuple[float, int | None]] = {}
        """Token → when a job without a result was first seen to have ended, and its exit code."""

    def submit(self, scratch: Path, numerics: Numerics, attempt: int, launcher: Slurm, fence: Fence | None = None) -> Handle:
        """Queue the job described by `scratch/spec.json`.

        Raises:
            Deferred: Slurm accepts no job now.
            PedigreeError: Slurm rejects it.
        """
        spec = read_spec(scratch)
        told = {"token": uuid.uuid4().hex, "steps": numerics.nodes > 1, "ranks": numerics.world_size}
        handle = Handle(launcher=self.name, scratch=str(scratch), attempt=attempt, told=told, submitted_at=time.time())
        write_json(scratch / JOB, handle.model_dump())  # before the job exists, so that it is found if this process dies now
        (scratch / "log.txt").touch()  # `pedigree logs` finds it while the job is queued
        write_text(scratch / SCRIPT, _script(scratch, numerics, spec.placement.grace_s, launcher.setup))
        answer = ask(
            "sbatch", "--parsable", "--no-requeue", "--export=ALL", f"--job-name={spec.address}", f"--comment={told['token']}",
            "--open-mode=append", f"--output={scratch / 'log.txt'}", f"--chdir={self.project.root}",
            f"--signal={'' if told['steps'] else 'B:'}TERM@{spec.placement.grace_s}",
            *resources(numerics, spec.placement, launcher), str(scratch / SCRIPT),
            environment=job_environment(scratch, numerics, self.project.code(spec.code), [], fence),
        )  # fmt: skip
        later = deferral(answer) or (message(answer) if answer.returncode and is_away(answer) and not self._arrives(handle.token) else None)
        if later is not None:
            (scratch / JOB).unlink()
            raise Deferred(f"for Slurm to accept its job: {later}")
        if answer.returncode and not is_away(answer):
            (scratch / JOB).unlink()
            raise PedigreeError(f"Slurm rejects the job of {spec.address}: {message(answer)}")
        fault_point("job started")
        self._queue.forget()
        return handle

    def poll(self, handle: Handle) -> Status:
        token, scratch = handle.token, Path(handle.scratch)
        queue = self._queue.get(None, ASK_S)
        if queue is not None and (entry := queue.get(token)) is not None:
            if entry.state in ACTIVE:
                self._running.add(token)
                return Status("running", place=f"Slurm job {entry.number} on {entry.nodes}")
            if entry.state in QUEUED:
                reason = "" if entry.reason == "None" else f" ({entry.reason})"
                return Status("queued", waiting=f"in Slurm's queue as job {entry.number}{reason}")
            return self._ended(scratch, token, entry)
        if (result := reported_success(scratch)) is not None:
            return Status("succeeded" if result else "failed")
        if queue is not None or not is_installed():
            return Status("unknown")
        return Status("running") if token in self._running else Status("queued", waiting="for Slurm's controller to answer")

    def cancel(self, handle: Handle, grace_s: float | None = None, stacks: bool = False) -> list[int]:
        """End a job: remove it from the queue, or ask it to stop, and kill it after `grace_s` seconds, by default its placement's.

        `stacks`: a job of one process first prints each thread's stack to the log.

        Raises:
            Away: Slurm does not answer.
        """
        entry = self._active(handle)
        if entry is None:
            return []
        whom = [] if handle.told.get("steps") else ["--batch"]
        if entry.state in ACTIVE and grace_s != 0.0:
            for number in STACKS if stacks and handle.told.get("ranks") == 1 else ():
                ask("scancel", f"--signal={int(number)}", *whom, entry.number)
                time.sleep(STACKS_S)
            ask("scancel", f"--signal={int(signal.SIGTERM)}", *whom, entry.number)
            self._await_end(handle, read_spec(Path(handle.scratch)).placement.grace_s if grace_s is None else grace_s)
        if self._active(handle) is not None:
            ask("scancel", entry.number)
            self._await_end(handle, KILL_S)
        return []

    def _await_end(self, handle: Handle, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._active(handle) is not None and time.monotonic() < deadline:
            time.sleep(ASK_S)

    def _active(self, handle: Handle) -> _Entry | None:
        """The job, unless it has ended, or reported its end to a run that Slurm does not answer.

        Raises:
            Away: Slurm does not answer.
        """
        deadline = time.monotonic() + AWAY_S
        while (queue := self._queue.get(None, 0.0)) is None:
            if reported_success(Path(handle.scratch)) is not None:
                return None
            if not is_installed() or time.monotonic() > deadline:
                raise Away(f"Slurm does not answer, so its job in {handle.scratch} may go on: try again on a login node")
            time.sleep(ASK_S)
        entry = queue.get(handle.token)
        return entry if entry is not None and entry.state in (*QUEUED, *ACTIVE) else None

    def _arrives(self, token: str) -> bool:
        """Whether a job is in the queue, or comes there soon."""
        deadline = time.monotonic() + ARRIVAL_S
        while token not in (self._queue.get(None, 0.0) or {}):
            if time.monotonic() > deadline:
                return False
            time.sleep(ASK_S)
        return True

    def _ended(self, scratch: Path, token: str, entry: _Entry) -> Status:
        """State of a job that Slurm knows to have ended. Network file systems show a report late, so one that may exist is waited for."""
        result, ended = reported_success(scratch), entry.state.partition(" ")[0]
        if result:
            return Status("succeeded")
        if ended in ENDS and (result is None or ended == "CANCELLED"):
            cause, text = ENDS[ended]
            return Status("failed", end=(cause, f"{text} (job {entry.number}{f' on {entry.nodes}' if entry.nodes else ''})"))
        if ended == "OUT_OF_MEMORY":  # another process of the job has reported what it saw of this one's end
            return Status("failed", memory_ran_out=f"{ENDS[ended][1]} (job {entry.number})")
        if token not in self._ends:
            self._ends[token] = time.monotonic(), exit_code(entry.number)
        since, code = self._ends[token]
        if result is None and code in REPORTED and time.monotonic() - since < SILENCE_S:
            return Status("running", has_ended=True)
        return Status("lost" if result is None and code is None else "failed", code)


def _script(scratch: Path, numerics: Numerics, grace_s: int, setup: Sequence[str]) -> str:
    """The batch script of a job; on several nodes each task is one of them."""
    if numerics.nodes == 1:
        command = shlex.join(job_command(scratch, numerics, grace_s))
    else:
        node = shlex.join([sys.executable, "-m", "pedigree.stages.training.nodes", str(scratch)])
        role = shlex.quote(f"[ $SLURM_PROCID = 0 ] && role=lead || role=join; exec {node} $role")
        command = f"srun --wait=0 --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} sh -c {role}"
    return batch_script(setup, command)
