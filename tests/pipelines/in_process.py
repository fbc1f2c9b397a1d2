"""Jobs that run as threads of the test's own process: everything of a job but its process, so nothing is imported anew for each.

Tests about processes (kills, signals, re-attaching, environments, limits) use real ones: `Lab(folder, processes=True)`.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import read_json, write_json
from pedigree.data.store.fence import Fence, Superseded
from pedigree.pipelines.jobs import attempts, launcher, lease, processes, slots
from pedigree.pipelines.jobs.launcher import LocalLauncher, Status, process_of
from pedigree.pipelines.jobs.processes import Process, this_machine
from pedigree.pipelines.jobs.scratch_state import JOB, SPEC, Handle
from pedigree.stages import __main__ as entry
from pedigree.stages.job.failures import Preempted
from pedigree.stages.job.job import Job
from pedigree.stages.job.outcome import RESUME_ME, read_done
from pedigree.stages.job.spec import JobSpec

ALONE = threading.Lock()
"""Held by a job that computes: transformers cannot load two models at once in threads of one process."""
POLL_S = 0.01
"""A job takes milliseconds here, so it is looked at more often than every tenth of a second."""


@dataclass
class ThreadJob(Job):
    """A job that ends itself without ending the process."""

    root: Path = Path()
    """The project's folder, which is a process's working directory."""
    stopped: bool = False

    def _go_on(self) -> None:
        if self.stopped:
            raise Preempted("asked to stop by SIGTERM")
        super()._go_on()

    def _end(self, error: Superseded) -> None:
        self.stopped = True
        raise Preempted(str(error))


@dataclass
class _Running:
    job: ThreadJob
    thread: threading.Thread
    exit_code: int | None = None


class InProcessLauncher(LocalLauncher):
    """Runs jobs in threads; those that other launchers have started are looked after as ever."""

    name = "local"
    _running: dict[str, _Running] = {}  # noqa: RUF012
    """By scratch folder, for all runs of this process: one finds the jobs of another."""

    def submit(self, scratch: Path, numerics: Numerics, attempt: int, held: slots.HeldSlots, fence: Fence | None = None) -> Handle:
        processes.kill_all(scratch)
        spec = JobSpec.model_validate(read_json(scratch / SPEC))
        job = ThreadJob.of(spec, scratch, fence=fence, root=self.project.root)
        running = _Running(job, threading.Thread(target=lambda: self._work(spec, running), name=spec.address, daemon=True))
        self._running[str(scratch)] = running
        running.thread.start()
        launcher.fault_point("job started")
        handle = self._known_as(scratch, attempt)
        write_json(scratch / JOB, handle.model_dump())
        return handle

    def _work(self, spec: JobSpec, running: _Running) -> None:
        job, scratch = running.job, running.job.folder
        with _code(self.project.code(spec.code), scratch / "log.txt"), job.beating():
            try:
                job.progress(0, 0)
                with ALONE if KINDS[spec.kind].engine != "none" else nullcontext():
                    running.exit_code = entry.work(spec, job)
            except Preempted:
                running.exit_code = RESUME_ME

    def poll(self, handle: Handle) -> Status:
        running = self._own(handle)
        if running is None:
            return super().poll(handle)
        if running.thread.is_alive():
            return Status("running")
        done = read_done(Path(handle.scratch))
        return Status("succeeded" if done is not None and done.ok else "failed", running.exit_code)

    def cancel(self, handle: Handle, grace_s: float | None = None, stacks: bool = False) -> list[int]:
        running = self._own(handle)
        if running is None:
            return super().cancel(handle, grace_s, stacks)
        running.job.stopped = True
        running.thread.join()
        return []

    def find(self, scratch: Path) -> Handle | None:
        running = self._running.get(str(scratch))
        return self._known_as(scratch, 0) if running and running.thread.is_alive() else super().find(scratch)

    def _own(self, handle: Handle) -> _Running | None:
        process = process_of(handle)
        return self._running.get(handle.scratch) if process and process.started == 0 else None

    def _known_as(self, scratch: Path, attempt: int) -> Handle:
        nobody = Process(pid=os.getpid(), started=0, machine=this_machine())  # whoever looks for a process finds none that lives
        told = {"process": nobody.model_dump()}
        return Handle(launcher=self.name, scratch=str(scratch), attempt=attempt, told=told, submitted_at=time.time())


_here = threading.local()


@contextmanager
def _code(folder: Path, log: Path) -> Iterator[None]:
    """This thread runs the stages of this snapshot, and its failures go to this log."""
    with log.open("a") as _here.log:
        _here.code = folder
        try:
            yield
        finally:
            del _here.code


def _load_stage(kind: str, *, load: Any = entry.load_stage) -> ModuleType:
    code = getattr(_here, "code", None)
    if code is None:
        return load(kind)
    found = spec_from_file_location(f"snapshot_{kind}", code / "pedigree" / "stages" / kind / "run.py")
    assert found and found.loader
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _check_code(spec: JobSpec, *, check: Any = entry.check_code) -> None:
    if getattr(_here, "code", None) is None:  # the code around a stage is that of the test's process, not the snapshot's
        check(spec)


def _show(error: BaseException, cause: str, *, show: Any = entry.show) -> None:
    show(error, cause, file=_here.log if hasattr(_here, "code") else None)


@contextmanager
def in_process() -> Iterator[None]:
    """Lets jobs run in threads, and be looked at often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "load_stage", _load_stage)
        patch.setattr(entry, "check_code", _check_code)
        patch.setattr(entry, "show", _show)
        for module in (attempts, lease, processes, slots):
            patch.setattr(module, "POLL_S", POLL_S)
        yield
