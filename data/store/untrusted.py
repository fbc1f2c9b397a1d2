"""Strict, bounded parsing of untrusted input: records, file lists, lock files and whole folders.

Sizes are checked before reading, and nesting before JSON or YAML is parsed. Results have declared types: normalized relative paths,
full-length hex hashes, bounded numbers, known keys only. Untrusted paths are joined to folders by `inside` alone, and links below an
untrusted folder are never followed.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pedigree.configs.base.paths import RelativePath, relative_path
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.texts import UNSEEN, shown

MIB = 1 << 20
RECORD_BYTES, RUN_BYTES, LINEAGE_BYTES, LIST_BYTES, LOCK_BYTES = 64 * MIB, 16 * MIB, 256 * MIB, 256 * MIB, 32 * MIB
SOURCE_BYTES = 4 * MIB
DEEPEST = 64
"""Maximum nesting of mappings and lists."""
MOST_VALUES = 2_000_000
"""Maximum number of mappings and lists in one file."""
MOST_FILES = 1_000_000
LONGEST_LINE = 64 * MIB
"""Maximum bytes of one row."""
SHOWN_PROBLEMS = 3
RESTORE = "restore the artifact or run its stage again"
Held = TypeVar("Held")


class ArtifactError(PedigreeError):
    """An artifact is missing, damaged or of the wrong type; the message names it and the remedy."""


class NotPlain(ArtifactError):
    """A folder contains an entry that no artifact may contain."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path} {what}")


# --- types -------------------------------------------------------------------------------------------------------------


def _plain_text(value: str) -> str:
    if UNSEEN.search(value):
        raise ValueError(f"{shown(repr(value[:80]))} holds a control character")
    return value


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Md5 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
ObjectId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}(?:\.dir)?$")]
"""Name of an object in a DVC cache or remote."""
Commit = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$")]
"""A kind, type, port, or the name of a field, library or lock file."""
Address = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,99}(?:\+[0-9a-f]{8})?/[a-z][a-z0-9_]{0,99}$")]
"""`RECIPE/STAGE`."""
Line = Annotated[str, Field(max_length=2000), AfterValidator(_plain_text)]
"""Human-readable text on one line."""
Size = Annotated[int, Field(ge=0, le=1 << 53)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]


def described(error: Exception) -> str:
    """The problems of a value, field by field, on one line; of any other error, its text."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = [
        f"{'.'.join(map(str, problem['loc'])) or 'the whole'}: {problem['msg'].removeprefix('Value error, ')}"[:300]
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    more = f"; and {len(found) - SHOWN_PROBLEMS} more" if len(found) > SHOWN_PROBLEMS else ""
    return shown(" ".join("; ".join(found[:SHOWN_PROBLEMS]).split()) + more)


@contextmanager
def _refused_as(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ArtifactError(f"{what} ({described(error)})") from error


# --- files -------------------------------------------------------------------------------------------------------------


def open_plain(path: Path, limit: int | None = None) -> BinaryIO:
    """Open a file for reading. Raises ArtifactError unless it is a regular file (no link, pipe or device) of at most `limit` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise ArtifactError(f"{path} is not a plain file: links are not followed; {RESTORE}") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ArtifactError(f"{path} is not a plain file; {RESTORE}")
    if limit is not None and found.st_size > limit:
        os.close(descriptor)
        raise ArtifactError(f"{path} is too large ({found.st_size} > {limit} bytes) to be a Pedigree file")
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, limit: int) -> bytes:
    """Read a small regular file. Raises ArtifactError as in `open_plain`, or if it cannot be read."""
    try:
        with open_plain(path, limit) as stream:
            data = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"{path} cannot be read ({reason}): {RESTORE}") from error
    if len(data) > limit:
        raise ArtifactError(f"{path} grew beyond {limit} bytes while it was read")
    return data


def inside(root: Path, name: str) -> Path:
    """Join an untrusted name to a folder. This is the only way to do so.

    Raises ArtifactError unless the name is a normalized relative path that leads through no link.
    """
    try:
        parts = relative_path(name).split("/")
    except ValueError as error:
        raise ArtifactError(f"{error}: nothing outside of {root} is touched") from error
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise ArtifactError(f"{path} is not a plain file: links are not followed; {RESTORE}")
    return path


