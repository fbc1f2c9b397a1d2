"""Runs one stage inside its job: `python -m pedigree.stages SCRATCH_FOLDER` (under torchrun for several ranks).

Exit codes: 0 done, 1 failed, 75 preempted by SIGTERM or SIGUSR1 and resumable. SIGUSR2 prints the stack of the main thread and SIGRTMIN
that of every thread, to diagnose a hung job.
"""

import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from pydantic import ValidationError

from pedigree.configs.base.installation import missing
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import Artifact, content_hash, entries_of, survey, write_json
from pedigree.data.artifacts.provenance import code_files, code_sha256, environment, fingerprint, hardware
from pedigree.data.host.faults import fault_point
from pedigree.data.host.machine import has_gpu
from pedigree.data.host.process import die_with, leave, peak_memory, uncollected
from pedigree.data.store.durable import sync_tree
from pedigree.data.store.storage import StoreError
from pedigree.data.store.untrusted import described
from pedigree.stages.job.failures import (
    BUGS,
    EngineLost,
    NotFinite,
    Preempted,
    StageError,
    is_collective,
    is_full,
    is_memory,
    lasting,
    storage_cause,
)
from pedigree.stages.job.inputs import check_untouched, open_inputs
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.job.outcome import LONGEST_MESSAGE, RESUME_ME
from pedigree.stages.job.postconditions import not_trained, other_template, templates_of, unmet
from pedigree.stages.job.spec import JobSpec

STOPPING = (signal.SIGTERM, signal.SIGUSR1)


def main(folder: Path) -> int:
    listen()
    spec = JobSpec.model_validate(json.loads((folder / "spec.json").read_text()))
    os.environ.setdefault("OMP_NUM_THREADS", str(spec.numerics.threads))
    rank = int(os.environ.get("RANK", "0"))
    job = Job.of(spec, folder, rank=rank)
    with job.beating():
        job.progress(0, 0)
        return work(spec, job)


def work(spec: JobSpec, job: Job) -> int:
    """Run the stage and write its report; return the exit code."""
    folder, rank = job.folder, job.rank
    try:
        with job:
            check_code(spec)
            inputs, config = open_inputs(spec, job), read_config(spec)
            with job.busy("loading libraries"):
                module = load_stage(spec.kind)
            metrics = module.run(config, inputs, job)
            if rank == 0:
                metrics = check(spec, config, inputs, metrics, job)
        if rank == 0:
            finish(spec, job, metrics)
    except Preempted as error:
        if (folder / "done.json").exists():  # the signal came too late
            return 0
        if rank == 0:  # torchrun swallows exit codes, so the file reports it too
            end(job, ok=False, cause="preempted", message=str(error))
        return RESUME_ME
    except Exception as error:  # the boundary of the process: every failure becomes a reported cause
        cause = cause_of(error, folder)
        show(error, cause)
        if cause != "collective" or not (folder / "done.json").exists():  # a collective error only means that another rank has failed
            message = f"{type(error).__name__}: {error}" if cause == "bug" else str(error) or repr(error)
            remedy = None if isinstance(error, PedigreeError) else lasting(error)
            message += f": {remedy}" if remedy else ""
            end(job, ok=False, cause=cause, message=message[:LONGEST_MESSAGE])
        return 1
    return 0


def show(error: BaseException, cause: str, file: TextIO | None = None) -> None:
    """Write a failure to the log: an expected one without a traceback."""
    if cause == "refused" and isinstance(error, PedigreeError):
        print(f"refused: {error}", file=file or sys.stderr, flush=True)
    else:
        traceback.print_exception(error, file=file)


def finish(spec: JobSpec, job: Job, metrics: dict[str, Any]) -> None:
    """Hash the result, sync it to disk, and report it."""
    seen = survey(job.out / "payload", md5=True, beat=lambda done, size: job.doing("hashing", done / 1e9, size / 1e9, "GB"))
    with job.busy("writing to the disk", flushing=True):
        sync_tree(job.out)
    fault_point("job finished")
    files = entries_of(seen)
    made = {"content": content_hash(files), "files": [entry.model_dump() for entry in files], "metrics": metrics, "marks": job.marks}
    code = spec.fingerprint.model_dump() if spec.fingerprint else fingerprint(spec.kind)
    made["made_by"] = {"fingerprint": code, "environment": environment(), "hardware": hardware()}
    made["made_by"]["numerics"] = job.numerics.model_dump(mode="json")
    made["made_by"] |= {"command_environment": job.command_environment} if job.command_environment else {}
    end(job, ok=True, seen={name: found.as_json() for name, found in seen.items()}, **made)


