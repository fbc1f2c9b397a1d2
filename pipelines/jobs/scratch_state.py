"""Typed reading of the state in a scratch folder, tolerating power cuts, full disks, manual edits and other versions.

Damaged files that a job can do without count as absent: its launcher's handle, its attempts, the git state of its code. The spec is
required to interpret the work in the folder, so resumable work without it is left alone: `Damaged`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.external import External, left_by_command
from pedigree.data.artifacts.artifacts import ArtifactError, read_json, write_text
from pedigree.data.artifacts.mirror import ELSEWHERE
from pedigree.data.artifacts.run_record import PortableCode, read_attempts
from pedigree.data.store.untrusted import Address, Line, described, read_as
from pedigree.pipelines.jobs.processes import Process
from pedigree.pipelines.quantities import number, transferred
from pedigree.stages.job.job import checkpoint_names
from pedigree.stages.job.outcome import read_done
from pedigree.stages.job.spec import JobSpec

SPEC, JOB, ATTEMPTS, CODE, DEPENDENCIES = "spec.json", "job.json", "attempts.json", "code.json", "dependencies.json"
DEFERRED = "deferred.json"
"""What a runner waits for before its scheduler accepts the job."""
ANSWERS = "chunks/answers.jsonl"
"""Log of answers (`stages.sampling.answer_log`); the next attempt neither recomputes nor re-requests them."""
NEWER = ("bf16_products", "nodes", "sequence_parallel")
"""Numerics that code whose work may be resumed does not know."""
UNKNOWN = "unknown/unknown"
"""Address of a scratch folder whose spec does not specify its stage."""
_ADDRESS = TypeAdapter(Address)
_DEPENDENCIES = TypeAdapter(dict[str, Any])


class Damaged(PedigreeError):
    """A file required to interpret the work in a scratch folder cannot be read."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged, or from another version of Pedigree ({why})")
        self.scratch = path.parent


def scratch_folders(project: Project) -> list[Path]:
    """Scratch folders of all jobs, by name."""
    return sorted(path for path in (project.private / "scratch").glob("*") if path.is_dir())


def read_spec(scratch: Path) -> JobSpec:
    """The spec of a scratch folder's job.

    Raises:
        Damaged: the spec is missing, or not in this version's format.
    """
    path = scratch / SPEC
    try:
        return JobSpec.model_validate(read_json(path))
    except ValidationError as error:
        raise Damaged(path, described(error)) from error
    except ArtifactError as error:
        raise Damaged(path, "it cannot be read") from error


def write_spec(scratch: Path, spec: JobSpec) -> None:
    """Write a job's spec, with inputs in the recipe's order. A job may resume with its original code, and older code rejects unknown
    settings, so those are omitted at their default value.
    """
    unknown = {name for name in NEWER if getattr(spec.numerics, name) == Numerics.model_fields[name].default}
    excluded = {"numerics": unknown, "asked": unknown, "placement": {"launcher"}}
    write_text(scratch / SPEC, spec.model_dump_json(indent=1, exclude=excluded) + "\n")


def known_spec(scratch: Path) -> JobSpec | None:
    """The spec; None if missing or damaged."""
    try:
        return read_spec(scratch)
    except Damaged:
        return None


def address_of(scratch: Path) -> str:
    """`RECIPE/STAGE` of a scratch folder, or `UNKNOWN`; also reads specs of other versions."""
    try:
        return _ADDRESS.validate_python(read_mapping(scratch / SPEC).get("address"))
    except ValidationError:
        return UNKNOWN


class Handle(Frozen):
    """A submitted job: a `job.json`."""

    launcher: Line
    scratch: Annotated[str, Field(max_length=4096)]
    attempt: int
    told: dict[str, Any] = Field(default_factory=dict)
    """Private data of its launcher, used to find it again."""
    submitted_at: Annotated[float, Field(ge=0, le=1e11)] = 0.0
    """For display: by the clock of the submitting machine."""

    @property
    def token(self) -> str:
        """The token of a submission to a scheduler; empty, which is no job's, if the handle is damaged or made by others."""
        token = self.told.get("token")
        return token if isinstance(token, str) and re.fullmatch("[0-9a-f]{32}", token) else ""


def read_job(scratch: Path) -> Handle | None:
    """The job submitted last; None if unknown."""
    found = read_as(Handle.model_validate, scratch / JOB)
    return None if found and "process" in found.told and Process.parse(found.told["process"]) is None else found


