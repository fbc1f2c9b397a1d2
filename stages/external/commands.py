"""Run a command of other software within a job: its output in the job's log, its processes ended with it, its packages listed."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pedigree.configs.methods.external import search_path
from pedigree.data.host.effort import CPU_SHARE
from pedigree.data.host.pipes import readable
from pedigree.stages.job.failures import Preempted, StageError
from pedigree.stages.job.job import HEARTBEAT_INTERVAL_S, Job

LINES, WIDTH = 20, 400
"""Lines of the log, and characters of each, that a failure shows."""
DOING = "running the command"
OURS = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUTF8")
"""Variables of jobs that would change what another program imports, or how it reads text."""
PACKAGES = """
import importlib.metadata, json, platform, re
named = [(one.metadata.get("Name"), one.version) for one in importlib.metadata.distributions()]
whole = [(name, version) for name, version in named if isinstance(name, str) and isinstance(version, str)]  # without METADATA: None
found = {name: version for name, version in whole if re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}", name)}
print(json.dumps({"python": platform.python_version(), "libraries": found}))
"""
"""Prints the packages of the Python that runs it."""


def variables(environment: Path | None) -> dict[str, str]:
    """The environment variables of a command: those of the job, without its own imports, and the Python environment first on `PATH`."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    users = os.environ.get("PYTHONPATH", "").partition(os.pathsep)[2]  # after the code of the job
    kept |= {"PATH": search_path(environment)} | ({"PYTHONPATH": users} if users else {})
    return kept | ({"VIRTUAL_ENV": str(environment)} if environment else {})


def packages(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The version of Python and the packages that a command finds; None where `PATH` has no Python that lists them."""
    python = shutil.which("python", path=environment["PATH"])
    if python is None:
        return None
    done = subprocess.run([python, "-c", PACKAGES], env=environment, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout.strip().rpartition("\n")[2]) if done.returncode == 0 else None  # sitecustomize may print before
    except ValueError:
        return None


def run_command(words: Sequence[str], folder: Path, environment: Mapping[str, str], job: Job) -> None:
    """Run a command in a folder until it ends, and then end all other processes of its group.

    Raises:
        StageError: it cannot be started, or ended with another exit code than 0; with the end of its output.
        RuntimeError: a signal ended it, which another attempt may avoid.
        Preempted: the job was asked to stop, and the command with it.
    """
    print(f"running {shlex.join(words)}", flush=True)
    last = deque[bytes](maxlen=LINES)
    try:
        command = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )
    except OSError as error:
        raise StageError(f"{words[0]} cannot be started ({error.strerror}): correct the command, or placement.environment") from error
    try:
        _follow(command, last, job)
    except Preempted:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(command.pid, signal.SIGTERM)
        _follow(command, last, job)  # while it writes a checkpoint; after `grace_s`, all processes of the job are killed
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    if command.returncode < 0:
        raise RuntimeError(f"{words[0]} was ended by {signal.Signals(-command.returncode).name}")
    if command.returncode:
        tail = "\n".join(line.decode(errors="replace").rstrip()[:WIDTH] for line in last)
        raise StageError(f"{words[0]} ended with exit code {command.returncode}; the end of its output:\n{tail}")


def _follow(command: "subprocess.Popen[bytes]", last: deque[bytes], job: Job) -> None:
    """Copy the output of a command to the log until it ends; report activity while it writes or computes."""
    assert command.stdout is not None
    pipe, is_open, line = command.stdout.fileno(), True, b""
    computed, looked = 0.0, time.monotonic()
    while True:
        ended = command.poll() is not None
        if is_open and readable(pipe, 0 if ended else HEARTBEAT_INTERVAL_S):
            read = os.read(pipe, 1 << 16)
            is_open = bool(read)
            sys.stdout.buffer.write(read)
            sys.stdout.buffer.flush()
            *lines, line = (line + read).split(b"\n")
            last.extend(filter(bytes.strip, lines))
            line = line[-WIDTH:]  # of a bar of progress, which is one long line
            if read:
                job.doing(DOING)
        elif ended:  # what still has the pipe is killed with the group
            last.extend(filter(bytes.strip, [line]))
            return
        else:
            now, spent = time.monotonic(), _cpu_seconds(command.pid)
            if spent - computed > CPU_SHARE * (now - looked):
                job.doing(DOING)
            computed, looked = spent, now
            time.sleep(0 if is_open else HEARTBEAT_INTERVAL_S)


def _cpu_seconds(group: int) -> float:
    """CPU time of the live processes of a process group and of their descendants, because torchrun starts each worker in a session of its
    own (`/proc/PID/stat`, fields 4, 5, 14 and 15)."""
    found: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                found[int(place.name)] = [int(fields[number - 3]) for number in (4, 5, 14, 15)]
    own = {pid for pid, (_, its_group, *_) in found.items() if its_group == group}
    while started := {pid for pid, (parent, *_) in found.items() if parent in own} - own:
        own |= started
    return sum(sum(found[pid][2:]) for pid in own) / os.sysconf("SC_CLK_TCK")