def listen() -> None:
    """Install signal handlers. SIGTERM and SIGUSR1 end the job; stages with checkpoints write one first (`Checkpoints`). A rank ends with
    its torchrun, which on other nodes nobody else would notice."""

    def stop(number: int, _: Any) -> None:
        for stopping in STOPPING:  # a second one would end the report of the first
            signal.signal(stopping, signal.SIG_IGN)
        raise Preempted(f"asked to stop by {signal.Signals(number).name}")

    for number in STOPPING:
        signal.signal(number, stop)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    faulthandler.register(signal.SIGUSR2, all_threads=False)  # of the main thread, which gets the signal and so stands still
    faulthandler.register(signal.SIGRTMIN, all_threads=True)  # others run on, which may end the process


def end(job: Job, **outcome: Any) -> None:
    """Write `done.json`, unless another submission has taken over."""
    job.seal()
    common = {"checkpoints": job.checkpoint_cost, "resumed_from": job.resumed_from, "peak": peak_memory()}
    write_json(job.folder / "done.json", outcome | common)


def check(spec: JobSpec, config: Any, inputs: Inputs, metrics: dict[str, Any], job: Job) -> dict[str, Any]:
    """Check a stage's result; return the metrics for the record.

    Raises:
        StageError: the result does not fulfill what its kind declares.
    """
    declaration = KINDS[spec.kind]
    check_untouched(spec, job)
    types = {port: [artifact.type for artifact in given.values()] for port, given in inputs.items()}
    with job.busy("checking the result"):
        problem = unmet(declaration.output(config, types), metrics, job)
        templates = templates_of(inputs, job.out / "payload")
        metrics |= {"chat_templates": templates} if templates else {}
        if not problem and declaration.trains:
            problem = other_template(templates)
        if not problem and declaration.trains:
            metrics, problem = with_update(metrics, only(inputs, "policy"), job)
    if problem:
        raise StageError(f"it ended without an error, but {problem}")
    return metrics


def with_update(metrics: dict[str, Any], start: Artifact, job: Job) -> tuple[dict[str, Any], str | None]:
    """(metrics with the size of the weight update, why nothing was trained or None)."""
    from pedigree.stages.job.updates import measure

    update = measure(start.payload, job.out / "payload")
    return metrics | update.metrics(), not_trained(update, metrics)


def read_config(spec: JobSpec) -> Any:
    """Validate the stage's configuration.

    Raises:
        StageError: it is no longer valid because a file it depends on, e.g. a template, has changed.
    """
    try:
        return KINDS[spec.kind].config.model_validate(spec.config)
    except ValidationError as error:
        raise StageError(f"its configuration is no longer valid ({described(error)}): run the command again") from error


def load_stage(kind: str) -> ModuleType:
    """Import the stage's module.

    Raises:
        StageError: a library is not installed.
    """
    try:
        with uncollected():
            return importlib.import_module(f"pedigree.stages.{kind}.run")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pedigree":
            raise
        raise StageError(f"the library {error.name} is not installed: {missing('train,serve', gpu=has_gpu())}") from error


def check_code(spec: JobSpec) -> None:
    """Check that the running code is the code with which the orchestrator loaded the recipe.

    Raises:
        StageError: the snapshot was changed, or has another version of the stage.
    """
    if code_sha256(code_files()) != spec.code:
        raise StageError("the running code differs from the job's snapshot: remove .pedigree/code and run the command again")
    if KINDS[spec.kind].version != spec.version:
        raise StageError(f"the recipe was loaded with version {spec.version} of {spec.kind}, but the running code has version "
                         f"{KINDS[spec.kind].version}: run the command again")  # fmt: skip


def cause_of(error: BaseException, folder: Path) -> str:
    """Classify an error as one word for the retry policy, `pipelines.jobs.attempts.RETRIED`."""
    text = str(error).lower()
    if isinstance(error, NotFinite):
        return "not_finite"
    if isinstance(error, StoreError):
        return "storage" if error.passing else "refused"
    if isinstance(error, PedigreeError):
        return "refused"
    if lasting(error):
        return "refused"
    if isinstance(error, BUGS):
        return "bug"
    if is_memory(error):
        return "out_of_memory"
    if "pytorchstreamwriter" in text and is_full(folder):
        return "disk_full"  # torch reports only that a write failed
    if isinstance(error, OSError):
        return storage_cause(error)
    if number := re.search(r"\(os error (\d+)\)", text):  # libraries in Rust, such as safetensors
        return storage_cause(OSError(int(number[1]), text))
    if is_collective(error):
        return "collective"
    if isinstance(error, EngineLost):
        return "lost_engine"
    return "crashed"


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]).resolve()))
