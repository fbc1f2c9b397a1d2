"""Write derived records a file at a time: at most one file of them is in memory, and one block as objects."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from pedigree.data.expectations.validation import facts_of, validate_facts
from pedigree.data.records import columns, records

T = TypeVar("T")


def blocks(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Split items into blocks; `sizes` are the sizes of the rows derived from each."""
    return (items[part] for part in columns.block_cuts(sizes))


class RowWriter:
    """Writes rows into an artifact's payload and collects facts for the expectations."""

    def __init__(self, out: Path, artifact_type: str, check_verifier: Callable[[Any], None]) -> None:
        self._payload, self._type, self._check = out / "payload", artifact_type, check_verifier
        self._facts: list[pa.Table] = []

    def write(self, sizes: Sequence[int], make: Callable[[slice], Iterable[Sequence[Mapping[str, Any]]]]) -> Iterator[int]:
        """Write one row per size, in order, as `records.save` does; yields the number of rows written so far.

        Args:
            sizes: size of each row, see `records.bulk_of`.
            make: returns the rows of a slice, in blocks.
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
        """The verdict on all rows written.

        Raises:
            ValidationError: rows violate an expectation.
        """
        return validate_facts(pa.concat_tables(self._facts), self._type)
