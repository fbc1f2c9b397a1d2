"""Files with rows: JSONL (packed or not), JSON and Parquet, each row with its place."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from data.procedural import SourceError


class Unreadable(NamedTuple):
    """Stands for a row that cannot be read by itself, where those around it can."""

    text: str
    reason: str


def text_of(row: Any) -> str:
    """A row as people are shown it."""
    return row.text if isinstance(row, Unreadable) else json.dumps(row, ensure_ascii=False, default=str)


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of a file, or of every data file below a folder."""
    files = sorted(file for file in path.rglob("*") if ending(file) in READERS) if path.is_dir() else [path]
    if not files:
        raise SourceError(f"{path.name} holds no {', '.join(sorted(READERS))} file")
    for file in files:
        if ending(file) not in READERS:
            raise SourceError(f"{file.name}: rows are read from {', '.join(sorted(READERS))} files")
        yield from READERS[ending(file)](file)


def ending(file: PurePath) -> str:
    """How a file ends, with what it is packed in."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with _utf8(file), file.open() as stream:
        yield from _lines(file, stream)


def _read_packed(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with _utf8(file), gzip.open(file, "rt", encoding="utf-8") as stream:
            yield from _lines(file, stream)
    except (OSError, EOFError) as error:
        raise SourceError(f"{file.name} cannot be unpacked: {error}") from error


def _lines(file: Path, stream: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield f"{file.name}:{number}", _line(line)


def _line(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(text.rstrip("\n"), f"is not JSON: {error}")


def _read_json(file: Path) -> Iterator[tuple[str, Any]]:
    with _utf8(file):
        rows = _line(file.read_text())
    if isinstance(rows, Unreadable):
        raise SourceError(f"{file.name} {rows.reason}")
    if not isinstance(rows, list):
        raise SourceError(f"{file.name} is not a JSON list of rows")
    yield from ((f"{file.name}[{number}]", row) for number, row in enumerate(rows))


@contextmanager
def _utf8(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise SourceError(f"{file.name} is not UTF-8: {error}") from error


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowInvalid, parquet

    try:
        rows = parquet.read_table(file).to_pylist()
    except ArrowInvalid as error:
        raise SourceError(f"{file.name} is not Parquet: {error}") from error
    yield from ((f"{file.name}[{number}]", row) for number, row in enumerate(rows))


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": read_jsonl,
    ".jsonl.gz": _read_packed,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def first_rows(file: Path, count: int) -> bytes | None:
    """A file of the same kind with the first rows of this one alone; None where it has no more of them, or cannot be read."""
    try:
        match ending(file):
            case ".jsonl":
                with file.open("rb") as stream:
                    return _first_lines(stream, count)
            case ".jsonl.gz":
                with gzip.open(file) as stream:
                    lines = _first_lines(stream, count)
                return gzip.compress(lines, mtime=0) if lines is not None else None
            case ".json":
                rows = json.loads(file.read_bytes())
                return json.dumps(rows[:count]).encode() if isinstance(rows, list) and len(rows) > count else None
            case ".parquet":
                return _first_of_parquet(file, count)
            case _:
                return None
    except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error):  # pyarrow's too is a ValueError
        return None


def _first_lines(stream: Iterable[bytes], count: int) -> bytes | None:
    lines = list(islice((line for line in stream if line.strip()), count + 1))
    return b"".join(lines[:count]) if len(lines) > count else None


def _first_of_parquet(file: Path, count: int) -> bytes | None:
    from pyarrow import BufferOutputStream, Table, parquet

    with parquet.ParquetFile(file) as opened:
        if opened.metadata.num_rows <= count:
            return None
        rows = Table.from_batches([next(opened.iter_batches(batch_size=count))])
    parquet.write_table(rows, sink := BufferOutputStream())
    return sink.getvalue().to_pybytes()
