"""Files with rows: JSONL (packed or not), JSON and Parquet, each row with its place."""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from data.procedural import SourceError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

BLOCK_BYTES, BLOCK_ROWS = 1 << 22, 1000
"""Of what is parsed together."""


class Unreadable(NamedTuple):
    """Stands for a row that cannot be read by itself, where those around it can."""

    text: str
    reason: str


def text_of(row: Any) -> str:
    """A row as people are shown it."""
    text = row.text if isinstance(row, Unreadable) else json.dumps(row, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode()


class Block(Protocol):
    """Rows that lie together: as many as one process parses at a time."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        """(place, row) of each."""
        ...


@dataclass(frozen=True)
class Handed:
    """Rows that have been read."""

    given: Sequence[tuple[str, Any]]

    def rows(self) -> Iterator[tuple[str, Any]]:
        yield from self.given


@dataclass(frozen=True)
class Lines:
    """Whole lines of JSONL, as they were read."""

    file: str
    first: int
    """Number of the first line."""
    data: bytes

    def rows(self) -> Iterator[tuple[str, Any]]:
        try:
            text = self.data.decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.file} is not UTF-8: {error}") from error
        for number, line in enumerate(text.split("\n"), start=self.first):
            if line.strip():
                yield f"{self.file}:{number}", _parsed(line)


@dataclass(frozen=True)
class Batch:
    """Rows of a Parquet file."""

    file: str
    first: int
    batch: "RecordBatch"

    def rows(self) -> Iterator[tuple[str, Any]]:
        yield from ((f"{self.file}[{number}]", row) for number, row in enumerate(self.batch.to_pylist(), start=self.first))


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of a file, or of every data file below a folder."""
    for block in blocks(path):
        yield from block.rows()


def blocks(path: Path) -> Iterator[Block]:
    """All rows of a file, or of every data file below a folder, to be parsed elsewhere.

    Raises:
        SourceError: it is no file of rows, or cannot be unpacked; and when a block is parsed: it is not UTF-8.
    """
    files = sorted(file for file in path.rglob("*") if ending(file) in READERS) if path.is_dir() else [path]
    if not files:
        raise SourceError(f"{path.name} holds no {', '.join(sorted(READERS))} file")
    for file in files:
        if ending(file) not in READERS:
            raise SourceError(f"{file.name}: rows are read from {', '.join(sorted(READERS))} files")
        yield from READERS[ending(file)](file)


def given(rows: Iterable[tuple[str, Any]]) -> Iterator[Handed]:
    """Rows that something else has read, in blocks."""
    rows = iter(rows)
    while some := list(islice(rows, BLOCK_ROWS)):
        yield Handed(some)


def ending(file: PurePath) -> str:
    """How a file ends, with what it is packed in."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def _jsonl(file: Path) -> Iterator[Block]:
    with file.open("rb") as stream:
        yield from _lines(file, stream)


def _packed(file: Path) -> Iterator[Block]:
    try:
        with gzip.open(file) as stream:
            yield from _lines(file, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{file.name} cannot be unpacked: {error}") from error


def _lines(file: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[Block]:
    number, rest = 1, stream.read(len(BOM_UTF8)).removeprefix(BOM_UTF8)  # as some editors write it
    while data := stream.read(BLOCK_BYTES):
        whole, end, begun = data.rpartition(b"\n")
        if not end:
            rest += data
            continue
        block = rest + whole
        yield Lines(file.name, number, block)
        number, rest = number + block.count(b"\n") + 1, begun
    if rest:
        yield Lines(file.name, number, rest)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(line, f"is not JSON: {error}")


def _json(file: Path) -> Iterator[Block]:
    try:
        rows = _parsed(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError(f"{file.name} is not UTF-8: {error}") from error
    if isinstance(rows, Unreadable):
        raise SourceError(f"{file.name} {rows.reason}")
    if not isinstance(rows, list):
        raise SourceError(f"{file.name} is not a JSON list of rows")
    yield from given((f"{file.name}[{number}]", row) for number, row in enumerate(rows))


def _parquet(file: Path) -> Iterator[Block]:
    from pyarrow import ArrowInvalid, parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(BLOCK_ROWS):
                yield Batch(file.name, number, batch)
                number += len(batch)
    except ArrowInvalid as error:
        raise SourceError(f"{file.name} is not Parquet: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Block]]] = {".jsonl": _jsonl, ".jsonl.gz": _packed, ".json": _json, ".parquet": _parquet}


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
