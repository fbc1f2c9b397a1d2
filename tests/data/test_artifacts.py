import os
import tracemalloc

import pytest
from row_reading import read_rows

from pedigree.data.artifacts.artifacts import ArtifactError, Record, content_hash, open_artifact, scan, stage_key, write_json, write_rows


def publish(folder, rows):
    """A finished artifact with one data file."""
    write_rows(folder / "payload" / "rows.jsonl", rows)
    files = scan(folder / "payload")
    record = Record(
        kind="pair", version=1, type="preference", config={}, inputs=(), key="0" * 64, content=content_hash(files), files=files, metrics={}
    )
    write_json(folder / "record.json", record.model_dump(mode="json"))
    return record


def test_content_is_the_hash_of_paths_and_bytes_and_nothing_else(tmp_path):
    first = publish(tmp_path / "a", [{"b": 1, "a": 2}])
    payload = tmp_path / "a" / "payload"
    os.utime(payload / "rows.jsonl", (0, 0))
    assert publish(tmp_path / "b", [{"a": 2, "b": 1}]).content == first.content
    assert publish(tmp_path / "c", [{"a": 2, "b": 3}]).content != first.content
    (payload / "rows.jsonl").rename(payload / "lines.jsonl")
    assert content_hash(scan(payload)) != first.content


def test_a_flipped_byte_is_found_and_named(tmp_path):
    publish(tmp_path, [{"a": 1}])
    rows = tmp_path / "payload" / "rows.jsonl"
    rows.write_text(rows.read_text().replace("1", "2"))
    open_artifact(tmp_path)  # same size: only a re-hash can tell
    with pytest.raises(ArtifactError, match=r"rows\.jsonl has another sha256"):
        open_artifact(tmp_path, verify=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "record.json").unlink(), "never finished"),
        (lambda folder: (folder / "record.json").write_text('{"schema_version": 1, "kind"'), "run its stage again"),
        (lambda folder: (folder / "payload/rows.jsonl").unlink(), "is missing"),
        (lambda folder: (folder / "payload/rows.jsonl").write_text(""), "has 0 bytes instead of"),
        (lambda folder: (folder / "payload/more.jsonl").write_text("{}"), "is not in the record"),
    ],
)
def test_what_is_half_written_is_refused_without_reading_the_payload(tmp_path, damage, message):
    publish(tmp_path, [{"a": 1}])
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(tmp_path)


def test_a_link_cannot_stand_in_a_payload(tmp_path):
    (tmp_path / "payload").mkdir()
    (tmp_path / "payload" / "outside").symlink_to("/etc/hostname")
    with pytest.raises(ArtifactError, match="not a plain file"):
        scan(tmp_path / "payload")


def test_the_key_knows_ports_labels_contents_and_the_order_within_a_port():
    edges = [("policies", "a", "1"), ("policies", "b", "2")]
    key = stage_key("sample", 1, {"x": 1}, edges, {})
    assert stage_key("sample", 1, {"x": 1}, edges[::-1], {}) != key  # the order within a port counts
    other = ("prompts", "pool", "3")
    assert stage_key("sample", 1, {"x": 1}, [other, *edges], {}) == stage_key("sample", 1, {"x": 1}, [*edges, other], {})
    assert stage_key("sample", 1, {"x": 1}, [("policies", "a", "2"), ("policies", "b", "1")], {}) != key
    assert stage_key("sample", 2, {"x": 1}, edges, {}) != key
    assert stage_key("sample", 1, {"x": 2}, edges, {}) != key
    assert stage_key("sample", 1, {"x": 1}, edges, {"rows.jsonl": "3"}) != key


def test_rows_are_written_as_they_come(tmp_path):
    tracemalloc.start()
    write_rows(tmp_path / "rows.jsonl", ({"b": "x" * 100_000, "a": number} for number in range(200)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000 and (tmp_path / "rows.jsonl").stat().st_size > 20_000_000
    write_rows(tmp_path / "rows.jsonl", iter([{"b": "ä", "a": 1}, {}]))
    assert (tmp_path / "rows.jsonl").read_bytes() == '{"a":1,"b":"ä"}\n{}\n'.encode()


@pytest.mark.parametrize("last", [{"a": "\ud800"}, {"a": float("nan")}, {"a": object()}])
def test_where_a_row_cannot_be_written_the_old_file_stays_alone(tmp_path, last):
    write_rows(tmp_path / "rows.jsonl", [{"a": 1}])
    with pytest.raises((TypeError, ValueError)):
        write_rows(tmp_path / "rows.jsonl", [{"a": 2}, last])
    assert read_rows(tmp_path / "rows.jsonl") == [{"a": 1}] and len(list(tmp_path.iterdir())) == 1