def attempts_here(scratch: Path) -> list[dict[str, Any]]:
    """Attempts on this machine."""
    return read_attempts(scratch / ATTEMPTS)


def all_attempts(scratch: Path) -> list[dict[str, Any]]:
    """All attempts, on machines that are gone and here."""
    elsewhere = read_attempts(scratch / ELSEWHERE)
    gone = [attempt if "ended_at" in attempt else {**attempt, "cause": "lost"} for attempt in elsewhere]
    return gone + attempts_here(scratch)


def read_code(scratch: Path, snapshot: str) -> dict[str, Any]:
    """Git state of the code that the job runs; only the hash of the snapshot if it cannot be read."""
    found = read_as(PortableCode.model_validate, scratch / CODE)
    return found.model_dump(mode="json", exclude_unset=True) if found and found.snapshot == snapshot else {"snapshot": snapshot}


def read_dependencies(scratch: Path) -> dict[str, Any]:
    """Dependencies at the start of the job.

    Raises:
        Damaged: they cannot be read.
    """
    path = scratch / DEPENDENCIES
    try:
        return _DEPENDENCIES.validate_python(read_json(path))
    except (ArtifactError, ValidationError) as error:
        raise Damaged(path, "it cannot be read") from error


def checkpoints_here(scratch: Path) -> list[str]:
    """Names of what the next attempt can resume from, latest last: checkpoints, or what the command of an `external` stage has left."""
    spec = known_spec(scratch)
    if spec is None or spec.kind != "external":
        return checkpoint_names(scratch)
    try:
        left = left_by_command(scratch, External.model_validate(spec.config).resume)
    except ValidationError:  # of another version
        return []
    return [left.name] if left else []


def has_reported(scratch: Path) -> bool:
    """Whether the job has reported its end, even unreadably."""
    try:
        return read_done(scratch) is not None
    except ArtifactError:
        return True


def reported_success(scratch: Path) -> bool | None:
    """Whether the job reports success; None if it has not reported its end. Reading an unreadable report raises its error later."""
    try:
        done = read_done(scratch)
    except ArtifactError:
        return False
    return None if done is None else done.ok


def answers_size(scratch: Path) -> int:
    """Size of the log of answers in bytes, zero without one. A running job may write to it."""
    try:
        return (scratch / ANSWERS).stat().st_size
    except FileNotFoundError:
        return 0


def number_of_answers(scratch: Path) -> int:
    """Complete lines in the log of answers."""
    try:
        with (scratch / ANSWERS).open("rb") as lines:
            return sum(line.endswith(b"\n") for line in lines)
    except FileNotFoundError:
        return 0


class Heartbeat(BaseModel):
    """The displayed part of a `progress.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    step: int = 0
    total: int = 0
    numbers: dict[str, float | None] = Field(default_factory=dict)
    """null: the job had no number to report."""
    time: float | None = None
    doing: dict[str, Any] | None = None
    """Work outside the steps: loading, tokenizing, hashing."""

    @property
    def work(self) -> str:
        """Format the other work: `hashing 12.0 GB of 100.0 GB`; empty if the job only reports steps."""
        doing = self.doing or {}
        if "what" not in doing:
            return ""
        done, of = float(doing.get("done") or 0), float(doing.get("of") or 0)
        if of and doing.get("unit") == "GB":
            return f"{doing['what']} {transferred(round(done * 1e9), round(of * 1e9))}"
        shown = [number(done) if done == int(done) else f"{done:.1f}", f"of {number(of) if of == int(of) else f'{of:.1f}'}"] if of else []
        return " ".join([str(doing["what"]), *shown, *([str(doing["unit"])] if of and doing.get("unit") else [])])


def read_heartbeat(scratch: Path) -> Heartbeat:
    """The job's reported progress; the default values if it cannot be read."""
    try:
        return Heartbeat.model_validate(read_mapping(scratch / "progress.json"))
    except ValidationError:
        return Heartbeat()


def read_mapping(path: Path) -> dict[str, Any]:
    """A small JSON file maintained by another process; empty if missing, damaged, or just being replaced."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def make_way(scratch: Path) -> None:
    """Remove folders whose names a job's files need."""
    for path in scratch.glob("*.json"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
