"""The one door for what others wrote: records, lists of files, lock files, whole folders. Bounded, strict, and named where it is refused.

Everything is measured before it is built: bytes before they are read, nesting before JSON or YAML is parsed. What comes out is of a
declared type: relative paths in normal form, hex hashes of full length, numbers in bounds, no keys but the known ones. A path from
outside is joined to a folder by `inside` alone, and no link is ever followed below a folder that others wrote.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from configs.base.paths import RelativePath, relative_path
from configs.base.problems import PedigreeError
from configs.base.texts import UNSEEN, shown

MIB = 1 << 20
RECORD_BYTES, RUN_BYTES, LINEAGE_BYTES, LIST_BYTES, LOCK_BYTES = 64 * MIB, 16 * MIB, 256 * MIB, 256 * MIB, 32 * MIB
SOURCE_BYTES = 4 * MIB
DEEPEST = 64
"""Levels of mappings and lists inside each other."""
MOST_VALUES = 2_000_000
"""Mappings and lists in one file."""
MOST_FILES = 1_000_000
LONGEST_LINE = 64 * MIB
"""Bytes of one row."""
SHOWN_PROBLEMS = 3
RESTORE = "restore the artifact or run its stage again"


class ArtifactError(PedigreeError):
    """An artifact is missing, damaged or of another type; the message names it and the remedy."""


class NotPlain(ArtifactError):
    """Something lies in a folder that no artifact may hold."""

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
"""The name of an object of a DVC cache or remote."""
Commit = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$")]
"""A kind, a type, a port, the name of a field, a library or a lock file."""
Address = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,99}(?:\+[0-9a-f]{8})?/[a-z][a-z0-9_]{0,99}$")]
"""`RECIPE/STAGE`."""
Line = Annotated[str, Field(max_length=2000), AfterValidator(_plain_text)]
"""Words for people, in one line."""
Size = Annotated[int, Field(ge=0, le=1 << 53)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]


def described(error: ValidationError) -> str:
    """What is wrong with a value, field by field, in one line."""
    found = [
        f"{'.'.join(map(str, problem['loc'])) or 'the whole'}: {problem['msg'].removeprefix('Value error, ')}"[:300]
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    more = f"; and {len(found) - SHOWN_PROBLEMS} more" if len(found) > SHOWN_PROBLEMS else ""
    return shown(" ".join("; ".join(found[:SHOWN_PROBLEMS]).split()) + more)


# --- files -------------------------------------------------------------------------------------------------------------


def open_plain(path: Path, limit: int | None = None) -> BinaryIO:
    """A file's bytes; a link, a pipe or a device is refused before it is opened for good.

    Raises:
        ArtifactError: it is no plain file, or has more bytes than `limit`.
        OSError: it cannot be opened.
    """
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
        raise ArtifactError(f"{path} has {found.st_size} bytes, more than {limit}: no Pedigree wrote it")
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, limit: int) -> bytes:
    """Bytes of a small plain file.

    Raises:
        ArtifactError: as `open_plain`, or it cannot be read.
    """
    try:
        with open_plain(path, limit) as stream:
            data = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ArtifactError(f"{path} cannot be read ({said}): {RESTORE}") from error
    if len(data) > limit:
        raise ArtifactError(f"{path} grew beyond {limit} bytes while it was read")
    return data


def inside(root: Path, name: str) -> Path:
    """A path below a folder, by a name that others gave. This is the only way such names are joined to folders.

    Raises:
        ArtifactError: the name is no relative path in normal form, or a link stands on the way.
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
    """Every file below a folder by its path, sorted; a folder that is not there has none.

    Raises:
        NotPlain: something below is neither a plain file nor a folder, or has a name that none may have.
        ArtifactError: there are too many.
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
                    raise NotPlain(path, f"has a name that no file may have ({error})") from error
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
    """Raises ValueError where two paths are one, differ only in case, or one is a folder of the other."""
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
"""One more than what a bracket adds to the depth."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes, name: str, limit: int = LINEAGE_BYTES) -> Any:
    """The value in JSON from outside.

    Args:
        data: UTF-8.
        name: of the file, for messages.
        limit: most bytes.

    Raises:
        ArtifactError: too long, nested too deep, not UTF-8, not JSON, a key twice, or a number that is none.
    """
    if len(data) > limit:
        raise ArtifactError(f"{name} has {len(data)} bytes, more than {limit}: no Pedigree wrote it")
    brackets = _STRING.sub(b"", data).translate(_OPENING, _OTHERS)
    if len(brackets) > 2 * MOST_VALUES:
        raise ArtifactError(f"{name} holds {len(brackets) // 2} mappings and lists, more than {MOST_VALUES}: no Pedigree wrote it")
    if any(depth > DEEPEST for depth in accumulate(bracket - 1 for bracket in brackets)):
        raise ArtifactError(f"{name} is nested more than {DEEPEST} levels deep: no Pedigree wrote it")
    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=_mapping, parse_constant=_no_number, parse_float=_finite)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # halves of characters can be written in JSON and in nothing else
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name} cannot be read ({shown(str(error))[:300]}): {RESTORE}") from error
    return value


