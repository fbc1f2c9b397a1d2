"""Artifacts: immutable folders with a payload and a record that verifies it.

    payload/        input of later stages
    evidence/       for people: curves, manifests, samples, drops; no stage depends on it
    record.json     key, config, inputs, files, metrics; no time, host, path or commit
    run.json        provenance: code, environment, execution, attempts, times
    lineage.json    records and runs of all ancestors, and the patches of their code and of the artifact's (`lineage.py`)

A folder without a record counts as absent.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from pedigree.configs.base.frozen import Frozen, canonical_json, digest
from pedigree.configs.base.paths import RelativePath
from pedigree.configs.base.texts import shown
from pedigree.data.artifacts import lineage
from pedigree.data.artifacts.run_record import LONGEST_PATCH
from pedigree.data.artifacts.run_record import Run as Run
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import replacing
from pedigree.data.store.hashing import Beat, Hashed, hash_files, silent
from pedigree.data.store.untrusted import (
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
from pedigree.data.store.untrusted import ArtifactError as ArtifactError
from pedigree.data.store.untrusted import read_json as read_json

RECORD_SCHEMA = 1
RUN_SCHEMA = LINEAGE_SCHEMA = 2
LINEAGE_FIELDS = {"schema_version", "artifacts", "shared", "patches"}
MOST_ANCESTORS = 10_000
ADOPTED = "adopted-from"
"""Port at which an imported model names the artifact of another project that it was exported from."""
PARTS = ("payload", "evidence", "record.json", "run.json", "lineage.json")
SUMS, SIGNATURE = "pedigree/SHA256SUMS", "pedigree/model.sig"
"""In an exported folder: checksums of its files, and their signature."""


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
    """Content hash of the input artifact."""
    producer: Sha256
    """Id of the input artifact; not part of the key, since only content matters."""


class Record(Frozen):
    """Identity of an artifact. Equal keys mean equivalent results; equal contents mean equal bytes."""

    schema_version: int = RECORD_SCHEMA
    kind: Word
    version: Count
    type: Word
    config: dict[str, Any]
    inputs: tuple[Input, ...] = Field(strict=False)
    source_files: dict[RelativePath, Sha256] = Field(default_factory=dict)
    """Project files named in the config → sha256."""
    key: Sha256
    content: Sha256
    files: tuple[FileEntry, ...] = Field(strict=False)
    metrics: dict[Line, Any]
    """Numbers and verdicts of the result (rows, steps, scores); no times."""
    marks: tuple[Line, ...] = Field(default=(), strict=False)
    """Caveats, e.g. `numerics changed at step N`."""

    @field_validator("files")
    @classmethod
    def names_are_apart(cls, value: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        no_twins(entry.path for entry in value)
        return value

    @property
    def id(self) -> str:
        return digest([self.key, self.content])

    @property
    def edges(self) -> list[tuple[str, str, str]]:
        """(port, label, content) of the inputs that the key covers: all but `ADOPTED`, of which it covers the files or the commit."""
        return [(given.port, given.label, given.content) for given in self.inputs if given.port != ADOPTED]

    def without(self, left_out: Callable[[str], bool]) -> "Record":
        """The record without its inputs at some ports; key, content and id stay."""
        return self.model_copy(update={"inputs": tuple(given for given in self.inputs if not left_out(given.port))})


@dataclass(frozen=True)
class Artifact:
    """An opened, published artifact."""

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
    """Hash of everything known before the run; `inputs` are (port, label, content).

    The order of inputs within a port matters (other policies are compared with the first), that of ports does not. URLs with a sha256
    next to them are excluded.
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
    """A configuration without URLs that have a sha256 next to them: the hash identifies the content, the URL only its location."""
    if isinstance(value, dict):
        return {name: without_places(inner) for name, inner in value.items() if not (name == "url" and "sha256" in value)}
    return [without_places(inner) for inner in value] if isinstance(value, list) else value


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_path(path: Path) -> str:
    """SHA-256 of a file, or of the sorted (path, sha256) list of a folder's files."""
    return content_hash(scan(path)) if path.is_dir() else sha256_file(path)


