"""Jobs in a Kubernetes cluster, whose pods see the project and DVC's cache under the paths of this machine.

A job is found by its name, which its submission alone has. A cluster that does not answer says nothing about a job.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Kubernetes, Numerics
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.host.faults import fault_point
from pedigree.data.store.fence import Fence
from pedigree.data.store.heartbeat import SILENCE_S
from pedigree.pipelines.jobs.kubernetes_client import Place, ask, create, is_installed, path, place_of
from pedigree.pipelines.jobs.kubernetes_manifest import NODES, PRINT_STACKS, PROJECT, QUEUE, TOKEN, manifest, project_label
from pedigree.pipelines.jobs.launcher import Away, Deferred, Polled, Status
from pedigree.pipelines.jobs.scratch_state import JOB, Handle, read_spec, reported_success
from pedigree.stages.job.outcome import RESUME_ME

ASK_S = 3.0
"""Seconds between two queries, each about all jobs of this project."""
AWAY_S = 60.0
"""How long to try to end a job while the API does not answer."""
KILL_S = 60.0
"""Longest wait for the end of a job that Kubernetes kills."""
FINISHED = ("Complete", "Completed", "Failed")
"""Conditions of a Job or JobSet."""
UNANSWERED = "for Kubernetes to answer"
NEVER = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
"""Reasons of a waiting container that waiting does not remove."""
LOST = ("DeletionByTaintManager", "DeletionByPodGC")
"""Reasons of a disruption: the pod's node is gone, does not answer, or must not run the pod."""
INDEX = "batch.kubernetes.io/job-completion-index"
REPORTED = (0, 1, RESUME_ME, None)
"""Exit codes of a job that has written a report; None: unknown."""
SIGNALED = 128
"""Added to the number of the signal that ended a container."""
Object = dict[str, Any]


@dataclass(frozen=True)
class _Look:
    """What the API knows of this project's jobs."""

    jobs: dict[str, Object]
    """By name."""
    pods: dict[str, list[Object]]
    """By token."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why jobs have no pods, by name."""


