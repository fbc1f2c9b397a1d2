"""Rows that lie in many files, each known by a place: to be read together in any order, and written anew by many processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.host.parallel import mapped
from data.records import columns, records

Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Scattered:
    """Rows of one type. Arrays are by place."""

    files: Sequence[Path]
    """`.arrow` or `.parquet`."""
    file: Numbers
    """Number of the file that a row lies in,"""
    line: Numbers
    """and its number there."""
    sizes: Numbers
    """Characters of each row, see `records.bulk_of`: what files are cut by."""

    def beside(self, other: "Scattered") -> "Scattered":
        """These rows, and others of the same type after them."""
        return Scattered(
            files=[*self.files, *other.files],
            file=np.concatenate([self.file, other.file + len(self.files)]),
            line=np.concatenate([self.line, other.line]),
            sizes=np.concatenate([self.sizes, other.sizes]),
        )

    def table(self, places: Numbers, fields: Sequence[str] | None = None) -> pa.Table:
        """The rows at some places, in that order, of `fields` those that they have (None: all). Each file is read at most once."""
        by_file = np.argsort(self.file[places], kind="stable")
        inverse = np.empty(len(places), np.int64)
        inverse[by_file] = np.arange(len(places))
        files, starts = np.unique(self.file[places][by_file], return_index=True)
        parts = np.split(self.line[places][by_file], starts[1:])
        found = [_read(self.files[file], fields).take(pa.array(lines)) for file, lines in zip(files.tolist(), parts, strict=True)]
        return pa.concat_tables(found).combine_chunks().take(pa.array(inverse))

    def write(
        self, payload: Path, places: Numbers, workers: int, change: Callable[[pa.Table, Numbers], pa.Table] = lambda rows, places: rows
    ) -> Iterator[int]:
        """Writes the rows at some places, in that order, as an artifact's payload; yields how many are written, file after file.

        Args:
            payload: folder.
            places: of the rows.
            workers: processes.
            change: makes what is written of the rows at some places.
        """
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
    with pa.memory_map(os.fspath(path)) as source:  # what is not taken is not read
        table = pa.ipc.open_file(source).read_all()
    return table if fields is None else table.select([name for name in table.schema.names if name in fields])
