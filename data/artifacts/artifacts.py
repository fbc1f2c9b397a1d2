"""Artifacts: immutable folders with a payload and the record that proves it.

    payload/        what later stages read
    evidence/       what people read: curves, manifests, samples, drops; no stage depends on it
    record.json     key, config, inputs, files, metrics: no time, host, path or commit
    run.json        how it came about: code, environment, execution, attempts, times
    lineage.json    records and runs of all ancestors, and the patches of the code that made them and the artifact (`lineage.py`)

A folder without a record does not exist.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from configs.base.frozen import Frozen, canonical_json, digest
from configs.base.paths import RelativePath
from configs.base.texts import shown
from data.artifacts import lineage
from data.artifacts.run_record import LONGEST_PATCH
from data.artifacts.run_record import Run as Run
from data.host.faults import fault_point
from data.store.durable import sync_folder
from data.store.hashing import Beat, Hashed, hash_files, silent
from data.store.untrusted import (
    LINEAGE_BYTES,
    RECORD_BYTES,
    RESTORE,
    RUN_BYTES,
    Count,
    Line,
    Sha256,
    Size,
    Word,
    described,
    no_twins,
    parse_json,
    plain_files,
    read_plain,
)
from data.store.untrusted import ArtifactError as ArtifactError
from data.store.untrusted import read_json as read_json

RECORD_SCHEMA = 1
RUN_SCHEMA = LINEAGE_SCHEMA = 2
LINEAGE_FIELDS = {"schema_version", "artifacts", "shared", "patches"}
MOST_ANCESTORS = 10_000
PARTS = ("payload", "evidence", "record.json", "run.json", "lineage.json")
SUMS, SIGNATURE = "pedigree/SHA256SUMS", "pedigree/model.sig"
"""In an exported folder: what vouches for its files, and who for that."""


class FileEntry(Frozen):
    """One file of a payload."""

    path: RelativePath
    """Relative to `payload/`, with forward slashes."""
    size: Size
    sha256: Sha256


class Input(Frozen):
    """One lineage edge."""

    port: Word
    label: Line
    content: Sha256
    """Content hash of the artifact that was read."""
    producer: Sha256
    """Id of the artifact that was read; outside the key: only content decides."""


class Record(Frozen):
    """What an artifact is. Equal keys promise equal meaning; equal contents are equal bytes."""

    schema_version: int = RECORD_SCHEMA
    kind: Word
    version: Count
    type: Word
    config: dict[str, Any]
    inputs: tuple[Input, ...] = Field(strict=False)
    source_files: dict[RelativePath, Sha256] = Field(default_factory=dict)
    """Project files that the config names, with sha256."""
    key: Sha256
    content: Sha256
    files: tuple[FileEntry, ...] = Field(strict=False)
    metrics: dict[Line, Any]
    """Numbers and verdicts that define the result (rows, steps, scores); no times."""
    marks: tuple[Line, ...] = Field(default=(), strict=False)
    """What a reader must know, e.g. `numerics changed at step N`."""

    @field_validator("files")
    @classmethod
    def names_are_apart(cls, value: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        no_twins(entry.path for entry in value)
        return value

    @property
    def id(self) -> str:
        return digest([self.key, self.content])


@dataclass(frozen=True)
class Artifact:
    """A published artifact, opened."""

    path: Path
    record: Record

    @property
    def payload(self) -> Path:
        return self.path / "payload"

    @property
    def evidence(self) -> Path:
        return self.path / "evidence"

    @property
    def type(self) -> str:
        return self.record.type


def stage_key(
    kind: str,
    version: int,
    config: Mapping[str, Any],
    inputs: list[tuple[str, str, str]],
    source_files: Mapping[str, str],
) -> str:
    """Hash of what is known before the run; `inputs` are (port, label, content).

    The order of the inputs of one port counts (the first policy is what the others are compared with), that of ports does not. A URL
    beside the sha256 of what lies there is left out.
    """
    return digest(
        {
            "kind": kind,
            "version": version,
            "config": without_places(dict(config)),
            "inputs": sorted([list(edge) for edge in inputs], key=lambda edge: edge[0]),
            "source_files": dict(source_files),
        }
    )


def without_places(value: Any) -> Any:
    """A configuration without the URLs that stand beside the sha256 of what lies there: the hash says what, the URL only where."""
    if isinstance(value, dict):
        return {name: without_places(inner) for name, inner in value.items() if not (name == "url" and "sha256" in value)}
    return [without_places(inner) for inner in value] if isinstance(value, list) else value


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_path(path: Path) -> str:
    """sha256 of a file, or of the sorted (path, sha256) list of a folder's files."""
    if path.is_dir():
        return content_hash(scan(path))
    return sha256_file(path)


