"""Jobs in a Ray cluster, whose nodes see the project, its environment and DVC's cache under the paths of this machine.

Each attempt is a job of Ray's Jobs API, whose ID is the token of its submission; it outlives the process that submits it. Its entry point
(`ray_driver.py`) runs on the head node in the cluster's Python, so that Pedigree needs no Ray, and not the cluster's version of Python. A
cluster that does not answer says nothing about a job.
"""

import json
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from shlex import quote
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics, Ray
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.host.faults import fault_point
from pedigree.data.store.fence import Fence
from pedigree.data.store.heartbeat import SILENCE_S
from pedigree.pipelines.jobs import ray_driver
from pedigree.pipelines.jobs.job_environment import job_environment
from pedigree.pipelines.jobs.launcher import HUNG_GRACE_S, STACKS, Away, Deferred, Polled, Status, job_command
from pedigree.pipelines.jobs.ray_driver import LOST, MEMORY, SIGNALED, stop_file
from pedigree.pipelines.jobs.scratch_state import JOB, Handle, read_spec, reported_success
from pedigree.stages.job.outcome import RESUME_ME

ASK_S = 2.0
"""Seconds between two queries, each about all jobs."""
ANSWER_S = 30.0
AWAY_S = 60.0
"""How long to try to end a job while Ray does not answer."""
KILL_S = 30.0
"""Longest wait for the end of a job that is killed."""
ACTIVE = ("PENDING", "RUNNING")
MOST = 10_000
"""Entries of a list, by default 100."""
GROUP = "ray.io/node-group"
"""Label of nodes that an autoscaler may add."""
REPORTED = (0, 1, RESUME_ME)
"""Exit codes of a job that has written a report."""


class RayLauncher:
    """Submits each job as one of the Jobs API. Ray does not restart it: the next attempt resumes from its checkpoint."""

    name = "ray"

    def __init__(self, project: Project) -> None:
        self.project = project
        self._jobs, self._groups = Polled(_jobs), Polled(_groups)
        self._running: set[str] = set()
        """Tokens of jobs that were seen running."""
        self._ends: dict[str, float] = {}
        """Token → when a job without a result was first seen to have ended."""

    def submit(self, scratch: Path, numerics: Numerics, attempt: int, launcher: Ray, fence: Fence | None = None) -> Handle:
        """Submit the job described by `scratch/spec.json`.

        Raises:
            Deferred: Ray accepts no job now.
            PedigreeError: Ray rejects it.
        """
        spec = read_spec(scratch)
        told = {"token": uuid.uuid4().hex, "address": launcher.address, "ranks": numerics.world_size}
        handle = Handle(launcher=self.name, scratch=str(scratch), attempt=attempt, told=told, submitted_at=time.time())
        write_json(scratch / JOB, handle.model_dump())  # before the job exists, so that it is found if this process dies now
        lead = job_command(scratch, numerics, spec.placement.grace_s)
        job = {
            "token": handle.token,
            "commands": [lead, *[[*lead[:-1], "join"]] * (numerics.nodes - 1)],
            "bundle": bundle(launcher, numerics, spec.placement.slots),
            "environment": job_environment(scratch, numerics, self.project.code(spec.code), [], fence),
            "folder": str(self.project.root),
            "grace_s": spec.placement.grace_s,
        }
        submitted = _submitted(handle)
        submitted.touch(mode=0o600)  # not in the request, which the dashboard shows to everyone
        submitted.write_text(json.dumps(job))
        driver = str(shutil.copy(ray_driver.__file__, scratch))
        wait_s = max(spec.placement.grace_s, HUNG_GRACE_S) + KILL_S
        code, answer = _ask(launcher.address, "/api/jobs/", {
            "submission_id": handle.token,
            "entrypoint": f"exec python {quote(driver)} {quote(str(submitted))} >> {quote(str(scratch / 'log.txt'))} 2>&1",
            "metadata": {"job_name": spec.address},
            "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": f"{wait_s:.0f}"}},
        })  # fmt: skip
        if code not in range(200, 300):
            (scratch / JOB).unlink()
            submitted.unlink(missing_ok=True)  # if Ray has accepted the job after all, it may have begun
            if code in range(400, 500):
                raise PedigreeError(f"Ray rejects the job of {spec.address}: {answer}")
            raise Deferred(f"for Ray at {launcher.address} to accept its job: {(answer.splitlines() or [f'HTTP status {code}'])[-1]}")
        fault_point("job started")
        self._jobs.forget()
        return handle

    def poll(self, handle: Handle) -> Status:
        jobs = self._jobs.get(_address(handle), ASK_S)
        if jobs is not None and (job := jobs.get(handle.token)) is not None:
            return self._active(handle) if job["status"] in ACTIVE else self._ended(handle, job)
        if (result := reported_success(Path(handle.scratch))) is not None:
            return Status("succeeded" if result else "failed")
        known = jobs is not None or handle.token in self._running
        return Status("unknown", waiting="" if known else f"for Ray to answer at {_address(handle)}")

    def cancel(self, handle: Handle, grace_s: float | None = None, stacks: bool = False) -> list[int]:
        """End a job: remove it from the queue, or ask it to stop; it is killed after `grace_s` seconds, by default its placement's.

        `stacks`: a job of one process first prints each thread's stack to the log.

        Raises:
            Away: Ray does not answer.
        """
        if not self._is_active(handle):
            return []
        scratch = Path(handle.scratch)
        grace_s = read_spec(scratch).placement.grace_s if grace_s is None else grace_s
        numbers = [int(number) for number in STACKS] if stacks and handle.told.get("ranks") == 1 else []
        write_json(stop_file(_submitted(handle)), {"grace_s": grace_s, "stacks": numbers})
        _ask(_address(handle), f"/api/jobs/{handle.token}/stop", {})
        deadline = time.monotonic() + grace_s + KILL_S
        while self._is_active(handle) and time.monotonic() < deadline:
            time.sleep(ASK_S)
        _submitted(handle).unlink(missing_ok=True)  # canceled before it started
        return []

    def _is_active(self, handle: Handle) -> bool:
        """Whether the job is queued or runs, by what Ray or the job itself reports.

        Raises:
            Away: Ray does not answer.
        """
        deadline = time.monotonic() + AWAY_S
        while (jobs := self._jobs.get(_address(handle), ASK_S)) is None:
            if reported_success(Path(handle.scratch)) is not None:
                return False
            if time.monotonic() > deadline:
                raise Away(f"Ray does not answer at {_address(handle)}, so its job in {handle.scratch} may go on: try again")
            time.sleep(ASK_S)
        return handle.token in jobs and jobs[handle.token]["status"] in ACTIVE

    def _active(self, handle: Handle) -> Status:
        if handle.token not in self._running and (groups := self._groups.get(_address(handle), ASK_S)) is not None:
            group = groups.get(handle.token)
            if group is None or group["state"] == "PENDING":
                reason = f" ({group['stats']['scheduling_state']})" if group else ""
                return Status("queued", waiting=f"in Ray's queue as job {handle.token}{reason}")
            self._running.add(handle.token)
        return Status("running")

    def _ended(self, handle: Handle, job: dict[str, Any]) -> Status:
        """State of a job that Ray knows to have ended. Network file systems show a report late, so one that may exist is waited for."""
        result, code = reported_success(Path(handle.scratch)), job["driver_exit_code"]
        if result:
            return Status("succeeded")
        if job["status"] == "STOPPED":
            return Status("failed", end=("cancelled", f"job {handle.token} was stopped in Ray; its checkpoints are kept"))
        if result is None and code in REPORTED and time.monotonic() - self._ends.setdefault(handle.token, time.monotonic()) < SILENCE_S:
            return Status("running", has_ended=True)
        if code == MEMORY:
            return Status("failed", memory_ran_out=f"Ray killed job {handle.token} because the memory of its node ran low")
        if result is None and code in (LOST, None):
            why = (job["message"] or "").partition("\n")[0] if code is None else "a node of the job is gone"
            return Status("failed", end=("lost", f"Ray lost job {handle.token}: {why}"))
        return Status("failed", SIGNALED - code if code is not None and SIGNALED < code < LOST else code)