def scan(folder: Path, beat: Beat = silent) -> tuple[FileEntry, ...]:
    """Hash all files below `folder`, sorted by path; `beat` receives bytes done and total bytes.

    Raises ArtifactError if an entry is neither a file nor a folder (a link would leave the artifact).
    """
    return entries_of(survey(folder, beat=beat))


def survey(folder: Path, *, md5: bool = False, beat: Beat = silent) -> dict[str, Hashed]:
    """Like `scan`, by path, with stat fields and optionally MD5."""
    files = plain_files(folder)
    hashed = hash_files(files.values(), md5=md5, beat=beat)
    return {name: hashed[path] for name, path in files.items()}


def entries_of(files: Mapping[str, Hashed]) -> tuple[FileEntry, ...]:
    """Record entries of files, sorted by path."""
    return tuple(FileEntry(path=name, size=found.size, sha256=found.sha256) for name, found in sorted(files.items()))


def content_hash(files: tuple[FileEntry, ...]) -> str:
    """Hash of the sorted (path, sha256) list."""
    return digest([[entry.path, entry.sha256] for entry in sorted(files, key=lambda entry: entry.path)])


SCHEMAS = {"record": RECORD_SCHEMA, "run": RUN_SCHEMA, "lineage": LINEAGE_SCHEMA}
MIGRATIONS: dict[str, dict[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {what: {} for what in SCHEMAS}
"""Kind of file → schema n → migration to schema n + 1. Migrations must preserve key, content and id of a record."""
MIGRATIONS["run"][1] = lineage.second_run
MIGRATIONS["lineage"][1] = lineage.second_lineage


def migrated(raw: Any, what: str, name: str) -> dict[str, Any]:
    """Migrate a record, run or lineage (`what`) to the current schema; `name` is for messages.

    Raises ArtifactError if its schema is newer than this version's, or too old to migrate.
    """
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    now = SCHEMAS[what]
    if not isinstance(version, int) or version > now:
        raise ArtifactError(f"{name} has {what} schema {version}, this version reads up to {now}: use the later version that wrote it")
    for step in range(version, now):
        if step not in MIGRATIONS[what]:
            raise ArtifactError(f"{name} has {what} schema {version}, which cannot be migrated to {now}")
        with _damage(name):  # migrations read unvalidated data
            raw = {**MIGRATIONS[what][step](raw), "schema_version": step + 1}
    return raw


def read_record(raw: Any, name: str) -> Record:
    """Parse a record of the current or an earlier schema, from a `record.json` or `lineage.json`; `name` is for messages.

    Raises ArtifactError, which names the field that is missing, unknown or of another type, or a newer schema. The functions below, for
    the bytes and files of records, runs and lineages, do the same.
    """
    with _damage(name):
        return Record.model_validate(migrated(raw, "record", name))


def parse_record(data: bytes, name: str) -> Record:
    return read_record(parse_json(data, name, RECORD_BYTES), name)


def load_record(path: Path) -> Record:
    return parse_record(read_plain(path, RECORD_BYTES), str(path))


def parse_run(raw: Any, name: str) -> Run:
    with _damage(name, "run: "):
        return Run.model_validate(migrated(raw, "run", name))


def read_run(path: Path) -> Run:
    return parse_run(read_json(path, RUN_BYTES), str(path))


def read_lineage(path: Path) -> dict[str, tuple[Record, Run]]:
    return parse_lineage(read_json(path, LINEAGE_BYTES), str(path))


def parse_lineage(raw: Any, name: str) -> dict[str, tuple[Record, Run]]:
    """Ancestor's id → its record and run."""
    found = migrated(raw, "lineage", name)
    if len(_artifacts(found, name)) > MOST_ANCESTORS:
        raise ArtifactError(f"{name} has too many ancestors ({len(found['artifacts'])} > {MOST_ANCESTORS}) for a Pedigree lineage")
    for identifier, entry in found["artifacts"].items():
        if not isinstance(entry, dict) or entry.keys() != {"record", "run"}:
            raise ArtifactError(f"{name} is damaged (artifacts.{identifier[:12]!r}: its fields must be `record` and `run`): {RESTORE}")
    _patches(found["patches"], name)
    with _damage(name):
        entries = lineage.unfolded(found)
    ancestors = {}
    for identifier, entry in entries.items():
        where = f"{name}, artifact {identifier[:12]!r}"
        ancestors[identifier] = (read_record(entry["record"], where), parse_run(entry["run"], where))
    return ancestors


def parse_patches(run: Any, raw: Any, name: str) -> dict[str, str]:
    """sha256 → text of the patches of an artifact, whose `run.json` holds those of schema 1, and of its ancestors (`raw`).

    Raises ArtifactError if a patch does not match its hash, or a file is malformed.
    """
    found = migrated(raw, "lineage", name)
    _artifacts(found, name)
    with _damage(name):
        own = lineage.split(run)[1]
        return _patches(own, name) | _patches(lineage.patches_of(found), name)


def read_patches(folder: Path) -> dict[str, str]:
    """Like `parse_patches`, from a folder with `run.json` and `lineage.json`."""
    run, raw = read_json(folder / "run.json", RUN_BYTES), read_json(folder / "lineage.json", LINEAGE_BYTES)
    return parse_patches(run, raw, str(folder / "lineage.json"))


_PATCHES = TypeAdapter(dict[Sha256, Annotated[str, Field(max_length=LONGEST_PATCH, strict=True)]])


def _patches(raw: Any, name: str) -> dict[str, str]:
    with _damage(name, "patches: "):
        return _PATCHES.validate_python(raw)


def _artifacts(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The entries of a lineage of the current schema, after checking its fields."""
    if found.keys() != LINEAGE_FIELDS or not all(isinstance(found[field], dict) for field in LINEAGE_FIELDS - {"schema_version"}):
        raise ArtifactError(
            f"{name} is damaged (its fields must be `schema_version` and the mappings `artifacts`, `shared` and `patches`): {RESTORE}"
        )
    return found["artifacts"]


@contextmanager
def _damage(name: str, part: str = "") -> Iterator[None]:
    """Turn exceptions caused by malformed values into an ArtifactError."""
    try:
        yield
    except ValidationError as error:
        raise ArtifactError(f"{name} is damaged ({part}{described(error)}): {RESTORE}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{name} is damaged ({shown(repr(error))[:300]}): {RESTORE}") from error


def open_artifact(path: Path, verify: bool = False, beat: Beat = silent) -> Artifact:
    """Open a published artifact; `verify` re-hashes the payload instead of trusting names and sizes.

    Raises ArtifactError if it has no record, an unknown schema, or a payload that differs from the record, with each differing file.
    """
    record_file = path / "record.json"
    if not record_file.is_file():
        raise ArtifactError(f"{path} holds no record.json: it was never finished; run its stage")
    artifact = Artifact(path, load_record(record_file))
    problems = differences(artifact, verify, beat)
    if problems:
        raise ArtifactError(f"{path} differs from its record: {'; '.join(problems)}; restore it or run its stage again")
    return artifact


def intact(path: Path, verify: bool = False, beat: Beat = silent) -> Artifact | None:
    """As `open_artifact`; None if the artifact is missing or damaged."""
    with suppress(ArtifactError):
        return open_artifact(path, verify, beat)
    return None


def differences(artifact: Artifact, verify: bool, beat: Beat = silent) -> list[str]:
    """Differences between the payload on disk and the record, one sentence per file; `beat` receives bytes hashed and total bytes."""
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
    """Write JSON atomically and durably: a reader sees the old or the complete new file, even after a power cut."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    _write(path, [data])


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as canonical JSONL, streaming: equal rows give equal bytes. On an error the old file stays."""
    _write(path, (canonical_json(row).encode() + b"\n" for row in rows))


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with replacing(path) as temporary:
        with temporary.open("wb") as stream:
            stream.writelines(parts)
        fault_point(f"{path.name} written")
