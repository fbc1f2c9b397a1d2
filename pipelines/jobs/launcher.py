"""The launcher starts, polls and ends jobs. It keeps no state: `job.json` holds all that is needed to find a job again, and its processes
carry the scratch folder in their environment.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import ArtifactError, write_json
from pedigree.data.artifacts.provenance import ADDED_STAGES
from pedigree.data.host.faults import fault_point
from pedigree.data.store.fence import FENCE, Fence
from pedigree.pipelines.jobs import memory_kills
from pedigree.pipelines.jobs.processes import (
    MARK,
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
    works_in,
)
from pedigree.pipelines.jobs.scratch_state import JOB, SPEC, Handle, memory_before, read_job, read_mapping
from pedigree.pipelines.jobs.slots import HeldSlots
from pedigree.stages.job.outcome import read_done

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
QUIET = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
}


DETERMINISTIC = {
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NCCL_ALGO": "Ring",
    "VLLM_BATCH_INVARIANT": "1",
}
"""In addition to torch's own switch, `Numerics.deterministic` sets these: flash attention's backward pass, a fixed order of summation
over ranks, and batch-invariant vLLM kernels.
"""


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
    end: tuple[str, str] | None = None
    """Cause and message of a failure that the scheduler knows."""


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
        process = Process.of(child.pid) or Process(child.pid, 0, Process.here().machine)
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
            return Status("succeeded", exit_code)
        before = memory_before(handle.told.get("memory", {}))
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
        private = {"process": asdict(process), "memory": asdict(memory_kills.Before.now())}
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


PROCESS_GROUP = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun for its processes. A job must not inherit them: it would wait for the ranks of a foreign group."""


def without_process_group(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that belongs to no group yet."""
    return {name: value for name, value in environment.items() if name not in PROCESS_GROUP}


KEPT_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864:glibc.malloc.hugetlb=1"
"""By default, glibc returns every large block to the kernel and maps it again, zeroed page by page: a third of a training step on CPU.
These settings keep blocks in the process, in huge pages where the kernel allows it.
"""


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's names for the settings of its allocator on GPUs, the second for earlier versions. By default, each pass of another shape leaves
holes that no other one fills; expandable segments have none.
"""


def _compiler() -> dict[str, str]:
    """Variables by which flashinfer and DeepSpeed, which compile at run time, find the ninja of this environment, and the lock's compiler
    if no other is set. Without them, vLLM chooses other kernels."""
    path = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    if any(name in os.environ for name in ("CUDA_HOME", "CUDA_PATH")):
        return path
    with suppress(PackageNotFoundError):
        for file in distribution("nvidia-cuda-nvcc").files or ():
            if file.match("bin/nvcc"):
                return path | {"CUDA_HOME": str(distribution("nvidia-cuda-nvcc").locate_file(file.parent.parent))}
    return path


def device_settings(numerics: Numerics) -> dict[str, str]:
    """Environment variables for a computing process, by device and threads."""
    threads = {"OMP_NUM_THREADS": str(numerics.threads), "MKL_NUM_THREADS": str(numerics.threads)}
    if numerics.device == "cuda":
        given = {} if any(name in os.environ for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True"}
        return threads | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | given | _compiler() | (DETERMINISTIC if numerics.deterministic else {})
    return threads | {
        "DS_ACCELERATOR": "cpu",
        # Long spinning costs several times the work on shared cores. Without spinning, threads sleep between any
        # two operations of a small model, and waking them takes a third of its time.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
        "GLIBC_TUNABLES": ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), KEPT_MEMORY])),
    }


def job_environment(scratch: Path, numerics: Numerics, code_root: Path, names: Sequence[str], fence: Fence | None = None) -> dict[str, str]:
    """The job's environment: the current one, with the code snapshot first, no telemetry, and variables for numerics, fence and GPUs."""
    kept = without_process_group(os.environ).items()
    environment = {name: value for name, value in kept if not name.startswith(("PREFECT_", "TORCHELASTIC_")) and name != ADDED_STAGES}
    environment |= QUIET | {
        MARK: str(scratch),
        "PYTHONPATH": os.pathsep.join([str(code_root), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    environment |= device_settings(numerics)
    if numerics.device == "cuda" and names:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    environment.pop(FENCE, None)
    return environment | ({FENCE: str(fence.path)} if fence else {})
