"""The launcher starts, polls and ends jobs. It keeps no state: `job.json` holds all that is needed to find a job again, and its processes
carry the scratch folder in their environment.
"""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import ArtifactError, write_json
from pedigree.data.host.faults import fault_point
from pedigree.data.store.fence import Fence
from pedigree.pipelines.jobs import memory_kills
from pedigree.pipelines.jobs.job_environment import job_environment
from pedigree.pipelines.jobs.processes import (
    POLL_S,
    Process,
    catches,
    command_line,
    described,
    kill_all,
    leads_session,
    marked,
    processes_of,
    send,
    send_to_group,
    this_machine,
    works_in,
)
from pedigree.pipelines.jobs.scratch_state import JOB, SPEC, Handle, read_job, read_mapping
from pedigree.pipelines.jobs.slots import HeldSlots
from pedigree.stages.job.outcome import read_done

Place = TypeVar("Place", bound=Hashable)
Answer = TypeVar("Answer")
State = Literal["queued", "running", "succeeded", "failed", "lost", "unknown"]
"""`queued`: in a scheduler's queue. `lost`: gone without a result. `unknown`: started where this launcher cannot look; only its heartbeat
shows whether it is alive."""
HUNG_GRACE_S = 30
"""Of a job that has made no progress."""
STACKS = (signal.SIGUSR2, signal.SIGRTMIN)
"""Make a job print the stack of its main thread, then those of all threads."""
STACKS_S = 0.5
LOOK_S = 5.0
"""Seconds between scans for a job's processes."""


@dataclass(frozen=True)
class Status:
    """State of a job."""

    state: State
    exit_code: int | None = None
    """Known only to the process that started it; negative: a signal."""
    memory_ran_out: str | None = None
    """Evidence that the kernel killed one of the job's own processes for lack of memory."""
    waiting: str = ""
    """What a queued job waits for."""
    place: str = ""
    """Where a scheduler runs the job."""
    end: tuple[str, str] | None = None
    """Cause and message of a failure that the scheduler knows."""
    has_ended: bool = False
    """Whether a job that counts as running has ended, and only its report is awaited."""


class Deferred(PedigreeError):
    """The scheduler accepts no job now, but may accept the same one later. The message is what the stage waits for."""


class Away(PedigreeError):
    """The scheduler does not answer, so that a job may go on that was to be ended."""


