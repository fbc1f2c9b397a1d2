"""Records by way of drafts are what they would be in memory, whatever the processes and blocks; what a kill leaves does not count."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from waiting import until

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.filters import Filter
from pedigree.configs.rows.row_sources import Files
from pedigree.data.filters import filtering
from pedigree.data.records import columns, records
from pedigree.data.sources import dataset_builder, leaks, row_files, sources
from pedigree.data.sources.dataset_builder import DatasetBuilder, RowIndex
from pedigree.data.sources.sources import Outside

FILTERS = [{"type": "max_characters", "limit": 24}, {"type": "exact_duplicates"}, {"type": "keywords", "words": ["red"]}]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, Path]:
    """Two files with rows that are equal, equal but for their case, too long, of a word that is not wanted, and bad."""
    folder, draw = tmp_path_factory.mktemp("given"), random.Random(0)
    words = "one two three four red Blue blue green".split()
    files = {}
    for name, count in (("a.jsonl", 400), ("b.jsonl", 300)):
        lines = []
        for _ in range(count):
            asked, said = (" ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(2))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said if draw.random() > 0.02 else " "}]
            lines.append(json.dumps({"messages": turns}) if draw.random() > 0.01 else "{")
        files[name] = folder / name
        files[name].write_text("\n".join(lines) + "\n")
    return files


def opened(files: dict[str, Path], name: str, **more: Any) -> sources.OpenSource:
    source = Files.model_validate({"type": "files", "path": name, "max_bad_rows": 0.1, **more})
    return sources.opened(source, "conversation", None, Outside(files=files))


CHOSEN = [TypeAdapter(Filter).validate_python(one) for one in FILTERS]


def reader(laid: RowIndex) -> filtering.Read:
    return lambda places: columns.to_rows(laid.table(places), records.Conversation)


Made = tuple[list[dict], dict[str, tuple], dict[str, bytes]]


def made(folder: Path, files: dict[str, Path], workers: int, counts: dict[str, int]) -> Made:
    """(rows in their order; id → why it went; bytes of the payload)."""
    with DatasetBuilder(folder / "drafts", "conversation", CHOSEN, 7, lambda verifier: None, workers) as laying:
        for name in files:
            list(laying.take(opened(files, name, seed=3, **({"count": counts[name]} if name in counts else {}))))
        laid = laying.table()
        drops = filtering.decide(CHOSEN, laid.facts, laid.ids, reader(laid), workers)
        kept = laid.shuffled(np.array([place for place in range(len(laid)) if place not in drops]))
        list(laid.write(folder / "payload", kept, workers))
        gone = columns.to_rows(laid.table(np.array(sorted(drops))), records.Conversation)
    assert not (folder / "drafts").exists()
    payload = {path.name: path.read_bytes() for path in sorted((folder / "payload").iterdir())}
    reasons = {row["id"]: (row, drops[place]) for place, row in zip(sorted(drops), gone, strict=True)}
    return list(records.stream(folder / "payload")), reasons, payload


def with_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Source and hash of each row, with a number from the second of equal rows on."""
    seen: Counter[str] = Counter()
    named = []
    for row in rows:
        content = {name: value for name, value in row.items() if name != "id"}
        base = f"{row['source']}-{digest(content)[:16]}"
        seen[base] += 1
        named.append({"id": base if seen[base] == 1 else f"{base}-{seen[base]}", **content})
    return named


def plainly(files: dict[str, Path], counts: dict[str, int]) -> tuple[list[dict], dict[str, tuple]]:
    """The same, row by row and in memory."""
    read, kept, gone, seen = [], [], {}, {}
    for name in files:
        source = opened(files, name)
        rows = with_ids([row for block in source.blocks for row in source.parse(block).rows])
        read += leaks.shuffled(rows, 3)[: counts[name]] if name in counts else rows
    for row in with_ids(read):
        texts = records.texts(row)
        folded = "\0".join(" ".join(text.casefold().split()) for text in texts)
        if sum(map(len, texts)) > 24:
            gone[row["id"]] = (row, filtering.Drop("max_characters", f"{sum(map(len, texts))} > 24"))
        elif (first := seen.setdefault(folded, row["id"])) != row["id"]:
            gone[row["id"]] = (row, filtering.Drop("exact_duplicates", f"same text as {first}"))
        elif "red" in " ".join(texts).split():
            gone[row["id"]] = (row, filtering.Drop("keywords", "red"))
        else:
            kept.append(row)
    return leaks.shuffled(kept, 7), gone


