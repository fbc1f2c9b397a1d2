"""This machine as a node of jobs whose ranks run on several (`stages/training/nodes.py`)."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pedigree.configs.base.project import Project
from pedigree.data.artifacts import provenance
from pedigree.data.store.fence import Fence
from pedigree.pipelines.jobs.job_environment import job_environment
from pedigree.pipelines.jobs.launcher import LocalLauncher
from pedigree.pipelines.jobs.scratch_state import JOB, known_spec, read_job, scratch_folders
from pedigree.pipelines.jobs.slots import HeldSlots, Pool, slots
from pedigree.stages.job.meeting import Meeting
from pedigree.stages.job.spec import JobSpec

POLL_S = 1.0


def join(project: Project, report: Callable[[str], None]) -> None:
    """Join the project's jobs that lack nodes, one after another, until this process is interrupted.

    Raises:
        PedigreeError: this machine's slots cannot be used.
    """
    joined: list[Meeting] = []
    while True:
        for scratch in scratch_folders(project):
            meeting, spec = Meeting.read(scratch), known_spec(scratch)
            if meeting is None or spec is None or meeting in joined or _has_scheduler(scratch) or not meeting.is_open:
                continue
            pool = Pool.of(spec.numerics, max(spec.placement.slots, len(provenance.gpus())))
            with slots(pool, spec.placement.slots, job=scratch / JOB) as held:
                if Meeting.read(scratch) != meeting or not meeting.is_open:  # the slots may have been free only hours later
                    continue
                joined.append(meeting)
                report(f"{spec.address}: a node of the job that {meeting.host} started")
                code = _serve(project, scratch, spec, meeting, held)
                report(f"{spec.address}: the node ended with exit code {code}")
        time.sleep(POLL_S)


def _has_scheduler(scratch: Path) -> bool:
    """Whether a scheduler starts the job on its nodes, and would count one more as a failure of its own."""
    job = read_job(scratch)
    return job is not None and job.launcher != LocalLauncher.name


def _serve(project: Project, scratch: Path, spec: JobSpec, meeting: Meeting, held: HeldSlots) -> int:
    """Run this node's ranks to their end; return the exit code of torchrun. An interrupt asks the whole job to stop."""
    fence = Fence(Path(meeting.fence)) if meeting.fence else None
    with (scratch / f"log-{os.uname().nodename}.txt").open("ab") as log, held.for_job() as lock:
        agent = subprocess.Popen(
            [sys.executable, "-m", "pedigree.stages.training.nodes", str(scratch), "join"],
            cwd=project.root,
            env=job_environment(scratch, spec.numerics, project.code(spec.code), held.names, fence),
            pass_fds=[lock],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return agent.wait()
    finally:
        agent.terminate()  # torchrun forwards it to its ranks
        with suppress(subprocess.TimeoutExpired):
            agent.wait(spec.placement.grace_s)
        agent.kill()  # its ranks end with it
