"""Search an artifact's rows by row group, in several processes, without loading them all."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.host.parallel import mapped
from pedigree.data.records import columns, records
from pedigree.data.records.scattered import Scattered

MANY = 10_000
"""Number of rows from which several processes are used."""
Found = TypeVar("Found")


class Group(NamedTuple):
    """A row group."""

    file: int
    """Index of its file."""
    number: int
    """Index in the file."""
    place: int
    """Position of its first row."""
    line: int
    """Index of its first row in the file."""
    rows: int


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
    files = [data.payload / name for name in records.row_files(path.name for path in data.payload.iterdir())]
    groups, record = _groups(files), records.RECORDS[data.type]
    total = sum(group.rows for group in groups)

    def look_at(group: Group) -> tuple[Found, list[int]]:
        rows = columns.to_rows(columns.read_group(files[group.file], group.number), record)
        return look(group.place, rows), [records.bulk_of(row) for row in rows]

    workers = processes if total >= MANY else 1
    if workers > 1:
        ready()
    found, sizes = [], []
    for group, (one, some) in zip(groups, mapped(look_at, groups, workers), strict=True):
        found.append(one)
        sizes += some
        report(group.place + group.rows, total)
    scattered = Scattered(
        files=files,
        file=np.repeat([group.file for group in groups], [group.rows for group in groups]),
        line=np.concatenate([np.arange(group.line, group.line + group.rows) for group in groups]),
        sizes=np.array(sizes),
    )
    return found, scattered


def _groups(files: Sequence[Path]) -> list[Group]:
    found, place = [], 0
    for number, file in enumerate(files):
        line = 0
        for group, rows in enumerate(columns.groups(file)):
            found.append(Group(number, group, place, line, rows))
            place, line = place + rows, line + rows
    return found