class Polled(Generic[Place, Answer]):
    """What schedulers answer, each asked once for all jobs that are watched."""

    def __init__(self, ask: Callable[[Place], Answer]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._answers: dict[Place, tuple[float, Answer]] = {}

    def get(self, place: Place, max_age_s: float) -> Answer:
        """The last answer, unless it is this old."""
        with self._lock:
            known = self._answers.get(place)
            if known is None or time.monotonic() - known[0] >= max_age_s:
                answer = self._ask(place)
                known = self._answers[place] = time.monotonic(), answer
            return known[1]

    def forget(self) -> None:
        """Ask again next time, since a job was submitted."""
        with self._lock:
            self._answers.clear()


class LocalLauncher:
    """Runs jobs as process groups on this machine; under torchrun for several ranks."""

    name = "local"

    def __init__(self, project: Project) -> None:
        self.project = project
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._seen: dict[int, set[int]] = {}
        """First process of a job → all of its processes ever seen, since a process killed for lack of memory can no longer be listed."""
        self._looked = 0.0

    def submit(self, scratch: Path, numerics: Numerics, attempt: int, held: HeldSlots, fence: Fence | None = None) -> Handle:
        """Start the job described by `scratch/spec.json`, and write `scratch/job.json`. The job inherits a lock on its slots.

        It writes only while `fence` belongs to the latest submission.
        """
        left = kill_all(scratch)  # children that outlived the previous attempt must not write alongside this one
        if left:
            logging.getLogger(__name__).warning("%s; the fence keeps it from writing", described(left))
        spec = read_mapping(scratch / SPEC)
        command = job_command(scratch, numerics, _grace_s(spec))
        with (scratch / "log.txt").open("ab") as log, held.for_job() as lock:
            child = subprocess.Popen(
                command,
                cwd=self.project.root,
                env=job_environment(scratch, numerics, self.project.code(spec["code"]), held.names, fence),
                pass_fds=[lock],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[child.pid] = child
        fault_point("job started")
        # a job that ended within microseconds has no start time, but its PID still distinguishes it from our other jobs
        process = Process.of(child.pid) or Process(pid=child.pid, started=0, machine=this_machine())
        handle = self._handle(scratch, process, attempt)
        write_json(scratch / JOB, handle.model_dump())
        return handle

    def poll(self, handle: Handle) -> Status:
        process = process_of(handle)
        if process is None or not process.is_local:
            return Status("unknown")
        child = self._children.get(process.pid)
        exit_code = child.poll() if child else None
        # the kernel reports a child's exit once its last thread is gone; `/proc` shows a zombie before that
        if (child and exit_code is None) or works_in(process, Path(handle.scratch)):
            self._look_at(process, Path(handle.scratch))
            return Status("running")
        try:
            done = read_done(Path(handle.scratch))
        except ArtifactError:  # reading its result reports the error
            return Status("failed", exit_code)
        if done is not None and done.ok:
            return Status("running" if _has_nodes(Path(handle.scratch)) else "succeeded", exit_code)
        before = memory_kills.Before.parse(handle.told.get("memory", {}))
        ran_out = memory_kills.ran_out(before, Path(handle.scratch), self._seen.get(process.pid, set()) | {process.pid}, exit_code)
        return Status("failed" if done is not None or exit_code is not None else "lost", exit_code, ran_out)

    def cancel(self, handle: Handle, grace_s: float | None = None, stacks: bool = False) -> list[int]:
        """Ask all processes of the job to stop and wait until none is alive; after `grace_s` seconds, by default its placement's, they are
        killed.

        Return the processes that survived even that. A job elsewhere is left alone. `stacks`: first print each thread's stack to the log.
        """
        process = process_of(handle)
        if process is None or not process.is_local:
            return []
        for number in STACKS if stacks else ():
            for pid in processes_of(Path(handle.scratch)):
                if catches(pid, number):
                    send(pid, number)
            time.sleep(STACKS_S)
        if works_in(process, Path(handle.scratch)):
            send_to_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + (_grace_s(read_mapping(Path(handle.scratch) / SPEC)) if grace_s is None else grace_s)
        while self._members(handle, process) and time.monotonic() < deadline:
            if not process.alive:  # orphaned children: nothing else would end them
                deadline = min(deadline, time.monotonic() + 2.0)
            time.sleep(POLL_S)
        left = kill_all(Path(handle.scratch))
        child = self._children.get(process.pid)
        if child and process.pid not in left:
            child.wait()
        return left

    def find(self, scratch: Path) -> Handle | None:
        """The last job submitted for a scratch folder, even if its submitter died before writing `job.json`."""
        stored = read_job(scratch)
        # its writer may have mounted the project elsewhere, or the project has moved
        known = stored.model_copy(update={"scratch": str(scratch)}) if stored else None
        process = process_of(known) if known else None
        if process is not None and works_in(process, scratch):
            return known
        for pid in processes_of(scratch):
            found = Process.of(pid)
            if found is not None and leads_session(pid) and marked(pid) in command_line(pid):
                return self._handle(scratch, found, 0)
        return known

    def _handle(self, scratch: Path, process: Process, attempt: int) -> Handle:
        private = {"process": process.model_dump(), "memory": memory_kills.Before.now().model_dump()}
        return Handle(launcher=self.name, scratch=str(scratch), attempt=attempt, told=private, submitted_at=time.time())

    def _look_at(self, process: Process, scratch: Path) -> None:
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            self._seen.setdefault(process.pid, set()).update(processes_of(scratch))

    def _members(self, handle: Handle, process: Process) -> list[int]:
        child = self._children.get(process.pid)
        if child:
            child.poll()
        return list(processes_of(Path(handle.scratch)))


def process_of(handle: Handle) -> Process | None:
    """The leading process of a local job; None for a job of another launcher."""
    return Process.parse(handle.told.get("process"))


def _has_nodes(scratch: Path) -> bool:
    """Whether other nodes of a job work on this machine (`pedigree join`), each of which ends by itself."""
    numerics = read_mapping(scratch / SPEC).get("numerics")
    return isinstance(numerics, dict) and numerics.get("nodes", 1) > 1 and any(processes_of(scratch))


def _grace_s(spec: Mapping[str, Any]) -> int:
    """Seconds from the request to stop until the job is killed; specs of earlier versions lack them."""
    placement = spec.get("placement")
    found = placement.get("grace_s") if isinstance(placement, dict) else None
    return found if isinstance(found, int) else HUNG_GRACE_S


def job_command(scratch: Path, numerics: Numerics, grace_s: int) -> list[str]:
    """The command that runs a job on this machine."""
    stage = ["-m", "pedigree.stages", str(scratch)]
    if numerics.world_size == 1:
        return [sys.executable, *stage]
    if numerics.nodes > 1:
        return [sys.executable, "-m", "pedigree.stages.training.nodes", str(scratch), "lead"]
    torchrun = ["-m", "pedigree.stages.training.ranks", "--standalone", f"--shutdown-timeout={grace_s}"]
    return [sys.executable, *torchrun, f"--nproc-per-node={numerics.world_size}", *stage]
