"""Files of rows that are damaged, of another form, or larger than what is held: each is told by name and place, or read in bounds."""

import errno
import gzip
import os
import pickle
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import Array, Table, parquet, py_buffer
from row_reading import load_file
from waiting import deadline

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.sources import row_files
from pedigree.data.sources.named_columns import SelectedRow
from pedigree.data.sources.row_files import Unreadable

GOOD = b'{"prompt": "a", "completion": "b"}'


def places(path: Path) -> list[str]:
    return [place for place, _ in row_files.read(path)]


@pytest.mark.parametrize("size", [20, 1 << 22])
def test_a_line_that_is_not_utf8_is_a_bad_row_among_good_ones(tmp_path, monkeypatch, size):
    monkeypatch.setattr(row_files, "BLOCK_BYTES", size)
    (tmp_path / "x.jsonl").write_bytes(b"\n".join([GOOD, b'{"prompt": "\xff"}', b"", GOOD, "\u2028".encode(), GOOD]))
    found = dict(row_files.read(tmp_path / "x.jsonl"))
    bad = found.pop("x.jsonl:2")
    assert bad == Unreadable('{"prompt": "\\xff"}', "is not UTF-8: byte 0xff at 12: invalid start byte")
    assert list(found) == ["x.jsonl:1", "x.jsonl:4", "x.jsonl:6"]
    loaded = load_file(tmp_path / "x.jsonl", max_bad_rows=1)
    assert len(loaded.rows) == 3 and [one.place for one in loaded.bad] == ["x.jsonl:2"]


def packed(file: Path, data: bytes) -> Path:
    file.write_bytes(gzip.compress(data, 1) if file.suffix == ".gz" else data)
    return file


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("size", [7, 64, 1000])
def test_a_line_without_end_is_refused_wherever_blocks_end(tmp_path, monkeypatch, name, size):
    monkeypatch.setattr(row_files, "BLOCK_BYTES", size)
    monkeypatch.setattr(row_files, "LONGEST_LINE", 1000)
    longest = b'"' + b"x" * 998 + b'"'
    assert places(packed(tmp_path / name, b"1\n" + longest + b"\n" + longest)) == [f"{name}:{number}" for number in (1, 2, 3)]
    for end in (b"", b"\n2"):
        file = packed(tmp_path / name, b"1\n" + longest + b" " + end)
        with pytest.raises(PedigreeError, match=rf"^{name}:2 has more than 1000 bytes: JSONL has one row per line.*`jq -c '\.\[\]'`"):
            list(row_files.read(file))


def test_a_long_line_is_put_together_once(tmp_path, monkeypatch):
    """Copied with every piece that is read it would be 550 GB."""
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 64)
    file = packed(tmp_path / "x.jsonl", b'"' + b"x" * (8 << 20) + b'"')
    begun = time.process_time()
    assert places(file) == ["x.jsonl:1"] and time.process_time() - begun < deadline(5)


def flipped(file: Path) -> None:
    parquet.write_table(Table.from_pylist([{"prompt": f"hello {number}"} for number in range(5000)]), file, compression="zstd")
    data = bytearray(file.read_bytes())
    data[200:400] = b"\xff" * 200
    file.write_bytes(data)


def foreign(file: Path) -> None:
    """A column of texts that are not UTF-8."""
    offsets = pyarrow.array([0, 2, 3], pyarrow.int32()).buffers()[1]
    texts = Array.from_buffers(pyarrow.string(), 2, [None, offsets, py_buffer(b"\xff\xfea")])
    parquet.write_table(pyarrow.table({"prompt": texts}), file)


def twice(file: Path) -> None:
    parquet.write_table(pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "completion", "prompt"]), file)