class KubernetesLauncher:
    """Submits each job as a Job or JobSet."""

    name = "kubernetes"

    def __init__(self, project: Project) -> None:
        self.project = project
        self._places = cache(place_of)
        """The context and namespace of a profile, for all jobs of a run, although others become kubectl's current ones."""
        self._looks = Polled(self._list)
        self._known: set[str] = set()
        """Tokens of jobs that the API has listed."""
        self._running: set[str] = set()
        """Tokens of jobs that were seen running, and so go on while the API does not answer."""
        self._ends: dict[str, float] = {}
        """Token → when a job without a result was first seen to have ended."""
        self._disruptions: dict[str, tuple[str, str]] = {}
        """Token → why its pod ends: Kubernetes soon removes a pod that it has ended."""
        self._deleted: dict[str, float] = {}
        """Pod → when it was first seen to be deleted."""
        self._problem = ""
        """Why the last query failed."""

    def submit(self, scratch: Path, numerics: Numerics, attempt: int, launcher: Kubernetes, fence: Fence | None = None) -> Handle:
        """Submit the job described by `scratch/spec.json`.

        Raises:
            Deferred: the cluster accepts no job now.
            PedigreeError: it rejects the job, or kubectl is not installed or has no such context.
        """
        spec, place = read_spec(scratch), self._places(launcher.context, launcher.namespace)
        token = uuid.uuid4().hex
        code = self.project.code(spec.code)
        job = manifest(self.project, scratch, token, spec.address, numerics, spec.placement, launcher, code, fence)
        told = {"token": token, "name": job["metadata"]["name"], "kind": job["kind"], **place._asdict(), "ranks": numerics.world_size}
        handle = Handle(launcher=self.name, scratch=str(scratch), attempt=attempt, told=told, submitted_at=time.time())
        write_json(scratch / JOB, handle.model_dump())  # before the job exists, so that it is found if this process dies now
        (scratch / "log.txt").touch()  # `pedigree logs` finds it while the job is queued
        (scratch / PRINT_STACKS).unlink(missing_ok=True)
        answer = create(place, job)
        if not answer.ok and not answer.is_refusal:  # the job may have been created although the answer got lost
            answer = create(place, job)
        if not answer.ok and answer.reason != "AlreadyExists":
            if answer.is_refusal or answer.reason is not None:  # without an answer the job may exist, and the next submission deletes it
                (scratch / JOB).unlink()
            if answer.is_refusal:
                raise PedigreeError(f"Kubernetes rejects the job of {spec.address}: {answer.message}")
            raise Deferred(f"for Kubernetes to accept its job: {answer.message}")
        fault_point("job started")
        self._looks.forget()
        return handle

    def poll(self, handle: Handle) -> Status:
        token, result, look = handle.token, reported_success(Path(handle.scratch)), self._look(handle, ASK_S)
        if look is None:
            if result is not None:
                return Status("succeeded" if result else "failed")
            if not is_installed():
                return Status("unknown")
            return Status("running") if token in self._running else Status("queued", waiting=f"{UNANSWERED}: {self._problem}")
        job, pods = look.jobs.get(_name(handle)), look.pods.get(token, [])
        if job is not None:
            self._known.add(token)
        if any(_condition(pod, "DisruptionTarget") for pod in pods) and (why := _end(pods)):
            self._disruptions[token] = why
        if not result and (end := self._hopeless(pods)):
            return Status("failed", end=end)
        suspended = job is not None and job["spec"].get("suspend", False)
        withdrawn = suspended and (token in self._running or result is False)  # by Kueue, in favor of another job
        if not any(map(_is_unfinished, pods)) and (job is None or _is_finished(job) or withdrawn):
            return self._ended(handle, job, pods, result)
        leads = [pod for pod in pods if _index(pod) == "0"]
        if job is None or any(pod["status"].get("phase") != "Pending" for pod in leads):
            self._running.add(token)
            return Status("running", place=f"Kubernetes {_where(leads[0])}" if leads else "")
        if not suspended and not pods and _name(handle) not in look.reasons:
            look.reasons[_name(handle)] = self._event(handle)
        reason = _reason(job, pods) or look.reasons.get(_name(handle))
        return Status("queued", waiting=f"in Kubernetes's queue as {job['kind']} {_name(handle)}{f' ({reason})' if reason else ''}")

    def cancel(self, handle: Handle, grace_s: float | None = None, stacks: bool = False) -> list[int]:
        """End a job: remove it from the queue, or ask it to stop; it is killed after `grace_s` seconds, by default its placement's.

        `stacks`: a job of one process first prints each thread's stack to the log.

        Raises:
            Away: Kubernetes does not answer.
            PedigreeError: it refuses.
        """
        place, scratch, (job, pods) = _place(handle), Path(handle.scratch), self._left(handle)
        if job is None and not pods:
            return []
        if stacks and handle.told.get("ranks") == 1:
            (scratch / PRINT_STACKS).touch()
        if job is not None:
            answer = ask(place.context, "delete", path(place, job["kind"], _name(handle), propagationPolicy="Foreground"))
            if answer.is_refusal and answer.reason != "NotFound":
                raise PedigreeError(f"Kubernetes does not end job {_name(handle)}: {answer.message}")
        if grace_s is not None:
            soon = str(max(1, int(grace_s)))  # zero would remove the pod from the API while its processes go on
            ask(place.context, "delete", path(place, "Pod", labelSelector=f"{TOKEN}={handle.token}", gracePeriodSeconds=soon))
        deadline = time.monotonic() + (read_spec(scratch).placement.grace_s if grace_s is None else grace_s) + KILL_S
        while (job or pods) and not any(map(self._is_lost, pods)) and time.monotonic() < deadline:
            time.sleep(ASK_S)
            job, pods = self._left(handle)
        return []

    def _left(self, handle: Handle) -> tuple[Object | None, list[Object]]:
        """The job unless it has finished, and those of its pods that have not; none if Kubernetes does not answer but a report is on disk.

        Raises:
            Away: Kubernetes does not answer.
        """
        deadline = time.monotonic() + AWAY_S
        while (look := self._look(handle, 0.0)) is None:
            if reported_success(Path(handle.scratch)) is not None:
                return None, []
            if not is_installed() or time.monotonic() > deadline:
                raise Away(
                    f"Kubernetes does not answer, so its job in {handle.scratch} may go on: try again when it does ({self._problem})"
                )
            time.sleep(ASK_S)
        job = look.jobs.get(_name(handle))
        return None if job is None or _is_finished(job) else job, list(filter(_is_unfinished, look.pods.get(handle.token, [])))

    def _look(self, handle: Handle, max_age_s: float) -> _Look | None:
        """What the API knows, queried once for all jobs of a kind; None if it does not answer."""
        return self._looks.get((_place(handle), "JobSet" if handle.told.get("kind") == "JobSet" else "Job"), max_age_s)

    def _list(self, where: tuple[Place, str]) -> _Look | None:
        place, kind = where
        if not is_installed():
            return None
        lists = []
        for each in (kind, "Pod"):  # pods last: an ended job's pods have ended
            answer = ask(place.context, "get", path(place, each, labelSelector=f"{PROJECT}={project_label(self.project)}"))
            if not answer.ok:
                self._problem = answer.message
                return None
            lists.append(answer.body["items"])
        pods: dict[str, list[Object]] = {}
        for pod in lists[1]:
            pods.setdefault(pod["metadata"]["labels"][TOKEN], []).append(pod)
        return _Look({job["metadata"]["name"]: {**job, "kind": kind} for job in lists[0]}, pods)

    def _event(self, handle: Handle) -> str:
        """The last event of a job that has no pods, such as a quota that is exceeded."""
        name = _name(handle) if handle.told.get("kind") != "JobSet" else f"{_name(handle)}-{NODES}-0"
        place = _place(handle)
        answer = ask(place.context, "get", path(place, "Event", fieldSelector=f"involvedObject.name={name},type=Warning"))
        events = answer.body["items"] if answer.ok else []
        return f"{events[-1]['reason']}: {events[-1]['message']}" if events else ""

    def _ended(self, handle: Handle, job: Object | None, pods: list[Object], result: bool | None) -> Status:
        """State of a job that has ended. Network file systems show a report late, so one that may exist is waited for."""
        token, code = handle.token, _exit_code(pods)
        if result:
            return Status("succeeded")
        if job is None:
            if token in self._known:
                return Status("failed", end=("cancelled", f"job {_name(handle)} was deleted in Kubernetes; its checkpoints are kept"))
            return Status("unknown" if result is None else "failed")
        end = _end(pods) or self._disruptions.get(token)
        if end and (result is None or end[0] in ("out_of_memory", "timeout")):  # such a job reports at most that it was asked to stop
            return Status("failed", end=end)
        if result is None and not _is_finished(job):
            return Status("failed", end=("preempted", f"job {_name(handle)} was suspended in Kubernetes"))
        if result is None and code in REPORTED and time.monotonic() - self._ends.setdefault(token, time.monotonic()) < SILENCE_S:
            return Status("running", has_ended=True)
        return Status("lost" if result is None and code is None else "failed", code)

    def _hopeless(self, pods: list[Object]) -> tuple[str, str] | None:
        """Cause and message of the failure of a job whose pods cannot start, or whose node does not answer."""
        for pod in pods:
            for why in _states(pod, "waiting"):
                if why.get("reason") in NEVER:
                    return "refused", f"{_where(pod)} cannot start: {why['reason']}: {why.get('message', '')}: correct placement.launcher"
            if self._is_lost(pod):
                return _end([pod])
        return None

    def _is_lost(self, pod: Object) -> bool:
        """Whether its node does not answer: on a node that does, a deleted pod ends within its grace period, which is measured by this
        machine's clock alone."""
        over, told = True, pod["metadata"]
        if "deletionTimestamp" in told:
            since = self._deleted.setdefault(told["name"], time.monotonic())
            over = time.monotonic() - since >= told.get("deletionGracePeriodSeconds", 0)
        return over and (_condition(pod, "DisruptionTarget") or {}).get("reason") in LOST


