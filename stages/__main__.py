"""Runs one stage inside its job: `python -m stages SCRATCH_FOLDER` (under torchrun for several ranks).

Exit codes: 0 done, 1 failed, 75 pre-empted (a checkpoint was written: resume me).
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from configs.declarations import DECLARATIONS
from data.artifacts import content_hash, open_artifact, scan, write_json
from stages.job import Inputs, Job, JobSpec, Preempted, StageError

RESUME_ME = 75


def main(folder: Path) -> int:
    spec = JobSpec.model_validate(json.loads((folder / "spec.json").read_text()))
    os.environ.setdefault("OMP_NUM_THREADS", str(spec.numerics.threads))
    rank = int(os.environ.get("RANK", "0"))
    job = Job(
        folder=folder,
        address=spec.address,
        key=spec.key,
        numerics=spec.numerics,
        placement=spec.placement,
        source_files={name: Path(path) for name, path in spec.source_files.items()},
        rank=rank,
    )
    job.progress(0, 0)
    try:
        metrics = run(spec, job)
    except Preempted as error:
        if rank == 0:  # torchrun swallows exit codes: the file says it too
            message = str(error) or "was asked to stop and wrote a checkpoint"
            write_json(folder / "done.json", {"ok": False, "cause": "preempted", "message": message})
        return RESUME_ME
    except Exception as error:  # the boundary of the process: every failure becomes a reported cause
        traceback.print_exc()
        if rank == 0 or not (folder / "done.json").exists():
            write_json(folder / "done.json", {"ok": False, "cause": cause_of(error), "message": str(error) or repr(error)})
        return 1
    if rank == 0:
        files = scan(job.out / "payload")
        write_json(
            folder / "done.json",
            {
                "ok": True,
                "metrics": metrics,
                "content": content_hash(files),
                "files": [entry.model_dump() for entry in files],
            },
        )
    return 0


def run(spec: JobSpec, job: Job) -> dict[str, Any]:
    """Calls the stage's `run(config, inputs, job)`; its result is the metrics that go into the record."""
    declaration = DECLARATIONS[spec.kind]
    inputs: Inputs = {
        port: {label: open_artifact(Path(path)) for label, path in labelled.items()} for port, labelled in spec.inputs.items()
    }
    config = declaration.config.model_validate(spec.config)
    module = importlib.import_module(f"stages.{spec.kind}")
    return module.run(config, inputs, job)


def cause_of(error: BaseException) -> str:
    """One word for the retry policy: `refused` will fail again, the others may pass."""
    if isinstance(error, (StageError, ValueError, TypeError, KeyError, AssertionError, ImportError)):
        return "refused"
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "out_of_memory"
    if isinstance(error, OSError):
        return "storage"
    return "crashed"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
