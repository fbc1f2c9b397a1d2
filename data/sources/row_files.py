"""Row files: JSONL (optionally gzipped), JSON and Parquet; every row comes with its place."""

import codecs
import gzip
import json
import re
import zlib
from codecs import BOM_UTF8, BOM_UTF32_LE
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.row_sources import LAYOUT_COLUMNS, Stored
from pedigree.data.artifacts import assets
from pedigree.data.records.records import characters_in
from pedigree.data.sources.dialogues import is_tree

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch
    from pyarrow.parquet import FileMetaData

BLOCK_BYTES, BLOCK_ROWS = 1 << 22, 1000
"""Size of the blocks that are parsed at a time."""
LONGEST_LINE = 64 << 20
"""Maximum bytes of a JSONL row."""
COUNTED_BYTES = 1 << 28
"""Bytes of text up to which a plan counts rows."""
LARGEST_JSON = 2 << 30
"""Maximum bytes of a JSON list, which is loaded whole and takes several times as much memory."""
SHOWN = 3
"""Number of reasons shown in an error, and of rows for each."""
EXCERPT, REASON = 200, 300
"""Maximum characters of a bad row, and of the reason, in its evidence."""
NULL = " (null)"
"""Follows the name of a column without a value."""
LINE = re.compile(r"[^\r\n]+")
"""A line of JSON Lines; other separators of lines are text."""
GAP = " .. "
"""Replaces the omitted middle of a reason."""
OF_ROWS = frozenset(LAYOUT_COLUMNS) - {"dataset", "source"}
"""Columns by which an object is a row and not a file's frame around its rows."""
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".zip", ".tar", ".tgz", ".part", ".tmp", ".incomplete")
"""Suffixes of files that are compressed or incomplete."""
OTHER_FORMATS = {
    ".csv": "convert it with pandas.read_csv(FILE).to_json('rows.jsonl', orient='records', lines=True)",
    ".arrow": "convert its folder with datasets.load_from_disk(FOLDER).to_parquet('rows.parquet')",
    ".ndjson": "rename it to .jsonl",
    **dict.fromkeys((".tsv", ".feather", ".orc", ".avro"), "convert it to .parquet"),
}
"""Suffix of files with rows that are not read → remedy."""
ABOUT_ROWS = ("dataset_infos.json", "dataset_info.json")
"""Files that describe the rows next to them, by `datasets`."""


class Unreadable(NamedTuple):
    """Replaces a row that cannot be read, although the rows around it can."""

    text: str
    reason: str


def text_of(row: Any) -> str:
    """A row as text for display."""
    try:
        return writable(row.text if isinstance(row, Unreadable) else json.dumps(row, ensure_ascii=False, default=str))
    except RecursionError:  # it was read where fewer calls were on the stack
        return "(nested too deeply to be shown)"


def writable(text: str) -> str:
    """The text with lone surrogates, which cannot be encoded, as escapes."""
    return text.encode(errors="backslashreplace").decode()


class BadRow(NamedTuple):
    """A rejected row."""

    place: str
    """File and line, or dataset, split and number, or the id in another stage."""
    reason: str
    text: str
    """Its beginning."""
    columns: tuple[str, ...] = ()
    out_of_turn: str = ""
    """The fault for which the source's rules drop it; such a row does not count toward `max_bad_rows`."""

    def as_json(self) -> dict[str, str]:
        """Its line in the evidence."""
        shown = {"place": self.place, "reason": self.reason, "text": self.text}
        return shown | {"out_of_turn": self.out_of_turn} if self.out_of_turn else shown

    @classmethod
    def of(cls, place: str, reason: str, row: Any) -> "BadRow":
        """Truncated, with characters escaped that cannot be written."""
        reason = writable(reason)
        if len(reason) > REASON:  # keep both ends: some reasons quote first and end with the problem
            half = (REASON - len(GAP)) // 2
            reason = f"{reason[:half]}{GAP}{reason[-half:]}"
        columns = tuple(writable(str(name)[:EXCERPT]) + NULL * (row[name] is None) for name in row) if isinstance(row, dict) else ()
        return cls(place, reason, text_of(row)[:EXCERPT], columns)


def listed(bad: Sequence[BadRow]) -> str:
    """The first reasons, one per line, each with the first rows that it concerns."""
    places: dict[str, list[str]] = {}
    for row in bad:
        places.setdefault(row.reason, []).append(row.place)
    lines = [f"{_first(rows)}: {reason}" for reason, rows in islice(places.items(), SHOWN)]
    more = sum(len(rows) for rows in places.values()) - sum(len(rows) for rows in islice(places.values(), SHOWN))
    return "\n  ".join([*lines, *([f"... and {more} more"] if more else [])])


