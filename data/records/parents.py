"""The rows from which rows were made, by id, in `evidence/parents.parquet`.

They are not in the payload, so that its bytes are those of earlier versions.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import pyarrow as pa
from pyarrow.compute import call_function

from pedigree.data.artifacts.artifacts import ArtifactError
from pedigree.data.records import columns
from pedigree.data.store.untrusted import RESTORE

FILE = "parents.parquet"


class Parents(TypedDict):
    """A row that was made from others."""

    id: str
    parents: list[str]
    """Ids of rows of the stage's inputs."""


def write(evidence: Path, parents: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Name the rows from which each row was made, for `pedigree trace` and `pedigree forget`: (id of a row, ids of input rows). Rows that
    keep their id need no entry."""
    rows = ({"id": name, "parents": list(of)} for name, of in parents)
    parts = [*columns.in_files(rows, Parents, lambda row: sum(map(len, (row["id"], *row["parents"]))))]
    table = pa.concat_tables([columns.to_table([], Parents), *(table for table, _ in parts)]).combine_chunks()
    columns.write(evidence / FILE, table, [size for _, sizes in parts for size in sizes])


def named(evidence: Path) -> bool:
    """Whether an artifact names the parents of its rows."""
    return (evidence / FILE).is_file()


def read(evidence: Path) -> Iterator[tuple[str, list[str]]]:
    """(row, its parents) from the evidence of an untrusted artifact that names them.

    Raises:
        ArtifactError: the file is damaged.
    """
    for table in columns.read(evidence / FILE, FILE):
        if table.schema != columns.schema_of(Parents):
            raise ArtifactError(f"{FILE} does not have this version's columns; {RESTORE}")
        ids, lists = table["id"], table["parents"]
        if any(column.null_count for column in (ids, lists, call_function("list_flatten", [lists]))):
            raise ArtifactError(f"{FILE} lacks ids; {RESTORE}")
        try:
            found = list(zip(ids.to_pylist(), lists.to_pylist(), strict=True))
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{FILE} has an id that is not UTF-8; {RESTORE}") from error
        yield from found