def headless(file: Path) -> None:
    flipped(file)
    data = bytearray(file.read_bytes())
    data[-60:-8] = b"\xff" * 52
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flipped, r"x.parquet: rows from 0 on cannot be read: "),
        (foreign, r"x.parquet: rows 0 to 1 cannot be read: "),
        (twice, r"x.parquet has 2 columns called 'prompt': rename them, or leave all but one out$"),
        (headless, r"x.parquet is not Parquet: "),
    ],
)
def test_damaged_parquet_is_told_by_file_and_rows(tmp_path, damage, says):
    with pytest.raises(FileNotFoundError):  # a disk that fails is no damaged file
        list(row_files.read(tmp_path / "x.parquet"))
    damage(tmp_path / "x.parquet")
    with pytest.raises(PedigreeError, match=f"^{says}"):
        list(row_files.read(tmp_path / "x.parquet"))


def test_what_looks_like_rows_in_a_folder_and_cannot_be_read_is_named(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    others = ("c.csv", "C.TSV", "data-00000-of-00001.arrow", "c.ndjson", "c.csv.gz", "c.jsonl.tmp", "deep/c.parquet.part")
    for beside in ("B.JSONL", "c.jsonl.zst", "c.json.gz", "deep/d.Parquet", "c.parquet.XZ", *others):
        (tmp_path / beside).write_bytes(GOOD)
        with pytest.raises(PedigreeError, match=f"^{tmp_path.name} holds {beside}, which would be left out: rows are read from .* files"):
            list(row_files.read(tmp_path))
        (tmp_path / beside).unlink()


@pytest.mark.parametrize(
    ("name", "remedy"), [("x.csv", "convert it with pandas.read_csv"), ("x.arrow", "load_from_disk"), ("x.ndjson", "rename it to .jsonl")]
)
def test_a_file_in_another_format_is_told_with_what_reads_it(tmp_path, name, remedy):
    (tmp_path / name).write_bytes(GOOD)
    with pytest.raises(PedigreeError, match=rf"^{name}: rows are read from .* files: .*{remedy}"):
        list(row_files.read(tmp_path / name))


def test_what_is_hidden_and_what_is_no_rows_is_left_alone_unless_it_is_what_is_read(tmp_path):
    about = ("README.md", "LICENSE", "_SUCCESS", "picture.png.gz", "deep.jsonl/a.txt", "dataset_infos.json")
    for name in ("._a.jsonl", ".cache/x.jsonl", ".C.JSONL", *about):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x00")
    with pytest.raises(PedigreeError, match=r"holds no \.json, \.jsonl, \.jsonl\.gz, \.parquet file$"):
        places(tmp_path)
    (tmp_path / "deep.jsonl" / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    assert places(tmp_path) == ["b.jsonl:1", "a.jsonl:1"]
    (tmp_path / ".cache" / "x.jsonl").write_bytes(GOOD)
    assert places(tmp_path / ".cache") == ["x.jsonl:1"]


def wide(count: int) -> list[dict]:
    """Rows of some 2,000 bytes, the longer the later."""
    return [
        {"prompt": f"{number}", "completion": [{"role": "assistant", "content": "x" * (40 * number)}], "mark": {"none": None}}
        for number in range(count)
    ]


@pytest.mark.parametrize("dictionary", [True, False])
def test_blocks_of_parquet_are_cut_by_bytes_and_each_travels_alone(tmp_path, monkeypatch, dictionary):
    rows = wide(100)
    parquet.write_table(Table.from_pylist([*rows, *rows]), tmp_path / "x.parquet", use_dictionary=dictionary, row_group_size=150)
    whole = list(row_files.read(tmp_path / "x.parquet"))
    assert [row for _, row in whole] == [*rows, *rows] and whole[-1][0] == "x.parquet[199]"
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 10_000)
    blocks = list(row_files.blocks(tmp_path / "x.parquet"))
    assert [one for block in blocks for one in block()] == whole
    assert max(len(pickle.dumps(block)) for block in blocks) < 12_000 and len(blocks) < 100
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 1000)  # less than a row
    assert list(row_files.read(tmp_path / "x.parquet")) == whole