def _first(places: Sequence[str]) -> str:
    return ", ".join(places[:SHOWN]) + (f" and {len(places) - SHOWN} more" if len(places) > SHOWN else "")


Block = Callable[[], Iterable[tuple[str, Any]]]
"""Reads and parses adjacent rows, (place, row) pairs; can be sent to another process."""


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """Iterate over (place, row) of a file, or of all data files below a folder."""
    for block in blocks(path):
        yield from block()


def blocks(path: Path) -> Iterator[Block]:
    """All blocks of a file, or of all data files below a folder, not yet parsed.

    Raises PedigreeError if the file is not a row file, cannot be unpacked, is damaged, or has an overlong line.
    """
    for file in _files(path) if path.is_dir() else [path]:
        if ending(file) not in READERS:
            raise PedigreeError(f"{file.name}: rows are read from {', '.join(sorted(READERS))} files: {_remedy(file)}")
        yield from READERS[ending(file)](file)


def _files(folder: Path) -> list[Path]:
    """The data files below a folder, sorted, without hidden files and files such as a license.

    Raises PedigreeError if there is none, or a file looks like rows in an unsupported format.
    """

    def is_hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    there = sorted(path for path in folder.rglob("*") if not path.is_dir() and not is_hidden(path))
    left_out = [path.relative_to(folder).as_posix() for path in there if ending(path) not in READERS and _looks_like_rows(path)]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        raise PedigreeError(
            f"{folder.name} holds {left_out[0]}{more}, which would be left out: rows are read from {', '.join(sorted(READERS))} files; "
            f"{_remedy(PurePath(left_out[0]))}, or remove it"
        )
    files = [path for path in there if ending(path) in READERS and path.name not in ABOUT_ROWS]
    if not files:
        raise PedigreeError(f"{folder.name} holds no {', '.join(sorted(READERS))} file")
    return files


def _looks_like_rows(file: PurePath) -> bool:
    """Whether the suffix is that of a file of rows, ignoring case and compression."""
    plain = PurePath(file.name.lower())
    plain = plain.with_suffix("") if plain.suffix in PACKED else plain
    return plain.suffix in OTHER_FORMATS or ending(plain) in READERS


def _remedy(file: PurePath) -> str:
    return OTHER_FORMATS.get(file.suffix.lower(), "rename, unpack or convert it")


def in_blocks(rows: Iterable[tuple[str, Any]]) -> Iterator[Block]:
    """Rows from elsewhere, in blocks."""
    held, size = [], 0
    for one in rows:
        held.append(one)
        size += characters_in(one)
        if len(held) >= BLOCK_ROWS or size >= BLOCK_BYTES:
            yield partial(list, held)
            held, size = [], 0
    if held:
        yield partial(list, held)


def ending(file: PurePath) -> str:
    """A file's suffix, including compression."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def file_name(source: Stored) -> str:
    """The name of a stored source's file on this machine."""
    return f"{source.name}{ending(PurePosixPath(source.url))}"


def cached_at(source: Stored, sha256: str) -> Path:
    """Where the machine-wide cache keeps the source's file with this hash."""
    return assets.cache_folder() / "sources" / sha256 / file_name(source)


def _jsonl(file: Path) -> Iterator[Block]:
    with file.open("rb") as stream:
        is_list = stream.readline(8).removeprefix(BOM_UTF8) in (b"[\n", b"[\r\n")
        stream.seek(0)
        yield from _json(file) if is_list else _lines(file, stream)


def _packed(file: Path) -> Iterator[Block]:
    try:
        with gzip.open(file) as stream:
            yield from _lines(file, stream)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a disk error; damaged files raise OSErrors without errno
            raise
        raise PedigreeError(f"{file.name} cannot be unpacked: {error}") from error


