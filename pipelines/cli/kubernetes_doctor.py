"""What `pedigree doctor --execution PROFILE` checks of a Kubernetes cluster."""

import json
import shlex
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Execution, Kubernetes, Numerics, Placement
from pedigree.pipelines.cli.diagnosis import Diagnosis
from pedigree.pipelines.cli.slurm_doctor import PROBE, PROBE_S, node_problem, probe_folder, settings
from pedigree.pipelines.jobs.code import snapshot
from pedigree.pipelines.jobs.kubernetes_client import ask, create, place_of, problem_of
from pedigree.pipelines.jobs.kubernetes_launcher import ASK_S, UNANSWERED, KubernetesLauncher
from pedigree.pipelines.jobs.kubernetes_manifest import manifest, preview
from pedigree.pipelines.jobs.scratch_state import Handle

REMEDY = "correct placement.launcher; `pedigree run RECIPE --dry-run` prints the manifests"


def examine_kubernetes(project: Project, execution: Execution, cache: Path) -> Iterator[Diagnosis]:
    """Check kubectl, the cluster, and every job of a profile; run one small job for each."""
    wanted: dict[str, list[tuple[str, Numerics, Placement]]] = {}
    for name, numerics, placement in settings(execution):
        if isinstance(placement.launcher, Kubernetes):
            wanted.setdefault(json.dumps(preview(project, "pedigree/test", numerics, placement)), []).append((name, numerics, placement))
    for job, stages in wanted.items():
        names, (_, numerics, placement) = ", ".join(name for name, _, _ in stages), stages[0]
        launcher = placement.launcher
        assert isinstance(launcher, Kubernetes)
        try:
            place = place_of(launcher.context, launcher.namespace)
            answer = ask(place.context, "get", "/version")
        except PedigreeError as error:
            yield Diagnosis("kubectl", False, str(error))
            return
        if not answer.ok:
            yield Diagnosis("Kubernetes", False, answer.message, "`kubectl cluster-info` shows the same; jobs go on while it is away")
            return
        problem = problem_of(launcher.context, launcher.namespace, job)
        where = f"Kubernetes {answer.body['gitVersion']}, context {place.context or 'of this pod'}, namespace {place.namespace}"
        yield Diagnosis(f"jobs of {names}", not problem, problem or where, REMEDY if problem else "")
        if not problem:
            yield _of_pod(project, cache, numerics, placement, launcher, f"pod for {names}")


def _of_pod(project: Project, cache: Path, numerics: Numerics, placement: Placement, launcher: Kubernetes, name: str) -> Diagnosis:
    """What a job with these settings finds in its pod."""
    jobs, place, token = KubernetesLauncher(project), place_of(launcher.context, launcher.namespace), uuid.uuid4().hex
    numerics, placement = numerics.model_copy(update={"nodes": 1}), placement.model_copy(update={"slots": 1})
    amounts = {name: amount for name, amount in launcher.resources.items() if name not in ("cpu", "memory")}
    small, code = launcher.model_copy(update={"resources": amounts}), snapshot(project).folder
    with probe_folder(project, cache) as (folder, paths):
        output, ended = folder / "probe.txt", folder / "ended"
        look = shlex.join([launcher.python or sys.executable, "-c", PROBE, *paths])
        script = f"{look} > {shlex.quote(str(output))} 2>&1; touch {shlex.quote(str(ended))}"
        job = manifest(project, folder, token, "pedigree/doctor", numerics, placement, small, code, script=script)
        began, answer = time.time(), create(place, job)
        if not answer.ok:
            return Diagnosis(name, False, answer.message, REMEDY)
        private = {"token": token, "name": job["metadata"]["name"], "kind": job["kind"], **place._asdict()}
        handle, deadline = Handle(launcher=jobs.name, scratch=str(folder), attempt=1, told=private), time.monotonic() + PROBE_S
        try:
            while (status := jobs.poll(handle)).state in ("queued", "running") and not ended.exists() and time.monotonic() < deadline:
                time.sleep(ASK_S)
        finally:
            jobs.cancel(handle, grace_s=0.0)
        if not ended.exists() and status.waiting.startswith(UNANSWERED):
            return Diagnosis(name, False, status.waiting, "allow list of jobs, jobsets and pods: `kubectl auth can-i list pods`")
        if not ended.exists() and status.state == "queued":
            return Diagnosis(name, True, f"none within {PROBE_S:.0f} s: {status.waiting}", "repeat this when nodes are free")
        printed = output.read_text(errors="replace").strip().rpartition("\n")[2] if output.exists() else ""
    try:
        found = json.loads(printed)
    except ValueError:
        why = status.end[1] if status.end else printed or f"it printed nothing within {PROBE_S:.0f} s"
        return Diagnosis(name, False, why, "the project must be on a volume of placement.launcher.volumes, under the same path, and python "
                         "in the image or on a volume")  # fmt: skip
    problem, remedy = node_problem(found, (began, time.time()), found["python"] if launcher.python else sys.version)
    return Diagnosis(name, not problem, f"{found['host']}: {problem or 'sees project, environment and cache'}", remedy)