class KnownHashes:
    """What `sha256_path` says, every file read once for as long as it looks the same from outside.

    The time of its last change counts too, which nobody can put back.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, Hashed]] = {}
        """File → (ctime in ns just before it was read, what it held)."""

    def sha256(self, path: Path, beat: Beat = silent) -> str:
        """`beat` is told of bytes hashed and in all.

        Raises:
            ArtifactError: as `scan`.
        """
        files = plain_files(path) if path.is_dir() else {"": path}
        changed = {file: file.stat().st_ctime_ns for file in files.values()}
        known = {file: self._seen[file] for file in changed if file in self._seen}
        new = [file for file, ctime in changed.items() if file not in known or known[file][0] != ctime or not known[file][1].is_of(file)]
        known |= {file: (changed[file], found) for file, found in hash_files(new, beat=beat).items()}
        self._seen |= known
        if "" in files:
            return known[path][1].sha256
        return content_hash(entries_of({name: known[file][1] for name, file in files.items()}))


def scan(folder: Path, beat: Beat = silent) -> tuple[FileEntry, ...]:
    """All files below `folder`, sorted by path, hashed; `beat` is told of bytes done and in all.

    Raises:
        ArtifactError: something below is neither a file nor a folder (a link would leave the artifact).
    """
    return entries_of(survey(folder, beat=beat))


def survey(folder: Path, *, md5: bool = False, beat: Beat = silent) -> dict[str, Hashed]:
    """The same by path, with what each file looks like from outside, and on demand with MD5; `beat` is told of bytes done and in all.

    Raises:
        ArtifactError: as `scan`.
    """
    files = plain_files(folder)
    hashed = hash_files(files.values(), md5=md5, beat=beat)
    return {name: hashed[path] for name, path in files.items()}


def entries_of(files: Mapping[str, Hashed]) -> tuple[FileEntry, ...]:
    """What a record says of files, sorted by path."""
    return tuple(FileEntry(path=name, size=found.size, sha256=found.sha256) for name, found in sorted(files.items()))


def content_hash(files: tuple[FileEntry, ...]) -> str:
    """Hash of the sorted (path, sha256) list."""
    return digest([[entry.path, entry.sha256] for entry in sorted(files, key=lambda entry: entry.path)])


SCHEMAS = {"record": RECORD_SCHEMA, "run": RUN_SCHEMA, "lineage": LINEAGE_SCHEMA}
MIGRATIONS: dict[str, dict[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {what: {} for what in SCHEMAS}
"""What → schema n → what makes one of schema n + 1. Neither key, content nor id of a record may change on the way."""
MIGRATIONS["run"][1] = lineage.second_run
MIGRATIONS["lineage"][1] = lineage.second_lineage


def migrated(raw: Any, what: str, name: str) -> dict[str, Any]:
    """A record, run or lineage in today's schema.

    Args:
        raw: as it stands in a file.
        what: `record`, `run` or `lineage`.
        name: of the file, for messages.

    Raises:
        ArtifactError: it is of a later version, or of an earlier one from which no migration leads here.
    """
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    now = SCHEMAS[what]
    if not isinstance(version, int) or version > now:
        raise ArtifactError(f"{name} has {what} schema {version}, this version reads up to {now}: a later version made it, use that one")
    for step in range(version, now):
        if step not in MIGRATIONS[what]:
            raise ArtifactError(f"{name} has {what} schema {version}, from which no migration leads to {now}")
        with _damage(name):  # a migration reads what nobody has looked at yet
            raw = {**MIGRATIONS[what][step](raw), "schema_version": step + 1}
    return raw


def read_record(raw: Any, name: str) -> Record:
    """A record of this or an earlier schema.

    Args:
        raw: as it stands in `record.json` or in a `lineage.json`.
        name: of the file, for messages.

    Raises:
        ArtifactError: its schema is of a later version, or a field is missing, unknown or of another type; the field is named.
    """
    try:
        return Record.model_validate(migrated(raw, "record", name))
    except ValidationError as error:
        raise ArtifactError(f"{name} is damaged ({described(error)}); {RESTORE}") from error


def parse_record(data: bytes, name: str) -> Record:
    """The record in the bytes of a `record.json`.

    Raises:
        ArtifactError: as `read_record`, or no JSON.
    """
    return read_record(parse_json(data, name, RECORD_BYTES), name)


def load_record(path: Path) -> Record:
    """The record in a `record.json`.

    Raises:
        ArtifactError: missing, no plain file, or as `read_record`.
    """
    return parse_record(read_plain(path, RECORD_BYTES), str(path))


def parse_run(raw: Any, name: str) -> Run:
    """A run of this or an earlier schema, from what stands in a `run.json` or `lineage.json`.

    Raises:
        ArtifactError: as `read_record`.
    """
    try:
        return Run.model_validate(migrated(raw, "run", name))
    except ValidationError as error:
        raise ArtifactError(f"{name} is damaged (run: {described(error)}); {RESTORE}") from error


def read_run(path: Path) -> Run:
    """A `run.json` of this or an earlier schema.

    Raises:
        ArtifactError: missing, damaged, or of a later version.
    """
    return parse_run(read_json(path, RUN_BYTES), str(path))


def read_lineage(path: Path) -> dict[str, tuple[Record, Run]]:
    """Ancestor's id → its record and run, from a `lineage.json` of this or an earlier schema.

    Raises:
        ArtifactError: missing, damaged, or of a later version.
    """
    return parse_lineage(read_json(path, LINEAGE_BYTES), str(path))


def parse_lineage(raw: Any, name: str) -> dict[str, tuple[Record, Run]]:
    """The same from what stands in the file; `name` is for messages."""
    found = migrated(raw, "lineage", name)
    if len(_artifacts(found, name)) > MOST_ANCESTORS:
        raise ArtifactError(f"{name} holds {len(found['artifacts'])} ancestors, more than {MOST_ANCESTORS}: no Pedigree wrote it")
    for identifier, entry in found["artifacts"].items():
        if not isinstance(entry, dict) or entry.keys() != {"record", "run"}:
            raise ArtifactError(f"{name} is damaged (artifacts.{identifier[:12]!r}: its fields must be `record` and `run`): {RESTORE}")
    _patches(found["patches"], name)
    with _damage(name):
        entries = lineage.unfolded(found)
    ancestors = {}
    for identifier, entry in entries.items():
        said = f"{name}, artifact {identifier[:12]!r}"
        ancestors[identifier] = (read_record(entry["record"], said), parse_run(entry["run"], said))
    return ancestors


def parse_patches(run: Any, raw: Any, name: str) -> dict[str, str]:
    """sha256 → text of the patches of an artifact and of its ancestors.

    Args:
        run: what stands in its `run.json`: the patches of schema 1 stand there.
        raw: what stands in its `lineage.json`.
        name: of the latter, for messages.

    Raises:
        ArtifactError: a patch is not what its hash says, or the files have another form.
    """
    found = migrated(raw, "lineage", name)
    _artifacts(found, name)
    with _damage(name):
        own = lineage.split(run)[1]
        return _patches(own, name) | _patches(lineage.patches_of(found), name)


def read_patches(folder: Path) -> dict[str, str]:
    """The same from a folder with `run.json` and `lineage.json`."""
    run, raw = read_json(folder / "run.json", RUN_BYTES), read_json(folder / "lineage.json", LINEAGE_BYTES)
    return parse_patches(run, raw, str(folder / "lineage.json"))


_PATCHES = TypeAdapter(dict[Sha256, Annotated[str, Field(max_length=LONGEST_PATCH, strict=True)]])


def _patches(raw: Any, name: str) -> dict[str, str]:
    try:
        return _PATCHES.validate_python(raw)
    except ValidationError as error:
        raise ArtifactError(f"{name} is damaged (patches: {described(error)}): {RESTORE}") from error


def _artifacts(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The entries of a lineage of today's schema, all of whose fields are there and no others."""
    if found.keys() != LINEAGE_FIELDS or not all(isinstance(found[field], dict) for field in LINEAGE_FIELDS - {"schema_version"}):
        raise ArtifactError(
            f"{name} is damaged (its fields must be `schema_version` and the mappings `artifacts`, `shared` and `patches`): {RESTORE}"
        )
    return found["artifacts"]


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """What goes wrong with values from outside that have another form than ours, as one error."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{name} is damaged ({shown(repr(error))[:300]}): {RESTORE}") from error


def open_artifact(path: Path, verify: bool = False, beat: Beat = silent) -> Artifact:
    """Opens a published artifact.

    Args:
        path: its folder.
        verify: re-hash the payload, instead of trusting names and sizes.
        beat: told of bytes hashed and in all.

    Raises:
        ArtifactError: no record, an unknown schema, or a payload that is not the recorded one; each differing file is named.
    """
    record_file = path / "record.json"
    if not record_file.is_file():
        raise ArtifactError(f"{path} holds no record.json: it was never finished; run the stage that makes it")
    artifact = Artifact(path, load_record(record_file))
    problems = differences(artifact, verify, beat)
    if problems:
        raise ArtifactError(f"{path} is not what its record says: {'; '.join(problems)}; restore it or run its stage again")
    return artifact


def differences(artifact: Artifact, verify: bool, beat: Beat = silent) -> list[str]:
    """How the payload on disk differs from the record, one sentence a file; `beat` is told of bytes hashed and in all."""
    recorded = {entry.path: entry for entry in artifact.record.files}
    present = plain_files(artifact.payload)
    problems = [f"payload/{name} is missing" for name in recorded.keys() - present.keys()]
    problems += [f"payload/{name} is not in the record" for name in present.keys() - recorded.keys()]
    sizes = {name: present[name].stat().st_size for name in recorded.keys() & present.keys()}
    whole = {name: present[name] for name, size in sizes.items() if size == recorded[name].size}
    problems += [f"payload/{name} has {sizes[name]} bytes instead of {recorded[name].size}" for name in sizes.keys() - whole.keys()]
    hashed = hash_files(whole.values(), beat=beat) if verify else {}
    changed = (name for name, path in whole.items() if path in hashed and hashed[path].sha256 != recorded[name].sha256)
    problems += [f"payload/{name} has another sha256" for name in changed]
    if content_hash(artifact.record.files) != artifact.record.content:
        problems.append("record.json contradicts itself: its content is not the hash of its files")
    return sorted(problems)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the whole new one, also after a power cut."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    _write(path, [data])


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as JSONL with a stable form: equal rows are equal bytes. They are taken as they come, and only one is in memory; where
    one cannot be had or written, the old file stays."""
    _write(path, (canonical_json(row).encode() + b"\n" for row in rows))


def _write(path: Path, parts: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fault_point(f"{path.name} written")
    os.replace(temporary, path)
    sync_folder(path.parent)


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open() as stream:
        return [json.loads(line) for line in stream]