def read_json(path: Path, limit: int = LINEAGE_BYTES) -> Any:
    """What a JSON file of an artifact holds.

    Raises:
        ArtifactError: missing, no plain file, or as `parse_json`.
    """
    return parse_json(read_plain(path, limit), str(path), limit)


def read_lines(stream: BinaryIO, name: str, words: Sequence[bytes] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, one by one.

    Args:
        stream: of the file.
        name: what it is called in errors.
        words: only lines with one of them in it are parsed; all where there are none.

    Raises:
        ArtifactError: a line is too long, cannot be read, or holds no mapping; it is named by its number.
    """
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) <= LONGEST_LINE and words and not any(word in line for word in words):
            continue
        row = parse_json(line, f"{name}:{number}", LONGEST_LINE)
        if not isinstance(row, dict):
            raise ArtifactError(f"{name}:{number} holds no mapping")
        yield row


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    found = float(text)
    if found in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is no finite number")
    return found


# --- YAML --------------------------------------------------------------------------------------------------------------


def parse_yaml(text: str, name: str) -> Any:
    """The value in YAML that DVC wrote, or claims to have: without aliases and tags, which it never writes.

    DVC writes YAML 1.2, in which 1e-08 is a number and `yes` a text: PyYAML, which reads YAML 1.1, takes neither for what it is.

    Raises:
        ArtifactError: too long, nested too deep, an alias or a tag, or not YAML.
    """
    if len(text) > LOCK_BYTES:
        raise ArtifactError(f"{name} has {len(text)} characters, more than {LOCK_BYTES}: DVC did not write it")
    import yaml  # jobs come through this door too, and read none
    from ruamel.yaml import YAML, YAMLError

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise ArtifactError(f"{name} holds an alias or a tag: DVC did not write it")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ArtifactError(f"{name} is nested more than {DEEPEST} levels deep: DVC did not write it")
        return YAML(typ="safe").load(text)
    except (yaml.YAMLError, YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        raise ArtifactError(f"{name} cannot be read ({shown(' '.join(str(error).split()))[:300]})") from error


# --- what was compiled ---------------------------------------------------------------------------------------------------


class CompiledSource(BaseModel):
    """What a variant, or a recipe outside of the project's own, was compiled from (`configs/language/compile.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    recipe: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_plain_text)]
    """Its name, or a path."""
    overrides: tuple[Annotated[str, AfterValidator(_plain_text)], ...] = Field(alias="set", strict=False)
    """As `--set` has them."""


def read_source(path: Path) -> CompiledSource:
    """What a `source.json` says.

    Raises:
        ArtifactError: missing, no plain file, or none that we have written; the field is named.
    """
    try:
        return CompiledSource.model_validate(read_json(path, SOURCE_BYTES))
    except ValidationError as error:
        raise ArtifactError(f"{path} names no recipe and its overrides ({described(error)})") from error


# --- what DVC keeps ----------------------------------------------------------------------------------------------------


class _Known(BaseModel):
    """Of what DVC writes, the fields that we read; its other fields are its own business."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Member(_Known):
    relpath: RelativePath
    md5: Md5


class LockOut(_Known):
    """An output, as a `dvc.lock` or the run cache names it."""

    path: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_plain_text)]
    """As DVC has it: relative to the lock file; whoever joins it proves where it lies."""
    md5: ObjectId | None = None
    files: tuple[_Member, ...] = Field(default=(), strict=False)

    @property
    def part(self) -> str:
        return self.path.rpartition("/")[2]


class LockEntry(_Known):
    """What a stage once made."""

    cmd: str | list[str] = ""
    deps: tuple[LockOut, ...] = Field(default=(), strict=False)
    outs: tuple[LockOut, ...] = Field(default=(), strict=False)

    @property
    def objects(self) -> dict[str, str]:
        """Name of the output → object."""
        return {out.part: out.md5 for out in self.outs if out.md5}


_LISTING = TypeAdapter(list[_Member])
Held = TypeVar("Held")
_MANIFEST = TypeAdapter(dict[RelativePath, Sha256])


def parse_listing(data: bytes, name: str) -> dict[str, str]:
    """Path → md5 of the files of a folder, out of a DVC `.dir` object.

    Raises:
        ArtifactError: it is none; the field is named.
    """
    try:
        found = _LISTING.validate_python(parse_json(data, name, LIST_BYTES))
        no_twins(member.relpath for member in found)
    except ValidationError as error:
        raise ArtifactError(f"{name} is no list of files ({described(error)})") from error
    except ValueError as error:
        raise ArtifactError(f"{name} is no list of files ({error})") from error
    return {member.relpath: member.md5 for member in found}


def parse_manifest(data: bytes, name: str) -> dict[str, str]:
    """Path → sha256 of the files of a checkpoint.

    Raises:
        ArtifactError: it is none; the field is named.
    """
    return parse_files(_MANIFEST, data, LIST_BYTES, name, "manifest")


def parse_files(kind: TypeAdapter[dict[str, Held]], data: bytes, most: int, name: str, what: str) -> dict[str, Held]:
    """What a file of at most `most` bytes says of others: path → what `kind` holds.

    Raises:
        ArtifactError: it is not of that kind, or two of its names are one to some file systems: `name` is no `what`.
    """
    try:
        found = kind.validate_python(parse_json(data, name, most))
        no_twins(found)
    except ValidationError as error:
        raise ArtifactError(f"{name} is no {what} ({described(error)})") from error
    except ValueError as error:
        raise ArtifactError(f"{name} is no {what} ({error})") from error
    return found


def parse_entry(raw: Any, name: str) -> LockEntry:
    """An entry of a `dvc.lock` or of the run cache.

    Raises:
        ArtifactError: it is none; the field is named.
    """
    try:
        return LockEntry.model_validate(raw)
    except ValidationError as error:
        raise ArtifactError(f"{name} is no entry of DVC's ({described(error)})") from error


def parse_lock(text: str, name: str) -> dict[str, LockEntry]:
    """Stage → what it made, out of the text of a `dvc.lock`.

    Raises:
        ArtifactError: it is none; the field is named.
    """
    value = parse_yaml(text, name) or {}
    stages = value.get("stages") or {} if isinstance(value, dict) else None
    if not isinstance(stages, dict):
        raise ArtifactError(f"{name} is no dvc.lock: it has no mapping `stages`")
    return {str(stage): parse_entry(entry, f"{name}, stage {shown(str(stage)[:80])}") for stage, entry in stages.items()}
