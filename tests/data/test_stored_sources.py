"""Rows from an object store: pinned to a hash, fetched once, refused when another file lies there; where it lies is no identity."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_store import FaultyStore, emptied, store_in_environment
from pydantic import ValidationError
from row_reading import load

from pedigree.configs.rows.row_sources import Stored
from pedigree.data.artifacts.artifacts import stage_key
from pedigree.data.sources.row_files import READERS
from pedigree.data.sources.sources import Outside, fetched
from pedigree.data.store import storage
from pedigree.data.store.storage import ContentChanged, Missing, StoreError

pytestmark = pytest.mark.integration

ROWS = "".join(json.dumps({"instruction": f"Say {n}.", "output": str(n)}) + "\n" for n in range(20)).encode()
SHA256 = hashlib.sha256(ROWS).hexdigest()


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[FaultyStore]:
    with store_in_environment() as found:
        yield found


@pytest.fixture
def store(server: FaultyStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FaultyStore:
    monkeypatch.setattr(storage, "PAUSES_S", (0.05, 0.05))
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "cache"))
    emptied(server.upstream.geturl(), "bucket")
    server.forget()
    storage.write("s3://bucket/raw/rows.jsonl", ROWS)
    server.requests.clear()
    return server


def stored(**changes: Any) -> Stored:
    return Stored.model_validate({"type": "stored", "name": "sayings", "url": "s3://bucket/raw/rows.jsonl", "sha256": SHA256, **changes})


def test_rows_are_fetched_once_and_then_without_the_network(store, tmp_path):
    first = load(stored(), "conversation", None, Outside())
    assert len(first.rows) == 20 and first.name == "sayings" and first.rows[0]["id"].startswith("sayings-")
    assert (tmp_path / "cache" / "sources" / SHA256 / "sayings.jsonl").read_bytes() == ROWS
    asked = len(store.requests)
    assert asked and load(stored(), "conversation", None, Outside()) == first and len(store.requests) == asked
    file = fetched(stored())
    file.write_bytes(ROWS[:-1] + b"x")
    assert fetched(stored()).read_bytes() == ROWS, "a damaged copy is not fetched again"


def test_where_it_lies_changes_neither_rows_nor_key(store):
    storage.write("s3://bucket/elsewhere/moved.jsonl", ROWS)
    moved = stored(url="s3://bucket/elsewhere/moved.jsonl")
    assert load(moved, "conversation", None, Outside()) == load(stored(), "conversation", None, Outside())

    def key(source: Stored) -> str:
        return stage_key("prepare_data", 1, {"sources": [source.model_dump(mode="json")]}, [], {})

    assert key(moved) == key(stored()) != key(stored(sha256="0" * 64))
    assert stage_key("x", 1, {"url": "a"}, [], {}) != stage_key("x", 1, {"url": "b"}, [], {})  # without a hash it says what


def test_another_file_is_refused_with_both_hashes_and_not_kept(store, tmp_path):
    storage.write("s3://bucket/raw/rows.jsonl", ROWS.replace(b"Say 3", b"Say 4"))
    with pytest.raises(ContentChanged, match=rf"source sayings: .* has sha256 [0-9a-f]{{64}}, not {SHA256}.* or correct `sha256`"):
        load(stored(), "conversation", None, Outside())
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_file_that_is_gone_is_told_with_where_else_it_may_lie(store, tmp_path):
    with pytest.raises(Missing, match=r"source sayings: .*no such object: correct `url`, or put the file with this hash at") as failure:
        fetched(stored(url="s3://bucket/raw/gone.jsonl"))
    place = Path(str(failure.value).rpartition(" at ")[2])
    place.write_bytes(ROWS)
    assert fetched(stored(url="s3://bucket/raw/gone.jsonl")) == place


def test_a_cut_download_leaves_nothing_behind_and_is_tried_again(store, tmp_path):
    store.cut_downloads(100, matching="GET /bucket/raw")
    with pytest.raises(StoreError, match="cannot be reached") as failure:
        fetched(stored())
    assert failure.value.passing and [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    store.forget()
    store.cut_downloads(2, matching="GET /bucket/raw")
    assert fetched(stored()).read_bytes() == ROWS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "s3://id:secret@bucket/rows.jsonl"}, "must not contain credentials"),
        ({"url": "file:///rows.jsonl"}, "is not s3://BUCKET/KEY"),
        ({"url": "s3://bucket/rows.csv"}, "unknown format"),
        ({"sha256": "abc"}, "sha256"),
        ({"sha256": None}, "sha256"),
        ({"name": "A b"}, "name"),
    ],
)
def test_mistakes_are_found_when_the_recipe_is_read(changes, message):
    with pytest.raises(ValidationError, match=message):
        stored(**changes)


def test_a_file_that_can_be_named_can_be_read():
    for suffix in READERS:
        assert stored(url=f"s3://bucket/rows{suffix}")
