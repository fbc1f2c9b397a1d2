"""Engine processes (`python -m pedigree.stages.sampling.sampler`), started ahead of time, each with its own GPUs."""

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from pedigree.configs.language.execution import Numerics
from pedigree.stages.job.failures import StageError

GPUS = "CUDA_VISIBLE_DEVICES"


class WarmEngines:
    """Pool of engine processes that import vLLM before they are needed: enough for all parallel engines while requests are prepared, and
    each further expected one while the previous ones work. A context manager that kills unused processes at its end.

    Opening an engine takes a process from the pool. Each parallel engine sees only its own GPUs.
    """

    def __init__(self, numerics: Numerics, engines: int = 1) -> None:
        """
        Args:
            numerics: the job's numerics.
            engines: number of parallel engines.

        Raises:
            StageError: the job sees too few GPUs.
        """
        self._numerics = numerics
        self._gpus = [gpus_of(numerics, engine) if engines > 1 else None for engine in range(engines)]
        self._waiting: deque[subprocess.Popen[bytes]] = deque()
        self._started = 0
        self._expected = engines
        self._start()

    def __enter__(self) -> "WarmEngines":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._waiting:
            process.kill()
            process.communicate()
        self._waiting.clear()

    def expect(self, engines: int) -> None:
        """Set the maximum number of engines still to be opened."""
        self._expected = engines

    def take(self) -> "subprocess.Popen[bytes] | None":
        """Take the oldest waiting process, if any; start another one if more engines are expected."""
        process = self._waiting.popleft() if self._waiting else None
        self._expected -= 1
        self._start()
        return process

    def _start(self) -> None:
        while len(self._waiting) < min(len(self._gpus), self._expected):
            self._waiting.append(start(self._numerics, self._gpus[self._started % len(self._gpus)]))
            self._started += 1


def gpus_of(numerics: Numerics, engine: int) -> list[str] | None:
    """Names of an engine's own GPUs among those of the job; None on a CPU.

    Raises:
        StageError: the job sees too few GPUs.
    """
    if numerics.device == "cpu":
        return None
    end = (engine + 1) * numerics.tensor_parallel
    visible = [name for name in os.environ.get(GPUS, "").split(",") if name]
    if GPUS in os.environ and len(visible) < end:
        raise StageError(
            f"engine {engine + 1} needs GPU {end} of the job, which has {len(visible)}: raise placement.slots, or lower engines"
        )
    return (visible or [str(number) for number in range(end)])[end - numerics.tensor_parallel : end]


def start(numerics: Numerics, gpus: list[str] | None = None) -> "subprocess.Popen[bytes]":
    """Start a process that becomes an engine when it receives its settings."""
    return subprocess.Popen(
        [sys.executable, "-m", "pedigree.stages.sampling.sampler", str(os.getpid()), numerics.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_clean_environment(numerics) | ({GPUS: ",".join(gpus)} if gpus else {}),
        cwd=Path(__file__).parents[3],
    )


def _clean_environment(numerics: Numerics) -> dict[str, str]:
    """The environment without the variables of torchrun and DeepSpeed, whose process group vLLM would try to join."""
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    prefixes = ("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "DS_")
    kept = {name: value for name, value in os.environ.items() if name not in ranks and not name.startswith(prefixes)}
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return kept | quiet | ({"OMP_NUM_THREADS": str(numerics.threads)} if numerics.device == "cpu" else {})
