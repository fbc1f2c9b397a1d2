"""What `pedigree doctor --execution PROFILE` checks of a Slurm cluster."""

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Execution, Numerics, Placement, Slurm
from pedigree.data.artifacts.artifacts import write_text
from pedigree.pipelines.cli.diagnosis import Diagnosis
from pedigree.pipelines.jobs.slurm import ACTIVE, ASK_S, QUEUED
from pedigree.pipelines.jobs.slurm_client import ask, batch_script, message, problem_of, resources
from pedigree.pipelines.quantities import duration

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
PROBE_S = 120.0
"""Longest wait for the end of a job that takes a second."""
SKEW_S = 5.0
"""Difference between two clocks above which displayed times mislead."""
PROBE = """
import json, os, socket, sys, time
from pedigree.stages.job import outcome
absent = [path for path in sys.argv[1:] if not os.path.exists(path)]
print(json.dumps({"host": socket.gethostname(), "time": time.time(), "python": sys.version, "absent": absent}))
"""


def examine_slurm(project: Project, execution: Execution, cache: Path) -> Iterator[Diagnosis]:
    """Check programs, controller, and every allocation of a profile; run one small job for each set of options. `cache`: of DVC."""
    wanted: dict[tuple[str, ...], list[str]] = {}
    probes: dict[tuple[str, Slurm], tuple[list[str], int]] = {}
    for name, numerics, placement in settings(execution):
        if isinstance(placement.launcher, Slurm):
            wanted.setdefault(tuple(resources(numerics, placement, placement.launcher)), []).append(name)
            names, grace_s = probes.get((numerics.device, placement.launcher), ([], 0))
            probes[numerics.device, placement.launcher] = [*names, name], max(grace_s, placement.grace_s)
    if not wanted:
        return
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        yield Diagnosis("Slurm", False, f"{', '.join(missing)} not in PATH", "run this on a login node, or load the site's Slurm module")
        return
    answer = ask("squeue", "--me", "--noheader")
    if answer.returncode:
        yield Diagnosis("Slurm", False, message(answer), "`scontrol ping` shows the controller's state; jobs go on while it is away")
        return
    yield Diagnosis("Slurm", True, ask("sbatch", "--version").stdout.strip())
    refused = set()
    for options, names in wanted.items():
        problem = problem_of(options)
        remedy = "correct placement.launcher.options; `sinfo` shows partitions, `sacctmgr show associations user=$USER` accounts"
        yield Diagnosis(f"jobs of {', '.join(names)}", not problem, problem or " ".join(options), remedy if problem else "")
        refused |= set(names) if problem else set()
    for (device, launcher), (names, grace_s) in probes.items():
        if not refused.issuperset(names):
            numerics = Numerics.model_construct(device=device, nodes=1)
            yield from _of_node(project, cache, numerics, launcher, grace_s, f"node for {', '.join(names)}")


def settings(execution: Execution) -> Iterator[tuple[str, Numerics, Placement]]:
    """Name, numerics and placement of each block of a profile."""
    yield "stages", *execution.of("", "")
    for kind in execution.kinds:
        yield kind, *execution.of(kind, "")
    for stage in execution.stages:
        yield stage, *execution.of("", stage)


@dataclass(frozen=True)
class _Probed:
    """A probe job: its last line in the queue, and what it printed."""

    number: str
    state: str
    limit: str
    reason: str
    node: str
    printed: str
    between: tuple[float, float]
    """Times of this machine between which the job has looked at its clock."""


