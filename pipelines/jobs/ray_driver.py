"""The entry point of a job of Ray (`ray_launcher.py`): starts the job's processes in a placement group, and ends with their exit code.

It runs as a copy in the scratch folder, in the cluster's own Python, and imports nothing but Ray: Pedigree's environment may have another
version of Python and none of Ray.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from typing import Any

LOST, MEMORY = 220, 221
"""Exit codes: Ray has lost a node of the job, or killed it because a node was low on memory."""
SIGNALED = 128
"""Added to the number of the signal that ended the job."""
STEP_S = 1.0
STACKS_S = 0.5
SET_PARENT_DEATH_SIGNAL = 1


class Node:
    """The job's process on one node; runs in a worker of Ray, with which the process ends."""

    def __init__(self) -> None:
        self.libc, self.started = CDLL(None), threading.Event()

    def run(self, command: list[str], environment: dict[str, str], folder: str, log: str) -> int:
        """Run the process to its end; return its exit code, or its signal's number, negated."""
        gpus = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
        with open(log.replace("{node}", os.uname().nodename), "ab") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**environment, **gpus}, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=lambda: self.libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL),
            )  # fmt: skip
        self.started.set()
        code = self.process.wait()
        self.send(signal.SIGKILL)  # children left behind
        return code

    def send(self, number: int, leader: bool = False) -> None:
        """Send a signal to the process and its session, or to the `leader` alone, once it has started."""
        self.started.wait()
        for pid in [self.process.pid] if leader else map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(ProcessLookupError):
                if leader or os.getsid(pid) == self.process.pid:  # a command of an `external` stage has a group of its own
                    os.kill(pid, number)


def stop_file(submitted: Path) -> Path:
    """How to end the job: written before Ray is asked to."""
    return submitted.with_name(f"{submitted.stem}-stop.json")


def main(submitted: Path) -> int:
    """Run the job that the file describes."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray.exceptions import OutOfMemoryError, RayActorError  # pyright: ignore[reportMissingImports]
    from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]

    job = json.loads(submitted.read_text())
    submitted.unlink()  # its environment may hold keys
    ray.init(log_to_driver=False, logging_level="WARNING")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    group = placement_group([job["bundle"]] * len(job["commands"]), strategy="STRICT_SPREAD", name=job["token"])
    while not group.wait(STEP_S):
        if stopped.is_set():
            return SIGNALED + signal.SIGTERM
    nodes, waiting = start(job, group, submitted.parent)
    code, began = 0, None
    try:
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=STEP_S)
            code = next(filter(None, [code, *ray.get(ended)]), 0)
            if not stopped.is_set():
                if code:
                    break  # the processes on other nodes end with this driver
                continue
            wanted = how_to_stop(stop_file(submitted), job)
            if began is None:
                began = time.monotonic()
                for number in wanted["stacks"]:
                    ray.get([node.send.remote(number, leader=True) for node in nodes])
                    time.sleep(STACKS_S)
                ray.get([node.send.remote(signal.SIGTERM) for node in nodes])
            elif time.monotonic() - began > wanted["grace_s"]:
                ray.get([node.send.remote(signal.SIGKILL) for node in nodes])
    except RayActorError as error:
        sys.stderr.write(f"Ray lost a node of the job: {error}\n")
        return LOST
    except OutOfMemoryError as error:
        sys.stderr.write(f"Ray killed the job: {error}\n")
        return MEMORY
    return SIGNALED - code if code < 0 else code


def start(job: dict[str, Any], group: Any, scratch: Path) -> tuple[list[Any], list[Any]]:
    """Start the process of each node; return the actors and their pending exit codes."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

    nodes, codes = [], []
    for index, command in enumerate(job["commands"]):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        taken = {"num_cpus": job["bundle"].get("CPU", 0), "num_gpus": job["bundle"].get("GPU", 0)}
        node: Any = ray.remote(Node).options(**taken, max_concurrency=2, scheduling_strategy=strategy).remote()
        log = scratch / ("log-{node}.txt" if index else "log.txt")
        codes.append(node.run.remote(command, job["environment"], job["folder"], str(log)))
        nodes.append(node)
    return nodes, codes


def how_to_stop(stop: Path, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(stop.read_text())
    except FileNotFoundError:  # stopped by others
        return {"grace_s": job["grace_s"], "stacks": []}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
