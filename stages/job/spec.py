"""What a job is started with."""

from pathlib import Path
from typing import Any

from pydantic import Field

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.data.artifacts.artifacts import Artifact, Input
from pedigree.data.artifacts.run_record import Fingerprint


def place_in(scratch: Path, path: Path) -> str:
    """Path relative to the scratch folder; absolute if it is outside."""
    return str(path.relative_to(scratch) if path.is_relative_to(scratch) else path)


class GivenInput(Frozen):
    """An input artifact as passed to the job."""

    folder: str
    """The job's own copy of payload and records, relative to the scratch folder, which may be moved or mounted at other paths."""
    content: str
    producer: str
    """Id of the artifact."""

    @classmethod
    def of(cls, artifact: Artifact, scratch: Path) -> "GivenInput":
        return cls(folder=place_in(scratch, artifact.path), content=artifact.record.content, producer=artifact.record.id)


class GivenFile(Frozen):
    """A project file or folder that the config names, as passed to the job."""

    path: str
    """Relative to the job's scratch folder."""
    sha256: str


class JobSpec(Frozen):
    """Specification of a job. A file, so that the job outlives the process that started it."""

    address: str
    kind: str
    version: int
    """Version of the stage kind when the recipe was loaded."""
    key: str
    config: dict[str, Any]
    inputs: dict[str, dict[str, GivenInput]]
    """Port → label → artifact."""
    source_files: dict[str, GivenFile]
    """Keyed by the name in the config."""
    code: str
    """Hash of the code to run (`data.artifacts.provenance.code_sha256`)."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of the code that the stage kind depends on, precomputed because it is slow to derive; None: the job derives it."""
    numerics: Numerics
    placement: Placement
    asked: Numerics | None = None
    """The profile's numerics, where `numerics` was reduced to fit into memory."""
    tokens: str = "tokens"
    """Folder of tokenized rows, shared by jobs (`stages/training/token_cache.py`), relative to the scratch folder."""
    allow_numerics_change: bool = False
    """Accept checkpoints written under other numerics, and mark the result."""
    marks: tuple[str, ...] = Field(default=(), strict=False)
    """Notes for the record on how this run was started."""
    require_checkpoint: bool = False
    """Fail instead of starting over if no sound checkpoint exists."""

    def lineage_inputs(self) -> tuple[Input, ...]:
        """The inputs in the format of a record."""
        given = [(port, label, one) for port, labelled in self.inputs.items() for label, one in labelled.items()]
        return tuple(Input(port=port, label=label, content=one.content, producer=one.producer) for port, label, one in given)
