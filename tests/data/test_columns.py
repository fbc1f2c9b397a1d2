"""Rows in columns and back: whatever the type, nothing is lost, added or silently turned into something else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.artifacts.artifacts import Artifact, Record
from pedigree.data.records import columns, records
from pedigree.data.store.untrusted import ArtifactError

QUESTION = {"role": "user", "content": "Was ist 1 + 1?\n\u0000🙂 \ufeff"}
ANSWER = {"role": "assistant", "content": "2", "train": False}
CUT = {"role": "assistant", "content": "It is", "finish_reason": "length"}
ROWS: dict[str, list[dict]] = {
    "conversation": [
        {"id": "a", "source": "s", "messages": [QUESTION, ANSWER]},
        {"id": "b", "source": "s", "messages": [{"role": "system", "content": "x" * 70_000}, QUESTION, CUT]},
    ],
    "prompt": [
        {"id": "a", "source": "s", "messages": [QUESTION], "verifier": None},
        {"id": "b", "source": "s", "messages": [QUESTION], "verifier": {"name": "ifeval", "instructions": [{"id": "i", "n": 3, "x": 0.1}]}},
    ],
    "item": [
        {"id": "a", "source": "s", "task": "t", "messages": [QUESTION], "verifier": {"name": "v", "answer": "3"}},
        {
            "id": "b", "source": "s", "task": "t", "messages": [QUESTION], "verifier": {"name": "v"}, "question": "?", "category": "c",
            "prefix": "A:", "choices": ["a", ""], "others": {"flex": {"name": "v", "answer": "3"}}, "weights": {"flex": 0.5},
        },
    ],
    "preference": [
        {
            "id": "a", "source": "s", "messages": [QUESTION], "strength": None,
            "answers": [{"text": "2", "score": 1.5}, {"text": "", "score": None}],
        },
        {
            "id": "b", "source": "s", "messages": [QUESTION], "strength": 0.75,
            "answers": [
                {"text": "2", "score": 0.1, "win_rate": 0.25, "policy": "p", "policy_content": "c", "on_policy": True},
                {"text": "3", "score": None, "finish_reason": "length"},
            ],
        },
    ],
    "completion": [
        {
            "id": "p/m/0", "prompt_id": "p", "source": "s", "messages": [QUESTION], "verifier": None, "policy": "m", "policy_content": "c",
            "on_policy": False, "index": 0, "seed": 2**31 - 1, "prompt_ids": [1, 2], "response_ids": [], "logprobs": [], "text": "",
            "finish_reason": "stop",
        },
        {
            "id": "p/m/1", "prompt_id": "p", "source": "s", "messages": [QUESTION], "verifier": None, "policy": "m", "policy_content": "c",
            "on_policy": True, "index": 1, "seed": 0, "temperature": 0.6, "prompt_ids": [1], "response_ids": [7], "logprobs": [-0.5],
            "text": "2", "finish_reason": "length",
        },
    ],
    "judgment": [
        {
            "id": "p/m/0", "prompt_id": "p", "source": "s", "messages": [QUESTION], "policy": "m", "policy_content": "c",
            "on_policy": False, "text": "2", "finish_reason": "length", "response_length": 3, "verifier_score": None,
            "rewards": {"rm": 0.1 + 0.2, "other": None}, "reward": -1e-300, "disagreement": None,
            "ratings": {"honesty": {"rating": None, "text": "?"}}, "rating": None, "score": 3.0,
            "win_rate": None,
        },
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", records.RECORDS)
def test_rows_come_back_as_they_were_whole_or_some_fields_and_are_the_same_bytes_again(kind, tmp_path):
    """Also what is absent in one row and there in the next."""
    records.save(tmp_path, kind, ROWS[kind])
    assert list(records.stream(tmp_path / "payload")) == ROWS[kind]
    fields = ("id", "prompt_id", "messages", "text")
    some = [{name: row[name] for name in fields if name in row} for row in ROWS[kind]]
    assert [*records.stream(tmp_path / "payload", fields)] == some
    (one,) = (tmp_path / "payload").iterdir()
    columns.write(tmp_path / "two.parquet", columns.read_group(one, 0), [records.size_of(row) for row in ROWS[kind]])
    assert (tmp_path / "two.parquet").read_bytes() == one.read_bytes()
    records.save(tmp_path, kind, ROWS[kind][:1])
    assert list(records.stream(tmp_path / "payload")) == ROWS[kind][:1]


@pytest.mark.parametrize("kind", ROWS)
def test_datasets_opens_the_files_as_they_are(kind, tmp_path):
    from datasets import load_dataset

    records.save(tmp_path, kind, ROWS[kind])
    files = str(tmp_path / "payload" / "rows-*.parquet")
    given = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"), split="train")
    assert [row["id"] for row in given] == [row["id"] for row in ROWS[kind]]
    for row, own in zip(given, ROWS[kind], strict=True):
        assert [one["content"] for one in row["messages"]] == [one["content"] for one in own["messages"]]
        for column in ("verifier", "rewards", "ratings", "others"):
            assert row.get(column) == own.get(column)


def rows(count: int, characters: int = 1) -> list[dict]:
    turns = [{"role": "user", "content": "a" * characters}, {"role": "assistant", "content": "b"}]
    return [{"id": str(number), "source": "s", "messages": turns} for number in range(count)]


def test_files_and_groups_are_cut_by_rows_and_by_characters(tmp_path, monkeypatch):
    for name, bound in (("ROWS_PER_FILE", 10), ("ROWS_PER_GROUP", 4), ("CHARACTERS_PER_FILE", 10_000), ("CHARACTERS_PER_GROUP", 5_000)):
        monkeypatch.setattr(columns, name, bound)
    given = [*rows(12), *rows(7, 3_000)]
    given = [row | {"id": str(number)} for number, row in enumerate(given)]
    records.save(tmp_path, "conversation", given)
    files = sorted((tmp_path / "payload").iterdir())
    assert [path.name for path in files] == ["rows-00000.parquet", "rows-00001.parquet", "rows-00002.parquet"]
    metadata = [parquet.read_metadata(path) for path in files]
    groups = [[one.row_group(number).num_rows for number in range(one.num_row_groups)] for one in metadata]
    assert groups == [[4, 4, 2], [4, 2], [2, 1]]  # 2 short ones and 4 long ones reach 10,000 characters, as do 2 long ones 5,000
    assert list(records.stream(tmp_path / "payload")) == given

    records.save(tmp_path, "conversation", given[:3])  # an earlier attempt wrote more
    assert [path.name for path in (tmp_path / "payload").iterdir()] == ["rows-00000.parquet"]


@pytest.mark.parametrize("sizes", [[], [1], [5, 5, 5, 9, 1], [100, 1, 1], [0, 0, 0, 0]])
def test_cuts_leave_nothing_out(sizes):
    found = columns.cuts(sizes, 3, 10)
    assert [place for part in found for place in range(len(sizes))[part]] == list(range(len(sizes)))
    assert all(part.stop - part.start <= 3 and sum(sizes[part][:-1]) < 10 for part in found)


@pytest.mark.integration
def test_equal_rows_are_equal_bytes_in_another_process(tmp_path):
    code = (
        "import sys, json; from pathlib import Path; from pedigree.data.records import records\n"
        "records.save(Path(sys.argv[1]), 'preference', json.loads(sys.argv[2]))"
    )
    records.save(tmp_path / "here", "preference", ROWS["preference"])
    environment = os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code, tmp_path / "there", json.dumps(ROWS["preference"])], env=environment, check=True)
    here, there = ((tmp_path / name / "payload" / "rows-00000.parquet").read_bytes() for name in ("here", "there"))
    assert here == there


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mood": "glad"}, "Conversation has no field mood"),
        ({"messages": [{"role": "user", "content": "a", "name": "Eve"}]}, "Conversation.messages has no field name"),
        ({"messages": [{"role": 3, "content": "a"}]}, "does not fit its columns"),
        ({"id": 3}, "does not fit its columns"),
        ({"source": "\ud800"}, "does not fit its columns"),
    ],
)
def test_what_no_column_holds_is_refused(tmp_path, change, said):
    with pytest.raises(PedigreeError, match=said):
        records.save(tmp_path, "conversation", [rows(1)[0] | change])
    assert not list((tmp_path / "payload").iterdir())


def other_columns(path: Path) -> None:
    table = columns.to_table(ROWS["prompt"], records.Prompt)
    parquet.write_table(table.replace_schema_metadata(columns.schema_of(records.Conversation).metadata), path)


def nameless(path: Path) -> None:
    parquet.write_table(parquet.read_table(path).replace_schema_metadata({}), path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "is not a complete Parquet file"),
        (lambda path: path.write_bytes(b""), "is not a complete Parquet file"),
        (lambda path: path.write_bytes(path.read_bytes()[:100] + bytes(40) + path.read_bytes()[140:]), "is not a complete Parquet file"),
        (other_columns, "does not have this version's columns for rows of type 'conversation'"),
        (nameless, "does not have this version's columns for rows of type ''"),
        (lambda path: path.unlink(), "holds no rows"),
    ],
)
def test_a_damaged_file_is_told(tmp_path, damage, said):
    records.save(tmp_path, "conversation", rows(50, 100))
    damage(tmp_path / "payload" / "rows-00000.parquet")
    with pytest.raises(ArtifactError, match=said):
        list(records.stream(tmp_path / "payload"))


def test_rows_are_the_same_ones_whichever_is_asked_for(tmp_path, monkeypatch):
    for name, bound in (("ROWS_PER_FILE", 7), ("ROWS_PER_GROUP", 3)):
        monkeypatch.setattr(columns, name, bound)
    given = [row | {"id": str(number)} for number, row in enumerate(rows(17))]
    records.save(tmp_path, "conversation", given)
    record = Record(
        kind="by_hand", version=1, type="conversation", config={}, inputs=(), key="0" * 64, content="0" * 64, files=(), metrics={}
    )
    found = records.opened(Artifact(tmp_path, record))
    assert len(found) == 17 and list(found) == given
    places = [0, 16, 6, 7, 2, 3, -1, -17]
    assert [found[place] for place in places] == [given[place] for place in places]
    assert found[5:9] == given[5:9] and found[::-4] == given[::-4]
    for beyond in (17, -18):
        with pytest.raises(IndexError):
            found[beyond]


def test_what_would_be_too_large_in_memory_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "GROUP_BYTES", 1000)
    records.save(tmp_path, "conversation", rows(2, 10_000))
    with pytest.raises(ArtifactError, match="to be a Pedigree file"):
        list(records.stream(tmp_path / "payload"))


def test_the_digest_of_rows_does_not_depend_on_their_file():
    assert records.digest_of([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    one, other = ROWS["item"]
    assert records.digest_of([one, other]) == records.digest_of([dict(reversed(one.items())), other]) != records.digest_of([other, one])
