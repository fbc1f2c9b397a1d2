"""Records that a stage makes of others, written a file at a time: no more of them are in memory at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from data import columns, records
from data.expectations import facts_of, hold


class MadeRows:
    """Rows on their way into an artifact's payload, and what the expectations look at."""

    def __init__(self, out: Path, artifact_type: str, check_verifier: Callable[[Any], None]) -> None:
        self._payload, self._type, self._check = out / "payload", artifact_type, check_verifier
        self._facts: list[pa.Table] = []

    def write(self, sizes: Sequence[int], make: Callable[[slice], Sequence[Mapping[str, Any]]]) -> Iterator[int]:
        """Writes as many rows as there are sizes, in their order, as `records.save` would; yields how many are written so far.

        Args:
            sizes: characters of each, see `records.size_of`.
            make: gives the rows of a part of them.
        """
        parts = columns.file_cuts(sizes)
        for number, part in enumerate(parts):
            rows = [dict(row) for row in make(part)]
            self._facts.append(facts_of(rows, self._type, self._check))
            table = columns.to_table(rows, records.RECORDS[self._type])
            columns.write(self._payload / records.file_name(number), table, sizes[part])
            yield part.stop
        records.remove_others(self._payload, len(parts))

    def verdict(self) -> dict[str, Any]:
        """What the expectations say of all of them.

        Raises:
            ValidationError: rows break one.
        """
        return hold(pa.concat_tables(self._facts), self._type)