def _name(handle: Handle) -> str:
    return str(handle.told.get("name"))


def _place(handle: Handle) -> Place:
    return Place(str(handle.told.get("context", "")), str(handle.told.get("namespace")))


def _condition(thing: Object, *names: str) -> Object | None:
    """The condition of one of these types that is true."""
    found = thing.get("status", {}).get("conditions", [])
    return next((one for one in found if one["type"] in names and one["status"] == "True"), None)


def _is_finished(job: Object) -> bool:
    return _condition(job, *FINISHED) is not None


def _is_unfinished(pod: Object) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _index(pod: Object) -> str:
    return pod["metadata"].get("annotations", {}).get(INDEX, "0")


def _where(pod: Object) -> str:
    node = pod["spec"].get("nodeName")
    return f"pod {pod['metadata']['name']}{f' on {node}' if node else ''}"


def _states(pod: Object, state: str) -> Iterator[Object]:
    """The details of its containers in this state."""
    yield from (one["state"][state] for one in pod["status"].get("containerStatuses", []) if state in one["state"])


def _reason(job: Object, pods: list[Object]) -> str:
    """Why a job does not run, as far as it and its pods show it."""
    if job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        return "suspended" + (f", in queue {queue}" if queue else "")
    for pod in pods:
        conditions = pod["status"].get("conditions", [])
        pending = [one for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False"]
        for why in (*pending, *_states(pod, "waiting")):
            return ": ".join(filter(None, (why.get("reason"), why.get("message"))))
    return ""


def _end(pods: list[Object]) -> tuple[str, str] | None:
    """Cause and message of a failure that Kubernetes knows."""
    for pod in pods:
        ended: Object = next(_states(pod, "terminated"), {})
        if ended.get("reason") == "OOMKilled":
            return "out_of_memory", f"{_where(pod)} exceeded its memory limit (OOMKilled)"
        if pod["status"].get("reason") == "DeadlineExceeded":
            return "timeout", f"Kubernetes ended {_where(pod)} at its deadline"
        if disruption := _condition(pod, "DisruptionTarget"):
            cause = "lost" if disruption["reason"] in LOST else "preempted"
            return cause, f"Kubernetes ended {_where(pod)}: {disruption['reason']}: {disruption.get('message', '')}"
        if ended.get("reason") == "ContainerStatusUnknown":
            return "lost", f"{_where(pod)} is gone: {ended.get('message', '')}"
        if ended.get("message"):  # the job's own output is in its log
            return "refused", f"{_where(pod)} could not start the job: {ended['message'].strip()}"
    return None


def _exit_code(pods: list[Object]) -> int | None:
    """Of the first pod that failed, negative: a signal; None if it is unknown."""
    codes = [int(ended["exitCode"]) for pod in pods for ended in _states(pod, "terminated")]
    code = next(filter(None, codes), codes[0] if codes else None)
    return SIGNALED - code if code is not None and code > SIGNALED else code
