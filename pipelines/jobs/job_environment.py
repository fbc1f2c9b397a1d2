"""The environment of a job's processes: its code, threads, GPUs and memory, and nothing that belongs to another process group."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.provenance import ADDED_STAGES
from pedigree.data.store.fence import FENCE, Fence
from pedigree.pipelines.jobs.processes import MARK

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
PROCESS_GROUP = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun for its processes. A job must not inherit them: it would wait for the ranks of a foreign group."""
KEPT_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864:glibc.malloc.hugetlb=1"
"""By default, glibc returns every large block to the kernel and maps it again, zeroed page by page: a third of a training step on CPU.
These settings keep blocks in the process, in huge pages where the kernel allows it.
"""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's names for the settings of its allocator on GPUs, the second for earlier versions. By default, each pass of another shape leaves
holes that no other one fills; expandable segments have none.
"""


def job_environment(scratch: Path, numerics: Numerics, code_root: Path, names: Sequence[str], fence: Fence | None = None) -> dict[str, str]:
    """The job's environment: the current one, with the code snapshot first, no telemetry, and variables for numerics, fence and GPUs."""
    kept = without_process_group(os.environ).items()
    environment = {name: value for name, value in kept if not name.startswith(("PREFECT_", "TORCHELASTIC_")) and name != ADDED_STAGES}
    environment.pop(FENCE, None)
    return environment | job_settings(scratch, numerics, code_root, names, fence)


def job_settings(scratch: Path, numerics: Numerics, code_root: Path, names: Sequence[str], fence: Fence | None = None) -> dict[str, str]:
    """The variables that a job needs in any environment."""
    settings = QUIET | {
        MARK: str(scratch),
        "PYTHONPATH": os.pathsep.join([str(code_root), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
    }
    settings |= device_settings(numerics)
    if numerics.device == "cuda" and names:
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return settings | ({FENCE: str(fence.path)} if fence else {})


def without_process_group(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that belongs to no group yet."""
    return {name: value for name, value in environment.items() if name not in PROCESS_GROUP}


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


def _compiler() -> dict[str, str]:
    """Variables by which flashinfer, which compiles at run time, finds the ninja of this environment, and the lock's compiler
    if no other is set. Without them, or where it could compile but not link, vLLM chooses other kernels."""
    path = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    if any(name in os.environ for name in ("CUDA_HOME", "CUDA_PATH")):
        return path
    home = cuda_of_wheels()
    return path | ({"CUDA_HOME": str(home)} if home and can_link(home) else {})


def cuda_of_wheels() -> Path | None:
    """The folder in which NVIDIA's wheels put CUDA and its compiler, if they are installed."""
    with suppress(PackageNotFoundError):
        for file in distribution("nvidia-cuda-nvcc").files or ():
            if file.match("bin/nvcc"):
                return Path(str(distribution("nvidia-cuda-nvcc").locate_file(file.parent.parent)))
    return None


def can_link(home: Path) -> bool:
    """Whether it has the names that a linker looks for, which `requirements/cuda_links.py` gives it."""
    return (home / "lib64" / "libcudart.so").exists()
