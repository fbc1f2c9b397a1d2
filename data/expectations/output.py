"""Records that a stage makes of others, written a file at a time: no more of them are in memory at once, and as objects only a block."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from data.expectations.validation import facts_of, hold
from data.records import columns, records

T = TypeVar("T")


def blocks(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Items of which rows are made together; `sizes` are the characters of what is made of each."""
    return (items[part] for part in columns.block_cuts(sizes))


class RowWriter:
    """Rows on their way into an artifact's payload, and what the expectations look at."""

    def __init__(self, out: Path, artifact_type: str, check_verifier: Callable[[Any], None]) -> None:
        self._payload, self._type, self._check = out / "payload", artifact_type, check_verifier
        self._facts: list[pa.Table] = []

    def write(self, sizes: Sequence[int], make: Callable[[slice], Iterable[Sequence[Mapping[str, Any]]]]) -> Iterator[int]:
        """Writes as many rows as there are sizes, in their order, as `records.save` would; yields how many are written so far.

        Args:
            sizes: characters of each, see `records.bulk_of`.
            make: gives the rows of a part of them, in blocks.
        """
        parts = columns.file_cuts(sizes)
        for number, part in enumerate(parts):
            tables = [self._table([dict(row) for row in block]) for block in make(part)]
            columns.write(self._payload / records.file_name(number), pa.concat_tables(tables).combine_chunks(), sizes[part])
            yield part.stop
        records.remove_others(self._payload, len(parts))

    def _table(self, rows: list[dict[str, Any]]) -> pa.Table:
        self._facts.append(facts_of(rows, self._type, self._check))
        return columns.to_table(rows, records.RECORDS[self._type])

    def verdict(self) -> dict[str, Any]:
        """What the expectations say of all of them.

        Raises:
            ValidationError: rows break one.
        """
        return hold(pa.concat_tables(self._facts), self._type)
