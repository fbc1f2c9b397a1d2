"""Write derived records as a stage's payload and validate them against the expectations of their type.

At most one file of them is in memory, and one block as objects.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.expectations.validation import facts_of, validate_facts
from pedigree.data.records import columns, records
from pedigree.data.records.scattered import Lookup
from pedigree.stages.job.job import Job
from pedigree.stages.verifiers import check

T = TypeVar("T")
Row = Mapping[str, Any]


def written(
    job: Job,
    artifact_type: str,
    items: Sequence[T],
    sizes: Sequence[int],
    read: Callable[[Iterable[int]], Lookup],
    places_of: Callable[[T], Iterable[int]],
    row_of: Callable[[T, Mapping[int, Row]], Row],
) -> dict[str, Any]:
    """Write the payload, in the files of `records.save`, and `validation.json`; return the verdict of the expectations.

    Args:
        job: the stage's job.
        artifact_type: type of the rows.
        items: what the rows are made of, one for each.
        sizes: size of each row, see `records.bulk_of`.
        read: reads the rows at given positions, see `Scattered.lookup`.
        places_of: the positions that an item needs.
        row_of: makes the row of an item, from position → row.

    Raises:
        ValidationError: rows violate an expectation.
    """
    payload, facts, parts = job.out / "payload", [], columns.file_cuts(sizes)
    for number, part in enumerate(parts):
        lookup, tables = read(place for one in items[part] for place in places_of(one)), []
        for cut in columns.block_cuts(sizes[part]):
            block = items[part][cut]
            found = lookup(place for one in block for place in places_of(one))
            rows = [dict(row_of(one, found)) for one in block]
            facts.append(facts_of(rows, artifact_type, check))
            tables.append(columns.to_table(rows, records.RECORDS[artifact_type]))
        columns.write(payload / records.file_name(number), pa.concat_tables(tables).combine_chunks(), sizes[part])
        del lookup, tables  # before the next file is read
        job.doing("writing rows", part.stop, len(sizes), "rows")
    records.remove_others(payload, len(parts))
    with job.busy("checking rows"):
        verdict = validate_facts(pa.concat_tables(facts), artifact_type)
    write_json(job.evidence / "validation.json", verdict)
    return verdict
