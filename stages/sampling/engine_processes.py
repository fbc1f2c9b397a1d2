"""The processes of engines (`python -m stages.sampling.sampler`): started ahead of time, each with the GPUs that it may see."""

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from configs.language.execution import Numerics
from stages.job.job import StageError

GPUS = "CUDA_VISIBLE_DEVICES"


class Ahead:
    """Engines' processes that import vLLM before they are needed: as many as work side by side while requests are still prepared, each
    further one that is expected while those before it work. A context manager around all of that.

    An engine that is opened with it takes a process. Those that nobody takes are killed at the end. Of engines that work side by side each
    sees GPUs of its own.
    """

    def __init__(self, numerics: Numerics, engines: int = 1) -> None:
        """
        Args:
            numerics: of the job.
            engines: how many work side by side.

        Raises:
            StageError: the job sees too few GPUs for them.
        """
        self._numerics = numerics
        self._gpus = [gpus_of(numerics, engine) if engines > 1 else None for engine in range(engines)]
        self._waiting: deque[subprocess.Popen[bytes]] = deque()
        self._started = 0
        self._expected = engines
        self._start()

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._waiting:
            process.kill()
            process.communicate()
        self._waiting.clear()

    def expect(self, engines: int) -> None:
        """Says how many engines will be opened from now on, at most."""
        self._expected = engines

    def take(self) -> "subprocess.Popen[bytes] | None":
        """The process that waits longest, if any; where further engines are expected, another process starts."""
        process = self._waiting.popleft() if self._waiting else None
        self._expected -= 1
        self._start()
        return process

    def _start(self) -> None:
        while len(self._waiting) < min(len(self._gpus), self._expected):
            self._waiting.append(start(self._numerics, self._gpus[self._started % len(self._gpus)]))
            self._started += 1


def gpus_of(numerics: Numerics, engine: int) -> list[str] | None:
    """Names of the GPUs that are an engine's own, of those that the job sees; None on a CPU.

    Raises:
        StageError: the job sees fewer.
    """
    if numerics.device == "cpu":
        return None
    end = (engine + 1) * numerics.tensor_parallel
    visible = [name for name in os.environ.get(GPUS, "").split(",") if name]
    if GPUS in os.environ and len(visible) < end:
        raise StageError(
            f"engine {engine + 1} needs GPU {end} of the job, which sees {len(visible)}: raise placement.slots, or lower engines"
        )
    return (visible or [str(number) for number in range(end)])[end - numerics.tensor_parallel : end]


def start(numerics: Numerics, gpus: list[str] | None = None) -> "subprocess.Popen[bytes]":
    """A process that becomes an engine when it is told its settings."""
    return subprocess.Popen(
        [sys.executable, "-m", "stages.sampling.sampler", str(os.getpid()), numerics.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_clean_environment(numerics) | ({GPUS: ",".join(gpus)} if gpus else {}),
        cwd=Path(__file__).parents[2],
    )


def _clean_environment(numerics: Numerics) -> dict[str, str]:
    """Our environment without the variables of torchrun and DeepSpeed: vLLM would try to join their process group."""
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    prefixes = ("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "DS_")
    kept = {name: value for name, value in os.environ.items() if name not in ranks and not name.startswith(prefixes)}
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return kept | quiet | ({"OMP_NUM_THREADS": str(numerics.threads)} if numerics.device == "cpu" else {})
