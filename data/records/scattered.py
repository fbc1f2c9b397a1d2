"""Rows addressed by position across many files: read in any order, searched and rewritten by several processes."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.host.parallel import mapped
from pedigree.data.records import columns, records

Numbers = NDArray[np.integer[Any]]
Lookup = Callable[[Iterable[int]], dict[int, dict[str, Any]]]
Found = TypeVar("Found")
MANY = 10_000
"""Number of rows from which a search uses several processes."""


@dataclass(frozen=True)
class Scattered:
    """Rows of one type. Arrays are indexed by position."""

    files: Sequence[Path]
    """`.arrow` or `.parquet` files."""
    file: Numbers
    """Index of each row's file."""
    line: Numbers
    """Index of each row in its file."""
    sizes: Numbers
    """Size of each row (`records.bulk_of`), by which files are cut."""

    @classmethod
    def of(cls, artifact: Artifact, sizes: Sequence[int]) -> "Scattered":
        """An artifact's rows, with the size of each."""
        files = records.files(artifact.payload)
        counts = [records.count(file) for file in files]
        lines = np.concatenate([np.arange(count) for count in counts])
        return cls(files, np.repeat(np.arange(len(files)), counts), lines, np.asarray(sizes, np.int64))

    def concat(self, other: "Scattered") -> "Scattered":
        """These rows followed by others of the same type."""
        return Scattered(
            files=[*self.files, *other.files],
            file=np.concatenate([self.file, other.file + len(self.files)]),
            line=np.concatenate([self.line, other.line]),
            sizes=np.concatenate([self.sizes, other.sizes]),
        )

    def table(self, places: Numbers, fields: Sequence[str] | None = None) -> pa.Table:
        """The rows at these positions, in that order, with those of `fields` that exist (None: all). Reads each file at most once."""
        by_file = np.argsort(self.file[places], kind="stable")
        inverse = np.empty(len(places), np.int64)
        inverse[by_file] = np.arange(len(places))
        files, starts = np.unique(self.file[places][by_file], return_index=True)
        parts = np.split(self.line[places][by_file], starts[1:])
        found = [_read(self.files[file], fields).take(pa.array(lines)) for file, lines in zip(files.tolist(), parts, strict=True)]
        return pa.concat_tables(found).combine_chunks().take(pa.array(inverse))

    def lookup(self, places: Iterable[int], record: type, fields: Sequence[str] | None = None) -> Lookup:
        """Read the rows at these positions, each file once, and keep them in columns; the result gives some of them as position → row."""
        held = np.unique(np.fromiter(places, np.int64))
        table = self.table(held, fields)

        def rows(places: Iterable[int]) -> dict[int, dict[str, Any]]:
            wanted = np.unique(np.fromiter(places, np.int64))
            found = columns.to_rows(table.take(pa.array(np.searchsorted(held, wanted))), record)
            return dict(zip(wanted.tolist(), found, strict=True))

        return rows

    def write(
        self, payload: Path, places: Numbers, workers: int, change: Callable[[pa.Table, Numbers], pa.Table] = lambda rows, places: rows
    ) -> Iterator[int]:
        """Write the rows at these positions, in that order, as a payload, by `workers` processes; yields the number of rows written after
        each file. `change` transforms (rows, their positions) before writing."""
        sizes = self.sizes[places].tolist()
        parts = columns.file_cuts(sizes)

        def write(number: int) -> int:
            part = parts[number]
            rows = change(self.table(places[part]), places[part])
            columns.write(payload / records.file_name(number), rows, sizes[part])
            return part.stop

        yield from mapped(write, range(len(parts)), workers if len(parts) > 1 else 1)
        records.remove_others(payload, len(parts))


def _read(path: Path, fields: Sequence[str] | None) -> pa.Table:
    if path.suffix == ".parquet":
        return pa.concat_tables(list(columns.read(path, path.name, fields)))
    with pa.memory_map(os.fspath(path)) as source:  # only the rows taken are read
        table = pa.ipc.open_file(source).read_all()
    return table if fields is None else table.select([name for name in table.schema.names if name in fields])


def search(
    data: Artifact,
    look: Callable[[int, Sequence[dict[str, Any]]], Found],
    processes: int,
    report: Callable[[int, int], None],
    ready: Callable[[], None] = lambda: None,
) -> tuple[list[Found], Scattered]:
    """Apply `look` to each row group; returns (results, rows by position), independent of the number of processes.

    Args:
        data: the rows, in columns.
        look: called with the position of a group's first row, and the group's rows.
        processes: maximum number of processes.
        report: called with the number of rows done and the total.
        ready: called before processes are forked, for work that each of them would otherwise repeat.
    """
    groups = records.groups(data)
    ends = list(accumulate(group.rows for group in groups))

    def look_at(number: int) -> tuple[Found, list[int]]:
        rows = groups[number].read()
        return look(ends[number] - len(rows), rows), [records.bulk_of(row) for row in rows]

    workers = processes if ends[-1] >= MANY else 1
    if workers > 1:
        ready()
    found, sizes = [], []
    for end, (one, some) in zip(ends, mapped(look_at, range(len(groups)), workers), strict=True):
        found.append(one)
        sizes += some
        report(end, ends[-1])
    return found, Scattered.of(data, sizes)
