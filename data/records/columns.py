"""Rows in columns: Arrow in memory, Parquet on disk. The only door to pyarrow for what stages exchange.

A record's fields (`data/records/records.py`) decide its schema: texts, numbers, lists and structs are columns of their own type, a mapping
whose keys are data (a verifier's arguments, scores by name) is a column of JSON. A field that need not be there is null where it is absent.
`datasets.load_dataset("parquet", data_files=...)` opens the files as they are.

Files are cut by the rows alone, so equal rows are equal bytes, whoever wrote them and in whatever batches. They are not equal between
versions of pyarrow, which Parquet names in each file.
"""

import json
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NotRequired, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

import pyarrow as pa
from pyarrow import parquet

from configs.base.frozen import canonical_json
from configs.base.problems import PedigreeError
from data.host.faults import fault_point
from data.store.durable import sync_folder
from data.store.untrusted import RESTORE, ArtifactError

ROWS_PER_FILE = 1 << 15
CHARACTERS_PER_FILE = 1 << 28
"""A file ends with the row that reaches either."""
ROWS_PER_GROUP = 1 << 10
CHARACTERS_PER_GROUP = 1 << 24
"""The same for what is read at once."""
BLOCK = 1 << 10
CHARACTERS_PER_BLOCK = 1 << 24
"""Rows that are objects at the same time, on their way into columns: they end with the row that reaches either."""
GROUP_BYTES = 4 << 30
"""What is said to be larger than so many bytes in memory is not read: a row has at most a few times its characters."""
RECORD = b"pedigree.record"
"""Where a file's schema names the type of its rows."""
PLAIN: dict[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
JSON = pa.json_(pa.string())


class NotColumnar(PedigreeError):
    """Rows that the columns of their type cannot hold."""


def schema_of(record: type, fields: Sequence[str] | None = None) -> pa.Schema:
    """The columns of a type of record, a `TypedDict`; of `fields` those that it has."""
    schema = _schema(record)
    if fields is not None:
        schema = pa.schema([field for field in schema if field.name in fields])
    return schema.with_metadata({RECORD: record.__name__.lower().encode()})


@cache
def _schema(record: type) -> pa.Schema:
    return pa.schema(_fields(record))


def _fields(record: type) -> list[pa.Field]:
    hints = get_type_hints(record, include_extras=True)
    return [pa.field(name, _type(hint)) for name, hint in hints.items()]


@cache
def _optional(record: type) -> frozenset[str]:
    """Fields that need not be there."""
    hints = get_type_hints(record, include_extras=True)
    return frozenset(name for name, hint in hints.items() if get_origin(hint) is NotRequired)


def _type(hint: Any) -> pa.DataType:
    arguments = [argument for argument in get_args(hint) if argument is not types.NoneType]
    match get_origin(hint):
        case origin if origin is NotRequired or origin is Union or origin is types.UnionType:
            return _type(arguments[0])
        case origin if origin is list:
            return pa.list_(pa.field("element", _type(arguments[0])))  # as Parquet calls it: the same schema before and after
        case origin if origin is dict:
            return JSON
        case origin if origin is Literal:
            return pa.string()
        case _:
            return pa.struct(_fields(hint)) if is_typeddict(hint) else PLAIN[hint]


@cache
def _structs(record: type) -> dict[str, type]:
    """Columns that are lists of structs → the type of those."""
    found = {}
    for name, hint in get_type_hints(record).items():
        if get_origin(hint) is list and is_typeddict(inner := get_args(hint)[0]):
            found[name] = inner
    return found


# --- rows and columns --------------------------------------------------------------------------------------------------


def to_table(rows: Sequence[Mapping[str, Any]], record: type) -> pa.Table:
    """Rows in columns.

    Raises:
        NotColumnar: a field that the type does not have, or a value of another kind.
    """
    schema = schema_of(record)
    _refuse_others(rows, schema.names, record.__name__)
    for name, inner in _structs(record).items():
        _refuse_others([item for row in rows for item in row[name]], [field.name for field in _fields(inner)], f"{record.__name__}.{name}")
    try:
        return pa.Table.from_arrays([_column(rows, field) for field in schema], schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError) as error:
        raise NotColumnar(f"a row of type {record.__name__} holds what its columns cannot: {error}") from error


def _column(rows: Sequence[Mapping[str, Any]], field: pa.Field) -> pa.Array:
    values = [row.get(field.name) for row in rows]
    if field.type != JSON:
        return pa.array(values, field.type)
    texts = pa.array([None if value is None else canonical_json(value) for value in values], pa.string())
    return pa.ExtensionArray.from_storage(JSON, texts)


def _refuse_others(items: Iterable[Mapping[str, Any]], names: Sequence[str], of: str) -> None:
    others = set[str]().union(*items) - set(names)
    if others:
        raise NotColumnar(f"{of} has no field {', '.join(sorted(others))}: it has {', '.join(names)}")


def to_rows(table: pa.Table, record: type) -> list[dict[str, Any]]:
    """The rows of a table; a field that need not be there, and is null, is left out."""
    structs = _structs(record)
    found = {name: table[name] for name in table.schema.names}
    values = {name: _items(column, structs[name]) if name in structs else _values(column) for name, column in found.items()}
    return _zipped(values, {name: found[name].null_count for name in found}, _optional(record), len(table))


def _values(column: pa.ChunkedArray) -> list[Any]:
    if column.type != JSON:
        return column.to_pylist()
    return [None if text is None else json.loads(text) for text in column.cast(pa.string()).to_pylist()]


def _items(column: pa.ChunkedArray, record: type) -> list[list[dict[str, Any]]]:
    """A column of lists of structs. Field by field takes half of the time that `to_pylist` does."""
    lists = cast(pa.ListArray, column.combine_chunks())
    flat = cast(pa.StructArray, lists.flatten())
    found = {field.name: flat.field(field.name) for field in lists.type.value_type}
    values = {name: column.to_pylist() for name, column in found.items()}
    items = iter(_zipped(values, {name: column.null_count for name, column in found.items()}, _optional(record), len(flat)))
    return [list(islice(items, length)) for length in lists.value_lengths().to_pylist()]


def _zipped(values: Mapping[str, list[Any]], nulls: Mapping[str, int], optional: frozenset[str], count: int) -> list[dict[str, Any]]:
    """Columns as mappings; fields that need not be there are left out where they are null, the wholly absent ones before all else."""
    names = [name for name in values if name not in optional or nulls[name] < count]
    lacking = [name for name in names if name in optional and nulls[name]]
    rows = [dict(zip(names, given, strict=True)) for given in zip(*(values[name] for name in names), strict=True)]
    for name in lacking:
        for row in rows:
            if row[name] is None:
                del row[name]
    return rows


# --- files -------------------------------------------------------------------------------------------------------------


def cuts(sizes: Sequence[int], rows: int, characters: int) -> list[slice]:
    """Consecutive runs of at most so many rows, each ended by the row with which its characters reach the bound.

    Example: sizes 5 5 5 9 1 with 3 rows or 10 characters → rows 0–1, 2–3, 4.
    """
    found, start, held = [], 0, 0
    for place, size in enumerate(sizes):
        held += size
        if held >= characters or place + 1 - start == rows:
            found.append(slice(start, place + 1))
            start, held = place + 1, 0
    return [*found, slice(start, len(sizes))] if start < len(sizes) else found


def file_cuts(sizes: Sequence[int]) -> list[slice]:
    """Which rows lie in which file, by the characters of each."""
    return cuts(sizes, ROWS_PER_FILE, CHARACTERS_PER_FILE)


def block_cuts(sizes: Sequence[int]) -> list[slice]:
    """Which rows are objects at the same time, by the characters of each."""
    return cuts(sizes, BLOCK, CHARACTERS_PER_BLOCK)


def in_files(
    rows: Iterable[Mapping[str, Any]], record: type, bulk_of: Callable[[Mapping[str, Any]], int]
) -> Iterator[tuple[pa.Table, list[int]]]:
    """Rows as they come, in columns: those of one file after the other, and the characters of each.

    Raises:
        NotColumnar: see `to_table`.
    """
    block: list[Mapping[str, Any]] = []
    tables: list[pa.Table] = []
    sizes: list[int] = []
    held = in_block = 0
    for row in rows:
        block.append(row)
        sizes.append(bulk_of(row))
        held += sizes[-1]
        in_block += sizes[-1]
        full = held >= CHARACTERS_PER_FILE or len(sizes) == ROWS_PER_FILE
        if full or len(block) == BLOCK or in_block >= CHARACTERS_PER_BLOCK:
            tables.append(to_table(block, record))
            block, in_block = [], 0
        if full:
            yield pa.concat_tables(tables).combine_chunks(), sizes
            tables, sizes, held = [], [], 0
    if sizes:
        yield pa.concat_tables([*tables, to_table(block, record)]).combine_chunks(), sizes


def write(path: Path, table: pa.Table, sizes: Sequence[int]) -> None:
    """Writes the rows of one file, so that a reader sees all of it or nothing, also after a power cut.

    Args:
        path: `….parquet`.
        table: of one type, see `schema_of`.
        sizes: characters of each row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    texts = [field.name for field in table.schema if field.name == "source"]
    with temporary.open("wb") as stream:
        options: dict[str, Any] = {"compression": "zstd", "use_dictionary": texts, "write_statistics": False, "store_schema": True}
        with parquet.ParquetWriter(stream, table.schema, **options) as writer:
            for group in cuts(sizes, ROWS_PER_GROUP, CHARACTERS_PER_GROUP):
                rows = table.slice(group.start, group.stop - group.start)
                writer.write_table(rows, row_group_size=ROWS_PER_GROUP)
        stream.flush()
        os.fsync(stream.fileno())
    fault_point("rows written")
    os.replace(temporary, path)
    sync_folder(path.parent)


def read(source: Path | BinaryIO, name: str, fields: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The rows of a file, as many at a time as were written together.

    Args:
        source: the file.
        name: what it is called in errors.
        fields: columns to read, of which those are given that the file has; None: all.

    Raises:
        ArtifactError: it is not Parquet, or would be too large in memory.
    """
    with _told(name), parquet.ParquetFile(source, pre_buffer=False) as file:
        wanted = None if fields is None else [name for name in file.schema_arrow.names if name in fields]
        for number in range(file.num_row_groups):
            yield _group(file, number, name, wanted)


def read_group(source: Path, number: int) -> pa.Table:
    """Those rows of a file that were written together. Raises what `read` does."""
    with _told(source.name), parquet.ParquetFile(source, pre_buffer=False) as file:
        return _group(file, number, source.name)


def _group(file: parquet.ParquetFile, number: int, name: str, fields: list[str] | None = None) -> pa.Table:
    size = file.metadata.row_group(number).total_byte_size
    if size > GROUP_BYTES:
        raise ArtifactError(f"{name} holds {size} bytes that are read at once, more than {GROUP_BYTES}: no Pedigree wrote it")
    return file.read_row_group(number, columns=fields, use_threads=False)


def type_of(table: pa.Table) -> str:
    """The type of rows that a file says it has; empty where it says nothing."""
    return (table.schema.metadata or {}).get(RECORD, b"").decode(errors="replace")


def groups(source: Path) -> list[int]:
    """How many rows were written together, each time."""
    with _told(source.name):
        found = parquet.read_metadata(source)
        return [found.row_group(number).num_rows for number in range(found.num_row_groups)]


def count(source: Path | BinaryIO, name: str) -> int:
    """How many rows a file says that it holds.

    Raises:
        ArtifactError: it is not Parquet.
    """
    with _told(name):
        return parquet.read_metadata(source).num_rows


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; Arrow's own have none
            raise
        raise ArtifactError(f"{name} is no whole Parquet file ({' '.join(str(error).split())[:300]}); {RESTORE}") from error
