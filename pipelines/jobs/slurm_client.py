"""Slurm's programs and what their answers mean."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics, Placement, Slurm

ANSWER_S = 30.0
"""Longest wait for an answer; a client tries for 20 s to reach a controller that is away."""
AWAY = ("Unable to contact", "Socket timed out", "Zero Bytes", "Connection refused", "timed out")
"""Of a client's message: the controller may or may not have accepted the job."""
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables that say which cluster answers. All others of Slurm describe the allocation in which this process may run."""
LATER = re.compile(r"SubmitJob|temporarily unable|queue full|temporarily unavailable|connect failure|standby mode|partition not available")
"""Of a client's message: Slurm has not accepted the job, but may later. `SubmitJob` is part of the names of limits on queued jobs; a limit
on the size or time of one job has the same message but another name."""
NEVER = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS")
"""Reasons of a pending job that waiting does not remove."""
Answer = subprocess.CompletedProcess[str]


def is_installed() -> bool:
    return shutil.which("squeue") is not None


def ask(*arguments: str, environment: dict[str, str] | None = None) -> Answer:
    """The answer of one of Slurm's programs.

    Raises:
        PedigreeError: it is not installed.
    """
    try:
        return subprocess.run(
            arguments, capture_output=True, text=True, timeout=ANSWER_S, env=_outside_allocations(environment or os.environ),
            start_new_session=True,  # Ctrl-C in the terminal must not end it while it waits for an answer
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:  # sbatch retries for two minutes while the queue is full, and says so before
        output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        return subprocess.CompletedProcess(arguments, 1, "", f"{output}{arguments[0]} timed out")
    except FileNotFoundError as error:
        missing = f"{arguments[0]} is not in PATH: run this on a login node of the cluster, or remove placement.launcher from the profile"
        raise PedigreeError(missing) from error
    except OSError as error:  # this machine cannot start a process now
        return subprocess.CompletedProcess(arguments, 1, "", f"{arguments[0]} is temporarily unavailable: {error}")


def _outside_allocations(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what Slurm has set for the job in which this process runs: `srun` would take it for options of the new job."""
    return {name: value for name, value in environment.items() if name in KEPT or not name.startswith(("SLURM_", "PMI"))}


def is_away(answer: Answer) -> bool:
    """Whether the controller may have accepted the job although the client, which may have been killed, says otherwise."""
    return answer.returncode < 0 or any(words in answer.stderr for words in AWAY)


def deferral(answer: Answer) -> str | None:
    """Why Slurm accepts no such job now, although it may later."""
    return next((line for line in _lines(answer) if LATER.search(line)), None) if answer.returncode else None


def message(answer: Answer) -> str:
    return "; ".join(_lines(answer)) or f"exit code {answer.returncode}"


def _lines(answer: Answer) -> list[str]:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.stderr.strip().splitlines()]
    return [line.removeprefix("allocation failure: ") for line in lines]


def exit_code(number: str) -> int | None:
    """Exit code of a job that Slurm still knows; negative: a signal."""
    found = ask("scontrol", "show", "job", "--oneliner", number).stdout.partition(" ExitCode=")[2].split(" ")[0]
    code, _, killed = found.partition(":")
    return None if not code.isdigit() else -int(killed) if killed.isdigit() and int(killed) else int(code)


def resources(numerics: Numerics, placement: Placement, launcher: Slurm) -> list[str]:
    """The part of a cluster that a job takes, and the profile's options, which come last and so win.

    On each of its nodes: `slots` cores, or `slots` GPUs and cores for the threads of its ranks or engines, since Slurm's default is one.
    """
    cores, gpus = placement.slots, list[str]()
    if numerics.device == "cuda":
        cores, gpus = numerics.threads * max(numerics.ranks_per_node, placement.engines), [f"--gpus-per-node={placement.slots}"]
    stated = any(option.startswith("--cpus-per-gpu") for option in launcher.options)  # which excludes the other option
    return [
        f"--nodes={numerics.nodes}", "--ntasks-per-node=1", *gpus, *([] if stated else [f"--cpus-per-task={cores}"]), *launcher.options,
    ]  # fmt: skip


def batch_script(setup: Sequence[str], command: str) -> str:
    """A script that becomes the command, which thereby gets Slurm's signals."""
    return "\n".join(["#!/bin/bash", "set -e", *setup, f"exec {command}", ""])


def problem_of(wanted: tuple[str, ...]) -> str | None:
    """Why Slurm would reject a job with these options, or never start it; None also if it cannot tell now.

    Slurm's own test takes nodes that are down or drained for missing, although it queues jobs for them. So a job that the test refuses is
    submitted, with nothing to do, and canceled: the reason why it is pending tells the two apart.
    """
    tested = ask("sbatch", "--test-only", *wanted, "--wrap=true")
    if not tested.returncode or is_away(tested) or deferral(tested):
        return None
    answer = ask("sbatch", "--parsable", "--output=/dev/null", "--job-name=pedigree-test", *wanted, "--wrap=true")
    if answer.returncode:
        return None if is_away(answer) or deferral(answer) else message(answer)
    number = answer.stdout.strip().partition(";")[0]
    reason = ask("squeue", "--noheader", "--format=%r", f"--jobs={number}").stdout.strip().rpartition("\n")[2]
    ask("scancel", number)
    return f"{message(tested)} ({reason})" if reason in NEVER else None
