"""The state of a scratch folder, read back: typed, whatever a power cut, a full disk, an editor or another version has left there.

What a job can do without counts as never written where it is damaged: who runs it, how it was tried, what git said of its code. Its spec
says what the work in the folder is, so work that can be gone on with is not touched without it: `Damaged` says what to type.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from configs.base.frozen import Frozen
from configs.base.problems import PedigreeError
from configs.base.project import Project
from data.artifacts.artifacts import ArtifactError, read_json, write_text
from data.artifacts.mirror import ELSEWHERE
from data.artifacts.run_record import ToldCode, read_attempts
from data.store.untrusted import Address, Line, described
from pipelines.jobs.memory_kills import Before
from pipelines.jobs.processes import Process
from stages.job.job import JobSpec, read_done

SPEC, JOB, ATTEMPTS, CODE, DEPENDENCIES = "spec.json", "job.json", "attempts.json", "code.json", "dependencies.json"
UNKNOWN = "unknown/unknown"
"""Address of a scratch folder whose spec does not say for which stage it was made."""
_ADDRESS = TypeAdapter(Address)


class Damaged(PedigreeError):
    """What the work of a scratch folder means nothing without cannot be read."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged, or of another version of Pedigree ({why})")
        self.scratch = path.parent


def scratch_folders(project: Project) -> list[Path]:
    """Of all jobs, by name."""
    return sorted(path for path in (project.private / "scratch").glob("*") if path.is_dir())


def read_spec(scratch: Path) -> JobSpec:
    """What the job of a scratch folder was asked for.

    Raises:
        Damaged: its spec is not there, or not what this version writes.
    """
    path = scratch / SPEC
    try:
        return JobSpec.model_validate(read_json(path))
    except ValidationError as error:
        raise Damaged(path, described(error)) from error
    except ArtifactError as error:
        raise Damaged(path, "it cannot be read") from error


def write_spec(scratch: Path, spec: JobSpec) -> None:
    """Asks for a job, inputs in the recipe's order. A job may go on with the code that it began with, and older code refuses settings
    that it does not know: those are left out where they say nothing."""
    unknown = {"bf16_products"} if spec.numerics.bf16_products == "auto" else set[str]()
    write_text(scratch / SPEC, spec.model_dump_json(indent=1, exclude={"numerics": unknown, "asked": unknown}) + "\n")


def known_spec(scratch: Path) -> JobSpec | None:
    """The same; None where it is not there or damaged."""
    try:
        return read_spec(scratch)
    except Damaged:
        return None


def address_of(scratch: Path) -> str:
    """`RECIPE/STAGE` that a scratch folder was made for, or `UNKNOWN`; also where a spec is of another version."""
    try:
        return _ADDRESS.validate_python(read_mapping(scratch / SPEC).get("address"))
    except ValidationError:
        return UNKNOWN


class JobFile(Frozen):
    """A `job.json`."""

    launcher: Line
    scratch: Annotated[str, Field(max_length=4096)]
    attempt: int
    told: dict[str, Any] = Field(default_factory=dict)
    submitted_at: Annotated[float, Field(ge=0, le=1e11)] = 0.0


class _Memory(Frozen):
    kills: int = 0
    uptime_s: float = 0.0


def read_job(scratch: Path) -> JobFile | None:
    """Which job was submitted last; None where that is not known."""
    try:
        found = JobFile.model_validate(read_json(scratch / JOB))
    except (ArtifactError, ValidationError):
        return None
    return None if "process" in found.told and Process.told(found.told["process"]) is None else found


def memory_before(told: Any) -> Before:
    """What had been killed when a job started, as its launcher noted it; a form that is not known tells nothing."""
    try:
        return Before(**_Memory.model_validate(told).model_dump())
    except ValidationError:
        return Before.now()


def attempts_here(scratch: Path) -> list[dict[str, Any]]:
    """How its job was tried here."""
    return read_attempts(scratch / ATTEMPTS)


def all_attempts(scratch: Path) -> list[dict[str, Any]]:
    """How a job was tried: on machines that are gone, and here."""
    elsewhere = read_attempts(scratch / ELSEWHERE)
    gone = [attempt if "ended_at" in attempt else {**attempt, "cause": "lost"} for attempt in elsewhere]
    return gone + attempts_here(scratch)


def read_code(scratch: Path, snapshot: str) -> dict[str, Any]:
    """What git said of the code that the job runs; where that cannot be read any more, the hash of its snapshot alone."""
    try:
        found = ToldCode.model_validate(read_json(scratch / CODE)).model_dump(mode="json", exclude_unset=True)
    except (ArtifactError, ValidationError):
        found = {}
    return found if found.get("snapshot") == snapshot else {"snapshot": snapshot}


def read_dependencies(scratch: Path) -> dict[str, Any] | None:
    """The dependencies that the job was begun under; None where they are not known."""
    try:
        found = read_json(scratch / DEPENDENCIES)
    except ArtifactError:
        return None
    return found if isinstance(found, dict) else None


def has_reported(scratch: Path) -> bool:
    """Whether the job has reported its end, in whatever words."""
    try:
        return read_done(scratch) is not None
    except ArtifactError:
        return True


class Heartbeat(BaseModel):
    """Of a `progress.json`, what is shown."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    step: int = 0
    total: int = 0
    numbers: dict[str, float | None] = Field(default_factory=dict)
    """null: the job had none to report."""
    time: float | None = None


def read_heartbeat(scratch: Path) -> Heartbeat:
    """How far the job says that it is; nothing, where that cannot be read."""
    try:
        return Heartbeat.model_validate(read_mapping(scratch / "progress.json"))
    except ValidationError:
        return Heartbeat()


def read_mapping(path: Path) -> dict[str, Any]:
    """A small JSON file that some process keeps; empty where it is not there, damaged, or just being replaced."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def make_way(scratch: Path) -> None:
    """Removes folders that stand where a job keeps its files: a file would not take their place."""
    for path in scratch.glob("*.json"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