def bundle(launcher: Ray, numerics: Numerics, slots: int) -> dict[str, float]:
    """What a job takes of each of its nodes."""
    return {"GPU" if numerics.device == "cuda" else "CPU": slots, **launcher.resources}


def problem_of(address: str, nodes: int, wanted: tuple[tuple[str, float], ...]) -> str | None:
    """Why a job can never start: no Ray is at the address, or its cluster has too few such nodes and does not grow."""
    code, answer = _ask(address, f"/api/v0/nodes?limit={MOST}")
    if code != HTTPStatus.OK:
        why = f"HTTP status {code}" if code else answer
        return f"no Ray answers at {address} ({why}): start the cluster with its dashboard, or correct placement.launcher.address"
    known = [node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]  # lost ones stay in the list
    if any(GROUP in node["labels"] for node in known):
        return None
    fit = sum(all(node["resources_total"].get(name, 0) >= amount for name, amount in wanted) for node in known)
    if fit >= nodes:
        return None
    shown = ", ".join(f"{name}: {amount:g}" for name, amount in wanted)
    return f"the Ray cluster at {address} has {fit} of {nodes} nodes with {{{shown}}}: lower placement.slots, resources or nodes"


def _submitted(handle: Handle) -> Path:
    """The file for the job's entry point."""
    return Path(handle.scratch) / f"ray-{handle.token}.json"


def _address(handle: Handle) -> str:
    return str(handle.told.get("address"))


def _jobs(address: str) -> dict[str, Any] | None:
    """Token → job, of all jobs of a cluster; None if it does not answer."""
    code, answer = _ask(address, "/api/jobs/")
    return {job["submission_id"]: job for job in answer} if code == HTTPStatus.OK else None


def _groups(address: str) -> dict[str, Any] | None:
    """Token → placement group, of all jobs of a cluster that wait or run; None if it does not answer."""
    fields = {"detail": "true", "limit": MOST, "filter_keys": "state", "filter_predicates": "!=", "filter_values": "REMOVED"}
    code, answer = _ask(address, f"/api/v0/placement_groups?{urllib.parse.urlencode(fields)}")
    return {group["name"]: group for group in answer["data"]["result"]["result"]} if code == HTTPStatus.OK else None


def _ask(address: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """HTTP status and decoded answer of Ray, or the text of its error; the status is zero if Ray cannot be reached."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(address + path, data, {"Content-Type": "application/json", "User-Agent": "pedigree"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace").strip()
    except (OSError, HTTPException, ValueError) as error:
        return 0, str(error)
