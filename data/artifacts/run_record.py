"""How an artifact came about, `run.json`: code, numerics, attempts, machine. It is outside every hash: anybody may have written it.

A field that is new to run.json is new here first; what was written before stays readable through `data.artifacts.artifacts.MIGRATIONS`.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, field_validator

from configs.base.frozen import Frozen, canonical_json
from configs.base.paths import RelativePath
from data.store.untrusted import Address, ArtifactError, Commit, Count, Line, Sha256, Word, read_json

LONGEST_PATCH = 2 << 20
"""Characters of a patch; those that are kept are half as long at most."""


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
    """Why a dirty tree's patch was not kept; the text of one that was stands in `lineage.json`."""
    new_files: Count = 0
    """Files that git did not know and the record does not hold."""
    snapshot: Sha256 | None = None
    """Of the copy of the code that the job ran from."""


class _Tried(Frozen):
    """One try of the job, whatever code it ran."""

    started_at: Moment | None = None
    ended_at: Moment | None = None
    cause: Line = ""
    """`succeeded`, or one word for why it ended."""
    resumed_from: Line | None = None
    """Checkpoint that it went on from."""
    checkpoints: dict[Word, Setting] = Field(default_factory=dict)
    """What writing and sending them took."""
    peak: dict[Word, Setting] = Field(default_factory=dict)
    """Bytes that its first rank had at most (`data.host.memory.peak`)."""


class Attempt(_Tried):
    """One try of the job."""

    code: CodeState | None = None


class ToldCode(CodeState):
    """The same before it is recorded: with the text of the patch."""

    patch: str | None = Field(default=None, max_length=LONGEST_PATCH)


class ToldAttempt(_Tried):
    """A try of a job that has not ended yet, as another machine tells it."""

    code: ToldCode | None = None


def parse_attempts(told: Any) -> list[dict[str, Any]]:
    """Tries of a job as JSON, of which some process has told.

    Raises:
        ValidationError, TypeError: they are none.
    """
    return [ToldAttempt.model_validate(attempt).model_dump(mode="json", exclude_unset=True) for attempt in told]


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """The same from a file beside a job; what cannot be read is forgotten."""
    try:
        return parse_attempts(read_json(path))
    except (ArtifactError, ValidationError, TypeError):
        return []


class Fingerprint(Frozen):
    """Hashes of the code behind the stage."""

    sha256: Sha256 | None = None
    files: dict[RelativePath, Sha256] = Field(default_factory=dict)


class Environment(Frozen):
    """What the job was installed with."""

    python: Line | None = None
    libraries: dict[Word, Line] = Field(default_factory=dict)
    locks: dict[Word, Sha256] = Field(default_factory=dict)


class Hardware(Frozen):
    """What the machine computes with."""

    machine: Line | None = None
    kernel: Line | None = None
    cpu: Line | None = None
    instruction_sets: tuple[Word, ...] | None = Field(default=None, strict=False)
    """Of those that decide how matrices are multiplied (`data.host.machine.INSTRUCTION_SETS`)."""
    cores: Count | None = None
    """Physical cores that the job could use."""
    memory_gib: float | None = Field(default=None, ge=0)
    gpus: tuple[Line, ...] | None = Field(default=None, strict=False)


class MadeBy(Frozen):
    """What a job ran with, as it found it where it ran."""

    numerics: dict[Word, Setting] = Field(default_factory=dict)
    """As asked for, with what they leave to the machine."""
    fingerprint: Fingerprint = Fingerprint()
    environment: Environment = Environment()
    hardware: Hardware = Hardware()


class Run(Frozen):
    """A `run.json`."""

    schema_version: int
    address: Address | None = None
    """Where it was made."""
    numerics: dict[Word, Setting] = Field(default_factory=dict)
    placement: dict[Word, Setting] = Field(default_factory=dict)
    licences: dict[Line, Annotated[tuple[Line, ...], Field(strict=False)]] = Field(default_factory=dict)
    """What the stage took from outside → under which licences its recipe said that it is handed on."""
    generators: dict[Line, Annotated[tuple[Line, ...], Field(strict=False)]] = Field(default_factory=dict)
    """The same → which models its recipe said have written it."""
    attempts: tuple[Attempt, ...] = Field(default=(), strict=False)
    fingerprint: Fingerprint = Fingerprint()
    environment: Environment = Environment()
    hardware: Hardware = Hardware()

    @field_validator("placement")
    @classmethod
    def names_no_store(cls, value: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint is a pickle: nobody may be sent to another's store for one."""
        if value.get("checkpoint_url") is not None:
            raise ValueError("checkpoint_url is never recorded: checkpoints of a store that others name are not loaded")
        return value

    @property
    def code(self) -> CodeState | None:
        """That of the last attempt which says it: it finished the artifact."""
        return next((attempt.code for attempt in reversed(self.attempts) if attempt.code), None)

    @property
    def seconds(self) -> float | None:
        """Wall time of all attempts together; None where none was recorded."""
        spans = [
            (datetime.fromisoformat(attempt.ended_at) - datetime.fromisoformat(attempt.started_at)).total_seconds()
            for attempt in self.attempts
            if attempt.started_at and attempt.ended_at
        ]
        return sum(spans) if spans else None

    def as_json(self) -> dict[str, Any]:
        """As it was written: names sorted, and no fields that were not there."""
        return json.loads(canonical_json(self.model_dump(mode="json", exclude_unset=True)))
