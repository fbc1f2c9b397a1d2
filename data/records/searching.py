"""Search an artifact's rows by row group, in several processes, without loading them all."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.host.parallel import mapped
from pedigree.data.records import records
from pedigree.data.records.scattered import Scattered

MANY = 10_000
"""Number of rows from which several processes are used."""
Found = TypeVar("Found")


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
