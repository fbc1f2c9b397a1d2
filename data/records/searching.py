"""Rows of an artifact looked at in groups, those that were written together, by many processes; never all of them in memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data.artifacts.artifacts import Artifact
from data.host.parallel import mapped
from data.records import columns, records
from data.records.scattered import Scattered

MANY = 10_000
"""So many rows are worth further processes."""
Found = TypeVar("Found")


class Group(NamedTuple):
    """Rows of a file that were written together."""

    file: int
    """Its number."""
    number: int
    """In the file."""
    place: int
    """Of its first row."""
    line: int
    """Of its first row in the file."""
    rows: int


def search(
    data: Artifact,
    look: Callable[[int, Sequence[dict[str, Any]]], Found],
    processes: int,
    told: Callable[[int, int], None],
    ready: Callable[[], None] = lambda: None,
) -> tuple[list[Found], Scattered]:
    """What is found in each group of rows, and where the rows lie; the same for any number of processes.

    Args:
        data: the rows, in columns.
        look: is given the place of the first row of a group, and its rows.
        processes: at most.
        told: of how many rows are done, and of how many there are.
        ready: called before there are further processes, for what they would each do by themselves.
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
        told(group.place + group.rows, total)
    lies = Scattered(
        files=files,
        file=np.repeat([group.file for group in groups], [group.rows for group in groups]),
        line=np.concatenate([np.arange(group.line, group.line + group.rows) for group in groups]),
        sizes=np.array(sizes),
    )
    return found, lies


def _groups(files: Sequence[Path]) -> list[Group]:
    found, place = [], 0
    for number, file in enumerate(files):
        line = 0
        for group, rows in enumerate(columns.groups(file)):
            found.append(Group(number, group, place, line, rows))
            place, line = place + rows, line + rows
    return found
