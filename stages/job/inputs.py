"""Verify a job's inputs: by hash when first opened, and by file metadata from then on.

If an input file changes while the job runs, the job may have read the old or the new bytes, so its result is rejected. That holds even if
the old bytes were restored, and for attempts that resume from an earlier checkpoint.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from pedigree.configs.base.texts import command
from pedigree.data.artifacts.artifacts import entries_of, open_artifact, sha256_path, survey, write_json
from pedigree.data.store.hashing import Hashed, hash_files
from pedigree.data.store.untrusted import read_as
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job
from pedigree.stages.job.outcome import HashedFile
from pedigree.stages.job.spec import JobSpec, place_in

SEEN = "inputs.json"
"""File in the scratch folder: input file → hash and metadata when the first attempt opened it."""


class _Seen(HashedFile):
    md5: Annotated[str, Field(max_length=32)] = ""


_SEEN = TypeAdapter(dict[str, _Seen])


def open_inputs(spec: JobSpec, job: Job) -> Inputs:
    """Open the job's input artifacts; rank 0 verifies every byte.

    Raises:
        StageError: they differ from the spec, or were modified since an earlier attempt opened them.
    """
    inputs: Inputs = {}
    for port, labelled in spec.inputs.items():
        for label, given in labelled.items():
            artifact = open_artifact(job.folder / given.folder)
            if (artifact.record.content, artifact.record.id) != (given.content, given.producer):
                raise StageError(f"{port} {label} is not the artifact in the job's spec: {_remedy(spec)}")
            inputs.setdefault(port, {})[label] = artifact
    if job.rank == 0:
        if _seen_before(job) is None:
            _prove(spec, job, inputs)
        else:
            check_untouched(spec, job)
    return inputs


def _seen_before(job: Job) -> dict[str, Hashed] | None:
    """The inputs as the first attempt saw them; None if there was none or the file is damaged."""
    found = read_as(_SEEN.validate_python, job.folder / SEEN)
    return None if found is None else {name: seen.hashed() for name, seen in found.items()}


def check_untouched(spec: JobSpec, job: Job) -> None:
    """Check that the inputs have not changed since they were first opened.

    Raises:
        StageError: an input has changed.
    """
    found = _seen_before(job)
    if found is None:
        raise StageError(f"{SEEN} was damaged during the run, so the inputs cannot be verified: {_remedy(spec)}")
    for name, seen in found.items():
        if not _is_same(job.folder / name, seen):
            raise StageError(f"{name} was modified or removed during the run, so the result is not reproducible: {_remedy(spec)}")


def _prove(spec: JobSpec, job: Job, inputs: Inputs) -> None:
    seen: dict[Path, Hashed] = {}
    for port, labelled in inputs.items():
        for label, artifact in labelled.items():
            found = survey(artifact.payload, beat=lambda done, size: job.doing("checking inputs", done / 1e9, size / 1e9, "GB"))
            if entries_of(found) != artifact.record.files:
                raise StageError(f"{port} {label} does not match its record: {_remedy(spec)}")
            seen |= {artifact.payload / name: one for name, one in found.items()}
    for name, given in spec.source_files.items():
        place = job.folder / given.path
        with job.busy("checking inputs"):
            if sha256_path(place) != given.sha256:
                raise StageError(f"{name} is not the file in the job's spec: {_remedy(spec)}")
            seen |= hash_files([place] if place.is_file() else [path for path in sorted(place.rglob("*")) if path.is_file()])
    write_json(job.folder / SEEN, {place_in(job.folder, path): found.as_json() for path, found in seen.items()})


def _is_same(path: Path, seen: Hashed) -> bool:
    if seen.is_of(path):
        return True
    if not path.is_file():
        return False
    found = path.stat()  # the inode differs if the project was copied to another disk with its timestamps
    return (found.st_size, found.st_mtime_ns) == (seen.size, seen.mtime_ns) and hash_files([path])[path].sha256 == seen.sha256


def _remedy(spec: JobSpec) -> str:
    recipe, _, stage = spec.address.partition("/")
    return f"start over with {command('run', recipe, '--force', stage)}"
