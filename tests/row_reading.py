"""Rows of a file of evidence, and all rows of a source as `prepare_data` reads them."""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pedigree.configs.rows.row_sources import DataSource, RecordType, RowSource
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