def plain_files(folder: Path) -> dict[str, Path]:
    """Relative path → file, sorted, for all files below a folder; empty if the folder is missing.

    Raises:
        NotPlain: an entry is neither a regular file nor a folder, or has an invalid name.
        ArtifactError: there are too many files.
    """
    if folder.is_symlink():
        raise NotPlain(folder, "is not a plain folder: links are not followed")
    found: dict[str, Path] = {}
    waiting = [folder] if folder.is_dir() else []
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                name = path.relative_to(folder).as_posix()
                try:
                    relative_path(name)
                except ValueError as error:
                    raise NotPlain(path, f"has an invalid name ({error})") from error
                if entry.is_symlink():
                    raise NotPlain(path, "is not a plain file: links are not followed")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif entry.is_file(follow_symlinks=False):
                    found[name] = path
                else:
                    raise NotPlain(path, "is not a plain file: an artifact holds plain files only")
                if len(found) + len(waiting) > MOST_FILES:
                    raise ArtifactError(f"{folder} holds more than {MOST_FILES} files")
    return dict(sorted(found.items()))


def no_twins(names: Iterable[str]) -> None:
    """Raise ValueError if two paths are equal, differ only in case, or one is a parent of the other."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.get(name.casefold())
        if other is not None:
            raise ValueError(f"{other!r} and {name!r} would be one file")
        seen[name.casefold()] = name
    for name in seen.values():
        parts = name.casefold().split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in seen:
                raise ValueError(f"{'/'.join(parts[:end])!r} would be a file and a folder")


# --- JSON --------------------------------------------------------------------------------------------------------------

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_OPENING = bytes(2 if sign in b"[{" else 0 for sign in range(256))
"""Change in depth per bracket, plus one."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes, name: str, limit: int = LINEAGE_BYTES) -> Any:
    """Parse untrusted JSON of at most `limit` bytes; `name` is for messages.

    Raises ArtifactError if it is too large, nested too deeply, not UTF-8, not JSON, or has a duplicate key or a non-finite number.
    """
    if len(data) > limit:
        raise ArtifactError(f"{name} is too large ({len(data)} > {limit} bytes) to be a Pedigree file")
    brackets = _STRING.sub(b"", data).translate(_OPENING, _OTHERS)
    if len(brackets) > 2 * MOST_VALUES:
        raise ArtifactError(f"{name} has too many mappings and lists ({len(brackets) // 2} > {MOST_VALUES}) to be a Pedigree file")
    if any(depth > DEEPEST for depth in accumulate(bracket - 1 for bracket in brackets)):
        raise ArtifactError(f"{name} is nested too deeply (more than {DEEPEST} levels) to be a Pedigree file")
    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=_mapping, parse_constant=_no_number, parse_float=_finite)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # rejects lone surrogates, which only JSON escapes can express
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name} cannot be read ({shown(str(error))[:300]}): {RESTORE}") from error
    return value


def read_json(path: Path, limit: int = LINEAGE_BYTES) -> Any:
    """Read and parse a JSON file of an artifact. Raises ArtifactError as in `read_plain` and `parse_json`."""
    return parse_json(read_plain(path, limit), str(path), limit)


def read_as(validated: Callable[[Any], Held], path: Path, limit: int = LINEAGE_BYTES) -> Held | None:
    """Read a JSON file as what `validated` makes of it; None if it is missing, damaged or from another version of Pedigree."""
    with suppress(ArtifactError, ValidationError):
        return validated(read_json(path, limit))
    return None


def read_lines(stream: BinaryIO, name: str, words: Sequence[bytes] = ()) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a JSONL file; if `words` are given, only over those of lines that contain one of them.

    Raises ArtifactError, with its number, for a line that is too long, invalid or not a mapping.
    """
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) <= LONGEST_LINE and words and not any(word in line for word in words):
            continue
        row = parse_json(line, f"{name}:{number}", LONGEST_LINE)
        if not isinstance(row, dict):
            raise ArtifactError(f"{name}:{number} is not a mapping")
        yield row


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    found = float(text)
    if found in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is not a finite number")
    return found


# --- YAML --------------------------------------------------------------------------------------------------------------


def parse_yaml(text: str, name: str) -> Any:
    """Parse untrusted YAML in DVC's format, without aliases and tags, which DVC never writes.

    DVC writes YAML 1.2, where 1e-08 is a number and `yes` a string; PyYAML reads YAML 1.1 and misreads both. Raises ArtifactError if it is
    too long, nested too deeply, not YAML, or has an alias or a tag.
    """
    if len(text) > LOCK_BYTES:
        raise ArtifactError(f"{name} is too large ({len(text)} > {LOCK_BYTES} characters) to be a DVC file")
    import yaml  # imported here because jobs import this module and parse no YAML
    from ruamel.yaml import YAML, YAMLError

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise ArtifactError(f"{name} contains an alias or a tag, which DVC never writes")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ArtifactError(f"{name} is nested too deeply (more than {DEEPEST} levels) to be a DVC file")
        return YAML(typ="safe").load(text)
    except (yaml.YAMLError, YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        raise ArtifactError(f"{name} cannot be read ({shown(' '.join(str(error).split()))[:300]})") from error


# --- compiled sources ----------------------------------------------------------------------------------------------------


class CompiledSource(BaseModel):
    """The source of a variant, or of a recipe outside the project's own (`configs/language/compile.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    recipe: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_plain_text)]
    """Recipe name or path."""
    overrides: tuple[Annotated[str, AfterValidator(_plain_text)], ...] = Field(alias="set", strict=False)
    """As in `--set`."""