@pytest.mark.parametrize("counts", [{}, {"a.jsonl": 150}, {"a.jsonl": 1, "b.jsonl": 250}])
def test_rows_are_those_that_would_be_made_in_memory(given, tmp_path, counts):
    rows, gone, _ = made(tmp_path, given, 1, counts)
    assert (rows, gone) == plainly(given, counts)
    if not counts:
        reasons = Counter(drop.reason for _, drop in gone.values())
        assert min(reasons.values()) > 5 and len(reasons) == 3
        assert sum(row["id"].count("-") > 1 for row, _ in gone.values()) > 5  # told apart by a number


@pytest.mark.integration
def test_neither_processes_nor_blocks_change_a_byte(given, tmp_path, monkeypatch):
    who, here = tmp_path / "who", os.getpid()
    own = filtering.look

    def noted(*args: Any) -> Any:
        with who.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        until(lambda: os.getpid() == here or len({*who.read_text().split()}) > 1)  # else one process could be done before others begin
        return own(*args)

    monkeypatch.setattr(filtering, "look", noted)
    monkeypatch.setattr(columns, "ROWS_PER_FILE", 50)
    results = []
    for number, (workers, size) in enumerate([(1, 1 << 22), (3, 700)]):
        monkeypatch.setattr(row_files, "BLOCK_BYTES", size)
        who.write_text("")
        results.append(made(tmp_path / str(number), given, workers, {"b.jsonl": 200}))
        pids = set(who.read_text().split())
        assert (str(os.getpid()) in pids) == (workers == 1) and len(pids) > (workers > 1)
    assert results[0] == results[1] and len(results[0][2]) > 3


def test_few_rows_are_parsed_here(given, tmp_path, monkeypatch):
    monkeypatch.setattr(
        dataset_builder, "mapped", lambda work, blocks, workers: map(work, blocks) if workers == 1 else pytest.fail("a process")
    )
    with DatasetBuilder(tmp_path / "drafts", "conversation", [], 0, lambda verifier: None, 8) as laying:
        assert list(laying.take(opened(given, "b.jsonl")))


def test_what_a_killed_attempt_left_does_not_count(given, tmp_path):
    quiet = made(tmp_path / "quiet", given, 1, {})
    (tmp_path / "drafts").mkdir()
    (tmp_path / "drafts" / "0-0.arrow").write_bytes(b"half of it")
    (tmp_path / "payload").mkdir()
    for number in range(3):
        (tmp_path / "payload" / f"rows-{number:05d}.parquet").write_bytes(b"half of it")
    assert made(tmp_path, given, 1, {}) == quiet


@pytest.mark.parametrize(
    ("more", "said"), [({"max_bad_rows": 2}, "malformed rows of 400, and max_bad_rows 2 allows 2"), ({"count": 399}, "count 399 > 39")]
)
def test_too_many_bad_rows_and_too_few_good_ones_are_told(given, tmp_path, more, said):
    with (
        pytest.raises(PedigreeError, match=said),
        DatasetBuilder(tmp_path / "d", "conversation", [], 0, lambda verifier: None, 1) as laying,
    ):
        list(laying.take(opened(given, "a.jsonl", **more)))
    assert not (tmp_path / "d").exists()


def test_a_source_whose_rows_are_all_bad_gives_none(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n" * 5)
    with DatasetBuilder(tmp_path / "d", "conversation", CHOSEN, 0, lambda verifier: None, 1) as laying:
        list(laying.take(opened({"a.jsonl": tmp_path / "a.jsonl"}, "a.jsonl", max_bad_rows=5)))
        laid = laying.table()
        assert len(laid) == 0 and filtering.decide(CHOSEN, laid.facts, laid.ids, reader(laid)) == {}


def test_places_of_lines_are_told_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 10)
    text = "".join(f"{'[' * (number % 3)}{number}\n" + "\n" * (number % 2) for number in range(40)) + "last"
    (tmp_path / "a.jsonl").write_text(text)
    whole = {f"a.jsonl:{number}": line for number, line in enumerate(text.split("\n"), start=1) if line}
    found = dict(row_files.read(tmp_path / "a.jsonl"))
    assert len(list(row_files.blocks(tmp_path / "a.jsonl"))) > 10
    assert {place: row.text if isinstance(row, row_files.Unreadable) else str(row) for place, row in found.items()} == whole