def _lines(file: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[Block]:
    number, held, length = 1, [], 0
    for data in _pieces(stream):
        whole, end, begun = data.rpartition(b"\n")
        length += data.index(b"\n") if end else len(data)
        if length > LONGEST_LINE:
            raise PedigreeError(
                f"{file.name}:{number} has more than {LONGEST_LINE} bytes: JSONL has one row per line; convert a JSON list with "
                "`jq -c '.[]'`"
            )
        if not end:
            held.append(data)
            continue
        block = b"".join([*held, whole])
        yield partial(_in_lines, file.name, number, block)
        number, held, length = number + block.count(b"\n") + 1, [begun], len(begun)
    if rest := b"".join(held):
        yield partial(_in_lines, file.name, number, rest)


def _in_lines(file: str, first: int, data: bytes) -> Iterator[tuple[str, Any]]:
    """The rows of complete lines; `first` is the number of the first one."""
    try:
        lines: Sequence[str | Unreadable] = data.decode().split("\n")
    except UnicodeDecodeError:
        lines = [_decoded(line) for line in data.split(b"\n")]
    for number, line in enumerate(lines, start=first):
        if isinstance(line, Unreadable) or line.strip():
            yield f"{file}:{number}", line if isinstance(line, Unreadable) else _parsed(line)


def _pieces(stream: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    """A stream's lines in UTF-8, without a byte order mark. In UTF-16 and UTF-32, damaged characters become escapes, which are not JSON.
    Raw carriage returns are never part of JSON texts, so they end lines if nothing else does."""
    first = stream.read(max(BLOCK_BYTES, len(BOM_UTF32_LE)))
    pieces = chain([first], iter(partial(stream.read, BLOCK_BYTES), b""))
    encoding = json.detect_encoding(first)
    if not encoding.startswith("utf-8") and any(first[:4]):
        pieces = map(str.encode, codecs.iterdecode(pieces, encoding, "backslashreplace"))
    first = next(pieces, b"").removeprefix(BOM_UTF8)
    by_return = b"\r" in first[:-1] and b"\n" not in first
    for data in chain([first], pieces):
        yield data.replace(b"\r", b"\n") if by_return else data


def _decoded(line: bytes) -> str | Unreadable:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        why = f"is not UTF-8: byte {line[error.start]:#04x} at {error.start}: {error.reason}"
        return Unreadable(line.decode(errors="backslashreplace"), why)


def _parsed(text: str) -> Any:
    try:
        return DECODER.decode(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        within = f"line {error.lineno}, " if "\n" in text else ""
        remedy = ": write each row on one line, with `jq -c .`" if text.strip() == "{" else ""
        return Unreadable(text, f"is not JSON: {error.msg} at {within}character {error.colno}{remedy}")
    except (ValueError, RecursionError) as error:
        return Unreadable(text, f"is not JSON: {error}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys. Raises ValueError if one is repeated, because readers differ in which value they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {name!r:.80} twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _json(file: Path) -> Iterator[Block]:
    size = file.stat().st_size
    if size > LARGEST_JSON:
        raise PedigreeError(
            f"{file.name} is too large for a JSON list ({size} > {LARGEST_JSON} bytes): convert it to a .jsonl file with `jq -c '.[]'`"
        )
    data = file.read_bytes()
    encoding = json.detect_encoding(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise PedigreeError(f"{file.name} is not {encoding.removesuffix('-sig').upper()}: {error}") from error
    found = _parsed(text) if text.strip() else []
    first = LINE.match(text.strip())
    if isinstance(found, Unreadable) and not (first and isinstance(_parsed(first.group()), dict)):
        raise PedigreeError(f"{file.name} {found.reason}")
    if isinstance(found, Unreadable) or (_is_row(found) and first and first.end() == len(text.strip())):
        yield from _jsonl(file)  # JSON Lines under another name
        return
    rows = _listed(found)
    if rows is None:
        has = f": it has {', '.join(str(name)[:EXCERPT] for name in islice(found, SHOWN))}" if isinstance(found, dict) else ""
        raise PedigreeError(f"{file.name} is not a JSON list of rows, nor an object with one such list{has}")
    yield from in_blocks((f"{file.name}[{number}]", row) for number, row in enumerate(rows))


def _listed(found: Any) -> list[Any] | None:
    """The rows of a JSON file: a list, or the only one in an object that is not a row itself, as in `{"version": 1, "data": [...]}`."""
    if not isinstance(found, dict) or _is_row(found):
        return found if isinstance(found, list) else None
    filled = [rows for rows in _lists(found) if rows]
    return filled[0] if len(filled) == 1 else None if filled else []


def _is_row(found: Any) -> bool:
    """Whether an object is a row, by its columns, or because it has no list of rows."""
    return isinstance(found, dict) and bool(found.keys() & OF_ROWS or not _lists(found))


def _lists(found: dict[str, Any]) -> list[list[Any]]:
    """The lists of objects in an object."""
    return [value for value in found.values() if isinstance(value, list) and all(isinstance(one, dict) for one in value)]


def _parquet(file: Path) -> Iterator[Block]:
    from pyarrow import parquet

    with _explained(f"{file.name} is not Parquet"):
        opened = parquet.ParquetFile(file)
    with opened:
        names = opened.schema_arrow.names
        if len(set(names)) < len(names):
            name, times = Counter(names).most_common(1)[0]
            raise PedigreeError(f"{file.name} has {times} columns called {name!r:.80}: rename them, or leave all but one out")
        number, batches = 0, opened.iter_batches(_at_once(opened.metadata))
        while True:
            with _explained(f"{file.name}: rows from {number} on cannot be read"):
                batch = next(batches, None)
                if batch is None:
                    return
                parts = [part if part is batch else _alone(part) for part in _parts(batch)]
            for part in parts:
                yield partial(_in_batch, file.name, number, part)
                number += len(part)


def _alone(part: "RecordBatch") -> "RecordBatch":
    """A copy of a slice, which would be sent to other processes with its whole buffer. `take` does not know all types."""
    from pyarrow import BufferOutputStream, ipc

    with ipc.new_stream(sink := BufferOutputStream(), part.schema) as stream:
        stream.write_batch(part)
    return ipc.open_stream(sink.getvalue()).read_next_batch()


def _in_batch(file: str, first: int, batch: "RecordBatch") -> Iterator[tuple[str, Any]]:
    with _explained(f"{file}: rows {first} to {first + len(batch) - 1} cannot be read"):
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            columns = [_values(column) for column in batch.columns]
            rows = [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    yield from ((f"{file}[{number}]", row) for number, row in enumerate(rows, start=first))


def _values(column: "Array[Any]") -> list[Any]:
    """A column's values; one that Python has no form for, such as a time after the year 9999, is `Unreadable`, so that it makes a row bad
    only if it is read. Raises what pyarrow raises for damaged ones."""
    from pyarrow import ArrowException

    found = []
    for value in column:
        try:
            found.append(value.as_py())
        except (ValueError, OverflowError) as error:
            if isinstance(error, (UnicodeError, ArrowException)):
                raise
            found.append(Unreadable(f"{value.type}", str(error)))
    return found


def _at_once(metadata: "FileMetaData") -> int:
    """Number of rows to decode at a time, from the sizes in the metadata, which may be too small if texts repeat."""
    stated = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES * metadata.num_rows // max(1, stated)))


def _parts(batch: "RecordBatch") -> Iterator["RecordBatch"]:
    """The rows in batches of at most `BLOCK_BYTES`, or one row."""
    if len(batch) <= 1 or batch.nbytes <= BLOCK_BYTES:
        yield batch
        return
    half = len(batch) // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn pyarrow's errors about damaged files into `PedigreeError`; OSErrors with errno come from the system and are raised as is."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise PedigreeError(f"{what}: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Block]]] = {".jsonl": _jsonl, ".jsonl.gz": _packed, ".json": _json, ".parquet": _parquet}


def rows_at_most(path: Path) -> int | None:
    """Bound of the rows of a file or folder, by its lines or metadata; None where counting takes long, or a row is split into several."""
    files = _files(path) if path.is_dir() else [path]
    if sum(file.stat().st_size for file in files if file.suffix != ".parquet") > COUNTED_BYTES:
        return None
    counts = [_counted(file, file.stat().st_mtime_ns) for file in files]
    return None if None in counts else sum(filter(None, counts))


@lru_cache(maxsize=512)
def _counted(file: Path, modified: int) -> int | None:
    """Of a file as it was at some moment."""
    rows = (row for _, row in read(file))
    first = next(rows, None)
    if isinstance(first, dict) and any(is_tree({"prompt": value}) for value in first.values()):
        return None
    match ending(file):
        case ".parquet":
            from pyarrow import parquet

            with _explained(f"{file.name} is not Parquet"):
                return parquet.read_metadata(file).num_rows
        case ".json":
            return sum(1 for _ in rows) + (first is not None)
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        lines, last = 0, b"\n"
        if stream.read(64).lstrip().startswith(b"["):  # a list, whose rows may share lines
            return None
        stream.seek(0)
        for last in filter(None, _pieces(stream)):
            lines += last.count(b"\n")
        return lines + (not last.endswith(b"\n"))


def first_rows(file: Path, count: int) -> bytes | None:
    """A file of the same format with only the first `count` rows; None if there are no more rows, or it is unreadable or too large."""
    try:
        if ending(file) == ".parquet":
            return _first_of_parquet(file, count)
        rows = [text_of(row) for _, row in islice(read(file), count + 1)]
    except PedigreeError:
        return None
    if len(rows) <= count:
        return None
    if ending(file) == ".json":
        return f"[{','.join(rows[:count])}]".encode()
    lines = "\n".join(rows[:count]).encode()
    return gzip.compress(lines, mtime=0) if ending(file) == ".jsonl.gz" else lines


def _first_of_parquet(file: Path, count: int) -> bytes | None:
    from pyarrow import BufferOutputStream, Table, parquet

    with _explained(f"{file.name} is not Parquet"), parquet.ParquetFile(file) as opened:
        if opened.metadata.num_rows <= count:
            return None
        rows = Table.from_batches([next(opened.iter_batches(batch_size=count))])
    parquet.write_table(rows, sink := BufferOutputStream())
    return sink.getvalue().to_pybytes()