def read_source(path: Path) -> CompiledSource:
    """Parse a `source.json`. Raises ArtifactError, which names the field."""
    with _refused_as(f"{path} is not a valid source.json"):
        return CompiledSource.model_validate(read_json(path, SOURCE_BYTES))


# --- DVC's files -------------------------------------------------------------------------------------------------------


class _Known(BaseModel):
    """The fields of DVC's files that Pedigree reads; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Member(_Known):
    relpath: RelativePath
    md5: Md5


class LockOut(_Known):
    """An output in a `dvc.lock` or in the run cache."""

    path: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_plain_text)]
    """Relative to the lock file, as in DVC; callers must check the joined path."""
    md5: ObjectId | None = None
    size: int | None = None
    nfiles: int | None = None
    files: tuple[_Member, ...] = Field(default=(), strict=False)

    @property
    def part(self) -> str:
        return self.path.rpartition("/")[2]


class LockEntry(_Known):
    """A stage's recorded result."""

    cmd: str | list[str] = ""
    deps: tuple[LockOut, ...] = Field(default=(), strict=False)
    params: dict[str, dict[str, Any]] = Field(default={})
    outs: tuple[LockOut, ...] = Field(default=(), strict=False)

    @property
    def objects(self) -> dict[str, str]:
        """Output name → object."""
        return {out.part: out.md5 for out in self.outs if out.md5}

    @property
    def size(self) -> int:
        """Bytes of its outputs, as far as they are recorded."""
        return sum(out.size or 0 for out in self.outs)


_LISTING = TypeAdapter(list[_Member])
_MANIFEST = TypeAdapter(dict[RelativePath, Sha256])


def parse_listing(data: bytes, name: str) -> dict[str, str]:
    """Path → MD5 of the files of a folder, from a DVC `.dir` object. Raises ArtifactError, which names the field."""
    with _refused_as(f"{name} is not a valid list of files"):
        found = _LISTING.validate_python(parse_json(data, name, LIST_BYTES))
        no_twins(member.relpath for member in found)
    return {member.relpath: member.md5 for member in found}


def parse_manifest(data: bytes, name: str) -> dict[str, str]:
    """Path → SHA-256 of the files of a checkpoint. Raises ArtifactError, which names the field."""
    return parse_files(_MANIFEST, data, LIST_BYTES, name, "manifest")


def parse_files(kind: TypeAdapter[dict[str, Held]], data: bytes, most: int, name: str, what: str) -> dict[str, Held]:
    """Parse a mapping from paths to values of type `kind`, of at most `most` bytes.

    Raises ArtifactError, which calls it `what`, if it is invalid or two of its paths coincide on some file systems.
    """
    with _refused_as(f"{name} is not a valid {what}"):
        found = kind.validate_python(parse_json(data, name, most))
        no_twins(found)
    return found


def parse_entry(raw: Any, name: str) -> LockEntry:
    """Parse an entry of a `dvc.lock` or of the run cache. Raises ArtifactError, which names the field."""
    with _refused_as(f"{name} is not a valid DVC entry"):
        return LockEntry.model_validate(raw)


def parse_lock(text: str, name: str) -> dict[str, LockEntry]:
    """Stage → its result, from the text of a `dvc.lock`. Raises ArtifactError, which names the field."""
    value = parse_yaml(text, name) or {}
    stages = value.get("stages") or {} if isinstance(value, dict) else None
    if not isinstance(stages, dict):
        raise ArtifactError(f"{name} is not a valid dvc.lock: it has no mapping `stages`")
    return {str(stage): parse_entry(entry, f"{name}, stage {shown(str(stage)[:80])}") for stage, entry in stages.items()}
