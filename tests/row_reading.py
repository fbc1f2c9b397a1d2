"""Rows of a file of evidence, and all rows of a source as `prepare_data` reads them."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pyarrow import Table, parquet

from pedigree.configs.rows.row_sources import DataSource, Files, RecordType, RowSource
from pedigree.configs.rows.suite_forms import Form
from pedigree.data.records import columns, records
from pedigree.data.sources import sources
from pedigree.data.sources.dataset_builder import DatasetBuilder
from pedigree.data.sources.row_files import BadRow
from pedigree.data.sources.sources import OpenSource, Outside


class Loaded(NamedTuple):
    name: str
    rows: list[dict[str, Any]]
    bad: list[BadRow]
    left_out: dict[str, int]


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open() as stream:
        return [json.loads(line) for line in stream]


def write_file(path: Path, rows: Any) -> Path:
    """Rows as JSONL, JSON (any value) or Parquet, by the suffix."""
    if path.suffix == ".parquet":
        parquet.write_table(Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows, indent=1) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_file(
    path: Path, record: RecordType = "conversation", check_verifier: Callable[[Any], None] = lambda verifier: None, **fields: Any
) -> Loaded:
    """The rows of a source of type `files` with these fields."""
    source = Files.model_validate({"type": "files", "path": path.name, **fields})
    outside = Outside(files={path.name: path}, check_verifier=check_verifier)
    return load(source, record, "t" if record == "item" else None, outside)


def load(source: DataSource, record: RecordType, task: str | None, outside: Outside) -> Loaded:
    return _loaded(sources.opened(source, record, task, outside), record, outside)


def load_items(source: RowSource, form: Form, task: str, outside: Outside) -> Loaded:
    return _loaded(sources.opened_items(source, form, task, None, outside), "item", outside)


def _loaded(source: OpenSource, record: RecordType, outside: Outside) -> Loaded:
    with tempfile.TemporaryDirectory() as folder, DatasetBuilder(Path(folder), record, (), 0, outside.check_verifier, 1) as builder:
        list(builder.take(source))
        index = builder.table()
        rows = columns.to_rows(index.table(np.arange(len(index))), records.RECORDS[record]) if len(index) else []
    return Loaded(source.name, rows, builder.taken[0].bad, dict(source.left_out))