def test_views_of_strings_are_cut_like_strings(tmp_path, monkeypatch):
    """pyarrow takes no rows of such columns."""
    texts = [str(number) * 500 for number in range(100)]
    parquet.write_table(Table.from_pydict({"prompt": pyarrow.array(texts, pyarrow.string_view())}), tmp_path / "x.parquet")
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 10_000)
    assert [row["prompt"] for _, row in row_files.read(tmp_path / "x.parquet")] == texts


def test_blocks_of_rows_that_were_read_elsewhere_are_cut_by_bytes(monkeypatch):
    rows = [
        (str(number), row) for number, row in enumerate([*wide(100), Unreadable("x" * 9_000, "is none"), SelectedRow(wide(100)[-1], {})])
    ]
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 10_000)
    blocks = list(row_files.in_blocks(iter(rows)))
    assert [one for block in blocks for one in block()] == rows
    assert max(len(pickle.dumps(block)) for block in blocks) < 20_000 and len(blocks) < 50
    monkeypatch.setattr(row_files, "BLOCK_ROWS", 2)
    assert max(len(list(block())) for block in row_files.in_blocks(iter(rows))) == 2
    assert list(row_files.in_blocks(iter([]))) == []


def test_the_size_of_a_deep_row_is_told_too():
    deep: list = []
    for _ in range(20_000):
        deep = [deep]
    assert len(list(row_files.in_blocks([("x:1", deep)]))) == 1


def test_a_list_that_is_larger_than_what_is_held_is_refused_by_its_size(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_bytes(b"[" + GOOD + b",\n" + GOOD + b"]")
    size = (tmp_path / "x.json").stat().st_size
    monkeypatch.setattr(row_files, "LARGEST_JSON", size)
    assert places(tmp_path / "x.json") == ["x.json[0]", "x.json[1]"] and row_files.first_rows(tmp_path / "x.json", 1) == b"[" + GOOD + b"]"
    monkeypatch.setattr(row_files, "LARGEST_JSON", size - 1)
    with pytest.raises(PedigreeError, match=rf"^x.json is too large for a JSON list \({size} > {size - 1} bytes\): convert .*`jq -c"):
        places(tmp_path / "x.json")
    assert row_files.first_rows(tmp_path / "x.json", 1) is None


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_first_lines_are_read_without_the_others(tmp_path, monkeypatch, name):
    monkeypatch.setattr(row_files, "LONGEST_LINE", len(GOOD))
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 16)
    file = packed(tmp_path / name, GOOD + b"\n\n" + GOOD + b"\n" + GOOD)
    for count in (1, 2):
        first = row_files.first_rows(file, count)
        assert first is not None
        (tmp_path / f"first-{name}").write_bytes(first)
        assert len(places(tmp_path / f"first-{name}")) == count
    assert row_files.first_rows(file, 3) is None
    longest = 200 * len(GOOD)
    file = packed(tmp_path / name, GOOD + b"\n" + b" " * longest + b"\n" + GOOD)
    assert row_files.first_rows(file, 1) is None  # as whoever reads all of it refuses it
    taken, own = [], row_files._pieces

    def counted(stream):
        for piece in own(stream):
            taken.append(len(piece))
            yield piece

    monkeypatch.setattr(row_files, "_pieces", counted)
    assert row_files.first_rows(file, 1) is None and sum(taken) < longest


def test_of_a_damaged_file_there_are_no_first_rows_and_of_a_failing_disk_the_error(tmp_path, monkeypatch):
    flipped(tmp_path / "x.parquet")
    assert row_files.first_rows(tmp_path / "x.parquet", 1) is None
    file = packed(tmp_path / "x.jsonl.gz", GOOD)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(gzip, "open", fails)
    for read in (places, lambda file: row_files.first_rows(file, 1)):
        with pytest.raises(OSError, match="Input/output error") as told:
            read(file)
        assert told.value.errno == errno.EIO
