"""Rows that other stages have made, as sources: what becomes of them, and that none is lost or changed on the way."""

import os
from typing import Any

import pytest
from data_lab import publish, rows_of, run_stage

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.records import columns

CHAT = [
    {
        "id": f"chat-{number}", "source": "chat" if number % 2 else "talk",
        "messages": [
            {"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "first", "train": False},
            {"role": "user", "content": "and?"}, {"role": "assistant", "content": f"answer {number}", "train": True},
        ],
    }
    for number in range(6)
]  # fmt: skip
PAIRS = [
    {
        "id": f"pair-{number}", "source": "pairs", "messages": [{"role": "user", "content": f"which {number}"}],
        "answers": [
            {"text": "good", "score": 0.9, "policy": "sft", "finish_reason": "length"}, {"text": "bad", "score": 0.1, "win_rate": 0.25},
        ],
        "strength": 0.75,
    }
    for number in range(3)
]  # fmt: skip
PROMPTS = [
    {
        "id": f"p-{number}", "source": "sums", "messages": [{"role": "user", "content": f"1 + {number} = ?"}],
        "verifier": {"name": "arithmetic", "answer": str(1 + number)},
    }
    for number in range(4)
]  # fmt: skip


@pytest.fixture
def given(tmp_path) -> dict[str, Any]:
    return {
        "chat": publish(tmp_path / "given" / "chat", "conversation", CHAT),
        "pairs": publish(tmp_path / "given" / "pairs", "preference", PAIRS),
        "prompts": publish(tmp_path / "given" / "prompts", "prompt", PROMPTS),
    }


def made(tmp_path, record: str, given: dict[str, Any], names: list[str], threads: int = 2, **stage: Any) -> Any:
    config = {"record": record, "sources": [{"type": "artifact", "input": name} for name in names], **stage}
    return run_stage(tmp_path / f"made-{threads}", "prepare_data", config, threads=threads, rows={name: given[name] for name in names})


def without_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(({name: value for name, value in row.items() if name != "id"} for row in rows), key=str)


@pytest.mark.parametrize(
    ("record", "name", "rows"), [("conversation", "chat", CHAT), ("preference", "pairs", PAIRS), ("prompt", "prompts", PROMPTS)]
)
def test_rows_of_the_same_type_stay_what_they_are(tmp_path, given, record, name, rows):
    assert without_ids(rows_of(made(tmp_path, record, given, [name]))) == without_ids(rows)


def test_what_prepare_data_made_keeps_its_ids(tmp_path):
    sums = {"type": "arithmetic", "operations": ["add"], "digits": [1, 2], "count": 50, "seed": 1}
    first = run_stage(tmp_path / "first", "prepare_data", {"record": "conversation", "sources": [sums]})
    second = made(tmp_path, "conversation", {"first": first}, ["first"])
    assert second.record.content == first.record.content


def test_conversations_are_prompts_without_their_last_answer(tmp_path, given):
    rows = rows_of(made(tmp_path, "prompt", given, ["chat", "pairs", "prompts"]))
    assert len(rows) == 13 and all(row["messages"][-1]["role"] == "user" for row in rows)
    chats = [row for row in rows if row["source"] in ("chat", "talk")]
    assert without_ids(chats) == without_ids(
        [{"source": row["source"], "messages": row["messages"][:-1], "verifier": None} for row in CHAT]
    )
    assert without_ids([row for row in rows if row["source"] == "sums"]) == without_ids(PROMPTS)


def test_preferences_are_conversations_with_their_best_answer(tmp_path, given):
    rows = rows_of(made(tmp_path, "conversation", given, ["chat", "pairs"]))
    (row, *others) = [row for row in rows if row["source"] == "pairs"]
    assert len(others) == 2 and row["messages"][1] == {"role": "assistant", "content": "good", "finish_reason": "length"}


def test_rows_are_read_group_by_group_in_many_processes(tmp_path, given, monkeypatch):
    sums = {"type": "arithmetic", "operations": ["add", "subtract"], "digits": [1, 2], "count": 300, "seed": 1}
    monkeypatch.setattr(columns, "ROWS_PER_GROUP", 20)
    monkeypatch.setattr(columns, "ROWS_PER_FILE", 100)
    many = {"many": run_stage(tmp_path / "many", "prepare_data", {"record": "conversation", "sources": [sums]})}
    own, who = columns.read_group, tmp_path / "who"

    def noted(*args: Any) -> Any:
        with who.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return own(*args)

    monkeypatch.setattr(columns, "read_group", noted)
    one, three = (made(tmp_path, "conversation", many, ["many"], threads) for threads in (1, 3))
    pids = who.read_text().split()
    assert len(pids) == 2 * 15 and pids.count(str(os.getpid())) == 15  # none of the others is read here
    assert one.record.content == three.record.content == many["many"].record.content


def test_rows_of_another_version_are_told_with_their_place(tmp_path, given, monkeypatch):
    broken = [{**row, "messages": [*row["messages"], {"role": "assistant", "content": " "}]} for row in CHAT[:2]]
    artifact = publish(tmp_path / "broken", "conversation", broken)
    with pytest.raises(PedigreeError, match=r"(?s)chat: 2 malformed rows of 2.*rows-00000.parquet\[1\]: message 4 \(assistant\) is empty"):
        made(tmp_path, "conversation", {"chat": artifact}, ["chat"])
