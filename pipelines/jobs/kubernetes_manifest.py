"""Manifests of jobs in Kubernetes: a Job of one pod, or a JobSet of several.

Kubernetes restarts nothing (`backoffLimit: 0`, `restartPolicy: Never`): the next attempt resumes from its checkpoint.
"""

import math
import os
import re
import shlex
import sys
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Any

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import GPU_RESOURCE, Kubernetes, Numerics, Placement
from pedigree.data.store.fence import FENCE, Fence
from pedigree.pipelines.jobs.job_environment import job_settings
from pedigree.pipelines.jobs.launcher import STACKS, STACKS_S, job_command

TOKEN, PROJECT, QUEUE = "pedigree-token", "pedigree-project", "kueue.x-k8s.io/queue-name"
"""Labels."""
NODES = "nodes"
"""The replicated job of a JobSet."""
KEPT_S = 24 * 3600
"""How long Kubernetes keeps what has ended."""
LONGEST_NAME = 40
"""A JobSet's pods append `-nodes-0-INDEX-SUFFIX`; a host name has at most 63 characters."""
PID, PRINT_STACKS = "kubernetes.pid", "kubernetes-stacks"
"""In the scratch folder: the PID of the job in its pod; and, if it exists, the request to print the stacks of threads before the end."""


def job_name(address: str, token: str) -> str:
    """Name of a job, unique for each submission."""
    stage = re.sub("[^a-z0-9]+", "-", address.lower())[: LONGEST_NAME - len("p--") - 12].strip("-")
    return f"p-{stage}-{token[:12]}"


def project_label(project: Project) -> str:
    return sha256(str(project.root).encode()).hexdigest()[:16]


def preview(project: Project, address: str, numerics: Numerics, placement: Placement, script: str = "") -> dict[str, Any]:
    """The manifest of a stage that is not due yet: `KEY`, `CODE` and zeros are in place of what only its inputs decide."""
    assert isinstance(placement.launcher, Kubernetes)
    scratch, code = project.scratch("KEY"), project.code("CODE")
    return manifest(project, scratch, "0" * 32, address, numerics, placement, placement.launcher, code, script=script)


def manifest(
    project: Project, scratch: Path, token: str, address: str, numerics: Numerics, placement: Placement, launcher: Kubernetes, code: Path,
    fence: Fence | None = None, script: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The Job of a stage or, on several nodes, its JobSet. `placement` may lack the launcher; `script`: what runs instead of the stage.

    Raises:
        PedigreeError: `env` of the launcher sets a variable that Pedigree sets.
    """
    name = job_name(address, token)
    labels = {**launcher.labels, TOKEN: token, PROJECT: project_label(project)}
    metadata = {"name": name, "labels": labels | ({QUEUE: launcher.queue} if launcher.queue else {})}
    python = launcher.python or sys.executable
    script = script or _script([python, *job_command(scratch, numerics, placement.grace_s)[1:]], scratch, name, numerics.nodes)
    settings = job_settings(scratch, numerics, code, [], fence)
    for variable in ("PATH", *(["CUDA_HOME"] if launcher.python else [])):  # those of this machine
        settings.pop(variable, None)
    settings["PYTHONPATH"] = str(code)  # without that of this machine
    if own := sorted(launcher.env.keys() & {*settings, FENCE}):
        raise PedigreeError(f"placement.launcher.env sets {', '.join(own)}, which Pedigree sets itself: remove it")
    variables = {"HOME": "/tmp", "USER": "pedigree", **launcher.env, **settings}  # this user has no home and perhaps no name in the image
    script = f"PATH={quote(str(Path(python).parent))}:$PATH; {script}"
    container = _container(scratch, numerics, placement, launcher) | {
        "command": ["sh", "-c", script.replace("$", "$$")],  # Kubernetes makes one of two, and reads `$(NAME)` itself
        "workingDir": str(project.root),
        "env": [{"name": key, "value": value} for key, value in variables.items()],
    }
    template = {"metadata": {"labels": labels}, "spec": _pod(placement, launcher) | {"containers": [container]}}
    job: dict[str, Any] = {"backoffLimit": 0, "template": template}
    if numerics.nodes == 1:
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job | {"ttlSecondsAfterFinished": KEPT_S}}
    job |= {"completionMode": "Indexed", "completions": numerics.nodes, "parallelism": numerics.nodes}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"metadata": {"labels": {**labels}}, "spec": job}}],
        "ttlSecondsAfterFinished": KEPT_S,
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _script(command: list[str], scratch: Path, name: str, nodes: int) -> str:
    """The shell script of a pod, which becomes the job's process; on several nodes, each pod is one of them."""
    folder, run = quote(str(scratch)), f"exec {shlex.join(command)}"
    if nodes == 1:
        return f"echo $$ > {folder}/{PID}; {run} >> {folder}/log.txt 2>&1"
    lead = f"{run} {name}-{NODES}-0-0.{name} >> {folder}/log.txt 2>&1"
    return f"[ $JOB_COMPLETION_INDEX != 0 ] || {lead}; exec {shlex.join([*command[:-1], 'join'])} >> {folder}/log-$HOSTNAME.txt 2>&1"


def _container(scratch: Path, numerics: Numerics, placement: Placement, launcher: Kubernetes) -> dict[str, Any]:
    signals, folder = " ".join(str(int(number)) for number in STACKS), quote(str(scratch))
    stacks = f"[ ! -e {folder}/{PRINT_STACKS} ] || for n in {signals}; do kill -$n $(cat {folder}/{PID}); sleep {STACKS_S}; done"
    amounts = launcher.resources | {GPU_RESOURCE if numerics.device == "cuda" else "cpu": placement.slots}
    return {
        "name": "job",
        "image": launcher.image,
        "envFrom": [{"secretRef": {"name": secret}} for secret in launcher.secrets],
        "resources": {"limits": {resource: str(amount) for resource, amount in amounts.items()}},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # of a pod that does not reach the log of its job
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", stacks]}}},
        "volumeMounts": [
            *({"name": f"volume-{number}", "mountPath": place} for number, place in enumerate(launcher.volumes.values())),
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _pod(placement: Placement, launcher: Kubernetes) -> dict[str, Any]:
    volumes = [{"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}} for number, claim in enumerate(launcher.volumes)]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": placement.grace_s,
        "activeDeadlineSeconds": math.ceil(placement.timeout_s) if placement.timeout_s else None,
        "shareProcessNamespace": True,  # a process of Kubernetes is the first, and reaps what the job leaves behind
        "securityContext": {"runAsUser": os.getuid(), "runAsGroup": os.getgid(), "supplementalGroups": os.getgroups()},
        "nodeSelector": launcher.node_selector,
        "tolerations": [*launcher.tolerations],
        "priorityClassName": launcher.priority_class,
        "serviceAccountName": launcher.service_account,
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}}],  # by default it has 64 MB, too few for NCCL
    }
    return {field: value for field, value in spec.items() if value}
