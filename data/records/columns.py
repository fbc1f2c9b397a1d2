"""Rows in columns: Arrow in memory, Parquet on disk. All pyarrow I/O of rows exchanged between stages is here.

A record's fields (`data/records/records.py`) define its schema: texts, numbers, lists and structs have columns of their own type, and
mappings with arbitrary keys (a verifier's arguments, scores by name) are JSON columns. Optional fields are null if absent.
`datasets.load_dataset("parquet", data_files=...)` opens the files directly.

Only the rows decide where files end, so equal rows give equal bytes regardless of writer and batch size. Bytes differ between versions of
pyarrow, which Parquet records in each file.
"""

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NotRequired, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

import pyarrow as pa
from pyarrow import parquet

from pedigree.configs.base.frozen import canonical_json
from pedigree.configs.base.problems import PedigreeError
from pedigree.data.host.faults import fault_point
from pedigree.data.store.durable import replacing
from pedigree.data.store.untrusted import RESTORE, ArtifactError

ROWS_PER_FILE = 1 << 15
CHARACTERS_PER_FILE = 1 << 28
"""A file ends with the row that reaches either limit."""
ROWS_PER_GROUP = 1 << 10
CHARACTERS_PER_GROUP = 1 << 24
"""Limits of a row group, the unit of reading."""
BLOCK = 1 << 10
CHARACTERS_PER_BLOCK = 1 << 24
"""Limits of a block, the rows that are Python objects at a time."""
GROUP_BYTES = 4 << 30
"""Maximum declared size of a row group in memory."""
RECORD = b"pedigree.record"
"""Schema metadata key with the type of the rows."""
PLAIN: dict[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
JSON = pa.json_(pa.string())


def schema_of(record: type, fields: Sequence[str] | None = None) -> pa.Schema:
    """The schema of a record type, a `TypedDict`; restricted to `fields` if given."""
    found = [field for field in _fields(record) if fields is None or field.name in fields]
    return pa.schema(found, {RECORD: record.__name__.lower().encode()})


@cache
def _fields(record: type) -> list[pa.Field]:
    hints = get_type_hints(record, include_extras=True)
    return [pa.field(name, _type(hint)) for name, hint in hints.items()]


@cache
def _optional(record: type) -> frozenset[str]:
    """Optional fields."""
    hints = get_type_hints(record, include_extras=True)
    return frozenset(name for name, hint in hints.items() if get_origin(hint) is NotRequired)


def _type(hint: Any) -> pa.DataType:
    arguments = [argument for argument in get_args(hint) if argument is not types.NoneType]
    match get_origin(hint):
        case origin if origin is NotRequired or origin is Union or origin is types.UnionType:
            return _type(arguments[0])
        case origin if origin is list:
            return pa.list_(pa.field("element", _type(arguments[0])))  # Parquet's name, so that the schema survives a round trip
        case origin if origin is dict:
            return JSON
        case origin if origin is Literal:
            return pa.string()
        case _:
            return pa.struct(_fields(hint)) if is_typeddict(hint) else PLAIN[hint]


@cache
def _structs(record: type) -> dict[str, type]:
    """Columns that are lists of structs → type of the struct."""
    hints = get_type_hints(record).items()
    return {name: inner for name, hint in hints if get_origin(hint) is list and is_typeddict(inner := get_args(hint)[0])}


# --- rows and columns --------------------------------------------------------------------------------------------------


def to_table(rows: Sequence[Mapping[str, Any]], record: type) -> pa.Table:
    """Convert rows to columns.

    Raises:
        PedigreeError: a field is unknown, or a value has the wrong type.
    """
    schema = schema_of(record)
    _refuse_others(rows, schema.names, record.__name__)
    for name, inner in _structs(record).items():
        _refuse_others([item for row in rows for item in row[name]], [field.name for field in _fields(inner)], f"{record.__name__}.{name}")
    try:
        return pa.Table.from_arrays([_column(rows, field) for field in schema], schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError) as error:
        raise PedigreeError(f"a row of type {record.__name__} does not fit its columns: {error}") from error


def _column(rows: Sequence[Mapping[str, Any]], field: pa.Field) -> pa.Array:
    values = [row.get(field.name) for row in rows]
    if field.type != JSON:
        return pa.array(values, field.type)
    texts = pa.array([None if value is None else canonical_json(value) for value in values], pa.string())
    return pa.ExtensionArray.from_storage(JSON, texts)


def _refuse_others(items: Iterable[Mapping[str, Any]], names: Sequence[str], of: str) -> None:
    others = set[str]().union(*items) - set(names)
    if others:
        raise PedigreeError(f"{of} has no field {', '.join(sorted(others))}: it has {', '.join(names)}")


def to_rows(table: pa.Table, record: type) -> list[dict[str, Any]]:
    """The rows of a table, without optional fields that are null."""
    structs = _structs(record)
    found = {name: table[name] for name in table.schema.names}
    values = {name: _items(column, structs[name]) if name in structs else _values(column) for name, column in found.items()}
    return _zipped(values, {name: found[name].null_count for name in found}, _optional(record), len(table))


def _values(column: pa.ChunkedArray) -> list[Any]:
    if column.type != JSON:
        return column.to_pylist()
    return [None if text is None else json.loads(text) for text in column.cast(pa.string()).to_pylist()]


def _items(column: pa.ChunkedArray, record: type) -> list[list[dict[str, Any]]]:
    """Convert a column of lists of structs, field by field, twice as fast as `to_pylist`."""
    lists = cast(pa.ListArray, column.combine_chunks())
    flat = cast(pa.StructArray, lists.flatten())
    found = {field.name: flat.field(field.name) for field in lists.type.value_type}
    values = {name: column.to_pylist() for name, column in found.items()}
    items = iter(_zipped(values, {name: column.null_count for name, column in found.items()}, _optional(record), len(flat)))
    return [list(islice(items, length)) for length in lists.value_lengths().to_pylist()]


def _zipped(values: Mapping[str, list[Any]], nulls: Mapping[str, int], optional: frozenset[str], count: int) -> list[dict[str, Any]]:
    """Convert columns to mappings without null optional fields; columns that are all null are skipped first."""
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
    """Split into consecutive runs of at most `rows` rows; a run also ends with the row that reaches `characters`.

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
    """Split rows into files, by the size of each."""
    return cuts(sizes, ROWS_PER_FILE, CHARACTERS_PER_FILE)


def block_cuts(sizes: Sequence[int]) -> list[slice]:
    """Split rows into blocks, by the size of each."""
    return cuts(sizes, BLOCK, CHARACTERS_PER_BLOCK)


def in_files(
    rows: Iterable[Mapping[str, Any]], record: type, bulk_of: Callable[[Mapping[str, Any]], int]
) -> Iterator[tuple[pa.Table, list[int]]]:
    """Convert streamed rows to one table per file; yields (table, size of each row).

    Raises:
        PedigreeError: see `to_table`.
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
    """Write one file of rows of one type, with the size of each, atomically and durably."""
    texts = [field.name for field in table.schema if field.name == "source"]
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": texts, "write_statistics": False, "store_schema": True}
    with replacing(path) as temporary:
        with temporary.open("wb") as stream, parquet.ParquetWriter(stream, table.schema, **options) as writer:
            for group in cuts(sizes, ROWS_PER_GROUP, CHARACTERS_PER_GROUP):
                rows = table.slice(group.start, group.stop - group.start)
                writer.write_table(rows, row_group_size=ROWS_PER_GROUP)
        fault_point("rows written")


def read(source: Path | BinaryIO, name: str, fields: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Iterate over the row groups of a file: those of `fields` that exist, or all columns. `name` is its name in messages.

    Raises:
        ArtifactError: it is not Parquet, or a row group is too large for memory.
    """
    with _explained(name), parquet.ParquetFile(source, pre_buffer=False) as file:
        wanted = None if fields is None else [name for name in file.schema_arrow.names if name in fields]
        for number in range(file.num_row_groups):
            yield _group(file, number, name, wanted)


def read_group(source: Path, number: int) -> pa.Table:
    """Read one row group. Raises as `read`."""
    with _explained(source.name), parquet.ParquetFile(source, pre_buffer=False) as file:
        return _group(file, number, source.name)


def _group(file: parquet.ParquetFile, number: int, name: str, fields: list[str] | None = None) -> pa.Table:
    size = file.metadata.row_group(number).total_byte_size
    if size > GROUP_BYTES:
        raise ArtifactError(f"{name} has a row group that is too large ({size} > {GROUP_BYTES} bytes) to be a Pedigree file")
    return file.read_row_group(number, columns=fields, use_threads=False)


def type_of(table: pa.Table) -> str:
    """The type of rows in a file's metadata; empty if missing."""
    return (table.schema.metadata or {}).get(RECORD, b"").decode(errors="replace")


def groups(source: Path) -> list[int]:
    """Number of rows of each row group, from the file's metadata.

    Raises:
        ArtifactError: it is not Parquet.
    """
    with _explained(source.name):
        found = parquet.read_metadata(source)
        return [found.row_group(number).num_rows for number in range(found.num_row_groups)]


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a disk error; Arrow's own errors have no errno
            raise
        raise ArtifactError(f"{name} is not a complete Parquet file ({' '.join(str(error).split())[:300]}); {RESTORE}") from error
