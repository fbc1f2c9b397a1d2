"""How a job ended, as it reports it and as runners read it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.paths import RelativePath
from pedigree.data.artifacts.artifacts import ArtifactError, FileEntry, read_json
from pedigree.data.artifacts.run_record import RunConditions, Setting
from pedigree.data.store.hashing import Hashed
from pedigree.data.store.untrusted import LIST_BYTES, Line, Md5, Sha256, Size, Word, described

RESUME_ME = 75
"""Exit code of a job that was preempted."""
LONGEST_MESSAGE = 10_000
"""Characters of a failure message in `done.json`; the log has the full text."""


Number = Annotated[int, Field(ge=-(1 << 64), le=1 << 64)]


class _Ended(Frozen):
    checkpoints: dict[Word, Setting] = Field(default_factory=dict)
    """Cost of writing and uploading them."""
    peak: dict[Word, Setting] = Field(default_factory=dict)
    """Peak memory of rank 0 in bytes."""
    resumed_from: Line | None = None


class Failure(_Ended):
    """`done.json` of a job that failed or was preempted."""

    ok: Literal[False]
    cause: Word
    message: Annotated[str, Field(max_length=LONGEST_MESSAGE)]


class HashedFile(Frozen):
    """A payload file as hashed by the job."""

    size: Size
    mtime_ns: Number
    inode: Number
    sha256: Sha256
    md5: Md5

    def hashed(self) -> Hashed:
        return Hashed(self.size, self.mtime_ns, self.inode, self.sha256, self.md5)


class Success(_Ended):
    """`done.json` of a job that reports success."""

    ok: Literal[True]
    content: Sha256
    files: tuple[FileEntry, ...] = Field(strict=False)
    metrics: dict[Line, Any]
    marks: tuple[Line, ...] = Field(default=(), strict=False)
    seen: dict[RelativePath, HashedFile] = Field(default_factory=dict)
    made_by: RunConditions


Done = Success | Failure
_DONE: TypeAdapter[Done] = TypeAdapter(Annotated[Done, Field(discriminator="ok")])


def read_done(scratch: Path) -> Done | None:
    """Read a job's final report; None if there is none yet or the file is damaged.

    Raises:
        ArtifactError: the file is valid JSON but not in this version's format; the message names the field.
    """
    path = scratch / "done.json"
    try:
        found = read_json(path, LIST_BYTES)
    except ArtifactError:
        return None
    if not isinstance(found, dict):
        return None
    try:
        return _DONE.validate_python(found)
    except ValidationError as error:
        remedy = "delete it and run the command again to resume from the last checkpoint"
        raise ArtifactError(f"{path} was not written by this version ({described(error)}): {remedy}") from error
