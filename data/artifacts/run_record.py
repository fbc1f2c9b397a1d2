"""`run.json`, the provenance of an artifact: code, numerics, attempts, machine. No hash covers it, so it is untrusted.

New fields of run.json are added here first; older versions stay readable through `data.artifacts.artifacts.MIGRATIONS`.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, field_validator

from pedigree.configs.base.frozen import Frozen, canonical_json
from pedigree.configs.base.paths import RelativePath
from pedigree.data.store.untrusted import Address, Commit, Count, Line, Sha256, Word, read_as

LONGEST_PATCH = 2 << 20
"""Maximum characters of a patch on reading; recorded patches are at most half as long."""


def _moment(value: str) -> str:
    datetime.fromisoformat(value)
    return value


Moment = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,15}(?:Z|[+-][0-9]{2}:[0-9]{2})$"), AfterValidator(_moment)]
Setting = bool | Annotated[int, Field(ge=-(1 << 53), le=1 << 53)] | float | Line | None


class CodeState(Frozen):
    """The code that an attempt ran."""

    commit: Commit | None = None
    dirty: bool = False
    patch_sha256: Sha256 | None = None
    patch_left_out: Line = ""
    """Why a dirty tree's patch was not recorded; recorded patches are in `lineage.json`."""
    new_files: Count = 0
    """Number of untracked files, which are not recorded."""
    snapshot: Sha256 | None = None
    """Hash of the code snapshot that the job ran."""
    version: Line = ""
    """Version of the installed package, which has no commit."""


class _Tried(Frozen):
    """Fields of an attempt except its code."""

    started_at: Moment | None = None
    """When its job was submitted."""
    left_queue_at: Moment | None = None
    """When a scheduler started its job; None for a job without a queue."""
    ended_at: Moment | None = None
    cause: Line = ""
    """`succeeded`, or one word for why it ended."""
    resumed_from: Line | None = None
    """Checkpoint that it resumed from."""
    checkpoints: dict[Word, Setting] = Field(default_factory=dict)
    """Cost of writing and uploading checkpoints."""
    peak: dict[Word, Setting] = Field(default_factory=dict)
    """Peak memory of rank 0 in bytes (`data.host.process.peak_memory`)."""

    @property
    def seconds(self) -> float | None:
        """Wall time of its job, without that in a queue; None if not recorded."""
        began = self.left_queue_at or self.started_at
        return (datetime.fromisoformat(self.ended_at) - datetime.fromisoformat(began)).total_seconds() if began and self.ended_at else None


class Attempt(_Tried):
    """One attempt of the job."""

    code: CodeState | None = None


class PortableCode(CodeState):
    """Code state before it is recorded, with the text of the patch."""

    patch: str | None = Field(default=None, max_length=LONGEST_PATCH)


class PortableAttempt(_Tried):
    """An attempt of an unfinished job, as reported by another machine."""

    code: PortableCode | None = None


_ATTEMPTS = TypeAdapter(list[PortableAttempt], config={"defer_build": True})


def parse_attempts(reported: Any) -> list[dict[str, Any]]:
    """Validate reported attempts of a job; returns JSON. Raises ValidationError."""
    return [attempt.model_dump(mode="json", exclude_unset=True) for attempt in _ATTEMPTS.validate_python(reported)]


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """Read reported attempts from a job's file; empty if it is unreadable."""
    return read_as(parse_attempts, path) or []


class Fingerprint(Frozen):
    """Hashes of the stage's code."""

    sha256: Sha256 | None = None
    files: dict[RelativePath, Sha256] = Field(default_factory=dict)


class Environment(Frozen):
    """Python, library versions and lock files of the job."""

    python: Line | None = None
    libraries: dict[Word, Line] = Field(default_factory=dict)
    locks: dict[Word, Sha256] = Field(default_factory=dict)


class Hardware(Frozen):
    """The machine's compute hardware."""

    machine: Line | None = None
    kernel: Line | None = None
    cpu: Line | None = None
    cpu_model: Line | None = None
    """Family, model and stepping of an x86 processor: cloud providers give processors of different kinds one name."""
    instruction_sets: tuple[Word, ...] | None = Field(default=None, strict=False)
    """Those that affect matrix multiplication (`data.host.machine.INSTRUCTION_SETS`)."""
    cores: Count | None = None
    """Physical cores available to the job."""
    memory_gib: float | None = Field(default=None, ge=0)
    gpus: tuple[Line, ...] | None = Field(default=None, strict=False)
    """Name, memory, compute capability and driver of each GPU."""
    kernel_settings: dict[Word, Line] | None = None
    """Environment variables that limit the kernels of libraries (`data.artifacts.provenance.KERNEL_SETTINGS`)."""


class RunConditions(Frozen):
    """Code, environment and hardware of a job, recorded where it ran."""

    numerics: dict[Word, Setting] = Field(default_factory=dict)
    """Requested settings, with machine-dependent ones resolved."""
    fingerprint: Fingerprint = Fingerprint()
    environment: Environment = Environment()
    command_environment: Environment | None = None
    """That of the command of an `external` stage, with all of its packages."""
    hardware: Hardware = Hardware()


class Run(RunConditions):
    """A `run.json`."""

    schema_version: int
    address: Address | None = None
    """`RECIPE/STAGE` that produced the artifact."""
    placement: dict[Word, Setting] = Field(default_factory=dict)
    licences: dict[Line, Annotated[tuple[Line, ...], Field(strict=False)]] = Field(default_factory=dict)
    """External input of the stage → licenses stated in its recipe."""
    generators: dict[Line, Annotated[tuple[Line, ...], Field(strict=False)]] = Field(default_factory=dict)
    """External input of the stage → models that generated it, as stated in its recipe."""
    attempts: tuple[Attempt, ...] = Field(default=(), strict=False)
    decided_by: dict[Line, Line] | None = None
    """Code that decided what the stage kept or how it scored → its version, or its hash after an edit (`pipelines/ledger/deciding.py`);
    None in records of earlier versions."""

    @field_validator("placement")
    @classmethod
    def names_no_store(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Reject store URLs: a checkpoint is a pickle, so a record must not point to one."""
        if value.get("checkpoint_url") is not None:
            raise ValueError("checkpoint_url is never recorded: checkpoints from a store named by others are not loaded")
        return value

    @property
    def code(self) -> CodeState | None:
        """Code of the last attempt that recorded one, i.e. the attempt that finished the artifact."""
        return next((attempt.code for attempt in reversed(self.attempts) if attempt.code), None)

    @property
    def seconds(self) -> float | None:
        """Total wall time of all attempts in seconds, without that in a queue; None if not recorded."""
        spans = [attempt.seconds for attempt in self.attempts if attempt.seconds is not None]
        return sum(spans) if spans else None

    def as_json(self) -> dict[str, Any]:
        """The run as written: sorted names, only fields that were set."""
        return json.loads(canonical_json(self.model_dump(mode="json", exclude_unset=True)))