def _of_node(project: Project, cache: Path, numerics: Numerics, launcher: Slurm, grace_s: int, name: str) -> Iterator[Diagnosis]:
    """What a job with these options finds on its node."""
    with probe_folder(project, cache) as (folder, paths):
        job = _probed(project, folder, numerics, launcher, paths)
    if isinstance(job, str):
        yield Diagnosis(name, False, job, "correct placement.launcher.options")
        return
    if job.state in QUEUED:
        value = f"none within {PROBE_S:.0f} s: job {job.number} waited in the queue ({job.reason}) and was removed"
        yield Diagnosis(name, True, value, "repeat this when nodes are free")
        return
    if job.state in ACTIVE:
        value = f"{job.node}: job {job.number} was still running after {PROBE_S:.0f} s, and was removed"
        yield Diagnosis(name, False, value, "look at placement.launcher.setup, and at how long Python takes to start on that node")
        return
    limit_s = _seconds(job.limit)
    if limit_s is not None and limit_s <= grace_s:
        value = f"its time limit is {job.limit}, and placement.grace_s {grace_s} asks a job to stop {grace_s} s before"
        yield Diagnosis(name, False, value, "raise --time in placement.launcher.options, or lower placement.grace_s")
    try:
        found = json.loads(job.printed.strip().rpartition("\n")[2])
    except ValueError:
        reason = job.printed.strip().rpartition("\n")[2] or "it printed nothing, so the project folder is probably not there"
        yield Diagnosis(name, False, f"{job.node}: job {job.number} ended as {job.state}: {reason}",
                        "project folder and .venv must be on a disk that login node and nodes share, under the same paths")  # fmt: skip
        return
    problem, remedy = node_problem(found, job.between)
    value = f"{found['host']}: {problem or f'sees project, environment and cache; time limit {job.limit.lower()}'}"
    yield Diagnosis(name, not problem, value, remedy)


@contextmanager
def probe_folder(project: Project, cache: Path) -> Iterator[tuple[Path, list[str]]]:
    """A folder for a probe job, and the paths that it looks for: the project's, and a file of the DVC cache."""
    folder = Path(tempfile.mkdtemp(prefix="probe-", dir=project.private))
    mark = tempfile.NamedTemporaryFile(prefix="probe-", dir=cache) if cache.is_dir() else None
    try:
        yield folder, [str(project.root), *([mark.name] if mark else [])]
    finally:
        shutil.rmtree(folder)
        if mark:
            mark.close()


def node_problem(found: dict[str, Any], between: tuple[float, float], python: str = sys.version) -> tuple[str, str]:
    """What is wrong on a node, and the remedy, by what a probe job has printed there; empty if nothing is."""
    skew = max(between[0] - found["time"], found["time"] - between[1], 0.0)
    if found["absent"]:
        return f"{', '.join(found['absent'])} does not exist there", "put it on a disk that login node and nodes share"
    if found["python"] != python:
        return f"{sys.executable} is {found['python']} there, {python} here", "put .venv and its Python on a shared disk"
    if skew > SKEW_S:
        return f"its clock differs by {duration(skew)}, so times are displayed wrong", "synchronize both clocks (NTP)"
    return "", ""


def _probed(project: Project, folder: Path, numerics: Numerics, launcher: Slurm, paths: list[str]) -> _Probed | str:
    """A job that has looked at paths of its node, or has waited too long; why it was refused."""
    script, output = folder / "probe.sh", folder / "probe.txt"
    write_text(script, batch_script(launcher.setup, shlex.join([sys.executable, "-c", PROBE, *paths])))
    began = time.time()
    answer = ask("sbatch", "--parsable", "--no-requeue", "--job-name=pedigree-doctor", f"--output={output}", f"--chdir={project.root}",
                 *resources(numerics, Placement(), launcher), str(script))  # fmt: skip
    if answer.returncode:
        return message(answer)
    number, deadline = answer.stdout.strip().partition(";")[0], time.monotonic() + PROBE_S
    try:
        while True:
            answer = ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%l|%r|%N")
            line = answer.stdout.strip().rpartition("\n")[2]  # after the name of a cluster of SLURM_CLUSTERS
            state, limit, reason, node = line.split("|") if line.count("|") == 3 else ("PENDING", "", "no answer", "")
            if state not in (*QUEUED, *ACTIVE) or time.monotonic() > deadline:
                break
            time.sleep(ASK_S)
    finally:
        ask("scancel", number)
    printed = output.read_text(errors="replace") if output.exists() else ""
    return _Probed(number, state, limit, reason, node, printed, (began, time.time()))


def _seconds(limit: str) -> int | None:
    """A time limit as `squeue` prints it, e.g. `1-12:00:00` or `5:00`, in seconds; None if there is none."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    return int(days or 0) * 86400 + sum(int(part) * 60**place for place, part in enumerate(reversed(parts)))
