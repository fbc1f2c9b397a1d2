"""Training processes that step in turn: what slows the machine down slows all of them down.

A worker tells how long each of its optimizer steps took, and waits to be told to go on; so the others rest while one is timed.
It speaks through the descriptor that was its standard output, one line of JSON a message; what libraries print goes to the log.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pedigree.pipelines.jobs.job_environment import without_process_group


class Enough(BaseException):
    """The last timed step is done; the rest of the stage is skipped."""


class Pace:
    """A worker's side: `lap` after each optimizer step."""

    def __init__(self, steps: int) -> None:
        """Take over standard output and wait for the first signal to continue."""
        self.steps, self.step = steps, 0
        self.first: dict[str, float] = {}
        """Loss and gradient norm of the first step."""
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0

    def logged(self, numbers: dict[str, float]) -> None:
        """Record what the trainer reports of a step; the first one is kept."""
        self.first = self.first or {name: float(numbers[name]) for name in ("loss", "grad_norm")}

    def ready(self) -> None:
        """Call as late as possible before the first step; the time until then belongs to no step."""
        self._wait({"ready": True})

    def lap(self) -> None:
        """Ends a step and waits to begin the next.

        Raises:
            Enough: it was the last.
        """
        seconds = time.perf_counter() - self._began
        self.step += 1
        if self.step < self.steps:
            self._wait({"seconds": seconds})
            return
        self._say({"seconds": seconds})
        raise Enough

    def finish(self) -> None:
        self._say({"first": self.first, "peak_bytes": peak_bytes()})
        os._exit(0)  # an engine's threads and hooks need no farewell

    def _wait(self, message: dict[str, Any]) -> None:
        self._say(message)
        if not sys.stdin.readline():
            raise SystemExit("the benchmark that started this worker has gone")
        self._began = time.perf_counter()

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def peak_bytes() -> int:
    """Peak memory of this process; unlike `ru_maxrss`, independent of the process that started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class Laps:
    """Measurements of one worker."""

    seconds: list[float]
    first: dict[str, float]
    """Loss and gradient norm of the first step."""
    peak_bytes: int


class Worker:
    """The benchmark's side of one worker process."""

    def __init__(self, command: list[str], log: Path, settings: dict[str, str]) -> None:
        """Start the worker, with `settings` added to the environment."""
        self.log = log
        environment = without_process_group(os.environ) | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | settings
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=environment,
            )

    def hear(self) -> dict[str, Any]:
        """Its next message.

        Raises:
            RuntimeError: it has ended; with the end of its log.
        """
        line = _pipe(self.process.stdout).readline()
        if not line:
            self.process.wait()
            raise RuntimeError(f"a worker ended early, its log {self.log} ends in:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def step(self) -> float:
        """Let the worker take one optimizer step; returns its seconds."""
        _pipe(self.process.stdin).write("go\n")
        _pipe(self.process.stdin).flush()
        return self.hear()["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def race(workers: Mapping[str, Worker], steps: int) -> dict[str, Laps]:
    """All workers take `steps` steps in turn, each time in another order."""
    names = list(workers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for worker in workers.values():
            worker.hear()
        for number in range(steps):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(workers[name].step())
        ends = {name: worker.hear() for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return {name: Laps(seconds[name], end["first"], end["peak_bytes"]) for name, end in ends.items()}
