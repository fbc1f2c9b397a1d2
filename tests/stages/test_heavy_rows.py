"""Rows with more beside their texts than in them, tests in a verifier or what judges said: files, groups and blocks are bounded by all that
rows hold, and blocks of long texts by their characters. Neither changes what is written of others."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_lab import publish, rows_of, run_stage
from pyarrow import parquet

from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import answer_pool, columns, records
from pedigree.stages.best_answers import run as best_answers
from pedigree.stages.pair import run as pair

HEAVY = 60_000
"""Characters of a verifier."""
ASKED = [{"role": "user", "content": "Say it!"}]
NAMES = [f"p{number}" for number in range(6)]


def forbids(word: str) -> dict[str, Any]:
    return {"name": "ifeval", "instructions": [{"id": "keywords:forbidden_words", "forbidden_words": [word]}]}


def prompts(characters: int = HEAVY) -> list[dict[str, Any]]:
    messages = [[{"role": "user", "content": f"Say {name}!"}] for name in NAMES]
    return [
        {"id": name, "source": "s", "messages": turns, "verifier": forbids("x" * characters)}
        for name, turns in zip(NAMES, messages, strict=True)
    ]


def judgment(prompt: str, label: str, score: float, **more: Any) -> dict[str, Any]:
    return {
        "id": f"{prompt}/{label}/0", "prompt_id": prompt, "source": "s", "messages": ASKED, "policy": label, "policy_content": "c",
        "on_policy": True, "text": f"{prompt} by {label}", "finish_reason": "stop", "response_length": 3, "verifier_score": score,
        "rewards": {}, "reward": None, "disagreement": None, "ratings": {}, "rating": None, "score": score, "win_rate": None, **more,
    }  # fmt: skip


def completion(prompt: str, label: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"{prompt}/{label}/0", "prompt_id": prompt, "source": "s", "messages": ASKED, "verifier": None, "policy": label,
        "policy_content": "c", "on_policy": True, "index": 0, "seed": 1, "prompt_ids": [1], "response_ids": [5], "logprobs": [-1.0],
        "text": f"{prompt} by {label}", "finish_reason": "stop", **more,
    }  # fmt: skip


JUDGED = [judgment(name, label, score) for name in NAMES for label, score in (("a", 1.0), ("b", 0.0))]
SAID = {"rating": 3, "text": "y" * HEAVY}
ITEM = {"source": "s", "task": "t", "messages": ASKED, "verifier": {"name": "v"}}
WEIGHTY: dict[str, list[dict[str, Any]]] = {
    "prompt": prompts(),
    "item": [{"id": name, **ITEM, "choices": ["x" * (HEAVY // 2), "y" * (HEAVY // 2)]} for name in NAMES],
    "completion": [completion(name, "a", verifier={"name": "v", "at": list(range(HEAVY // 8))}) for name in NAMES],
    "judgment": [judgment(name, "a", 1.0, ratings={"honesty": SAID}) for name in NAMES],
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "CHARACTERS_PER_FILE", 100_000)
    monkeypatch.setattr(columns, "CHARACTERS_PER_GROUP", 50_000)


def groups(payload: Path) -> list[list[int]]:
    """Of each file the rows of its groups."""
    found = [parquet.read_metadata(path) for path in sorted(payload.iterdir())]
    return [[one.row_group(number).num_rows for number in range(one.num_row_groups)] for one in found]


IN_TWOS = [[1, 1], [1, 1], [1, 1]]
"""Six rows of which two reach the bound of a file, and one that of a group."""


@pytest.mark.parametrize("kind", WEIGHTY)
def test_files_and_groups_end_by_all_that_rows_hold_and_not_by_what_ordinary_ones_do(tmp_path: Path, narrow: None, kind: str) -> None:
    records.save(tmp_path, kind, iter(WEIGHTY[kind]))
    assert groups(tmp_path / "payload") == IN_TWOS and list(records.stream(tmp_path / "payload")) == WEIGHTY[kind]
    assert max(map(records.size_of, WEIGHTY[kind])) < 100  # by which rows are ordered and told
    for row in WEIGHTY[kind]:
        assert HEAVY - records.FREE < records.bulk_of(row) - records.size_of(row) < HEAVY - records.FREE + 2_000
        light = row | {"verifier": {"name": "v"}, "choices": ["x" * 3_000, "y"], "ratings": {"honesty": {"rating": 3, "text": "y" * 3_000}}}
        assert records.bulk_of(light) == records.size_of(light)


def selected(folder: Path, pool: Artifact) -> Artifact:
    judged = publish(folder / "judged", "judgment", JUDGED)
    return run_stage(folder / "made", "select_prompts", {"max_mean": 0.9}, prompts=pool, judgments=judged)


def narrowed(folder: Path, pool: Artifact) -> Artifact:
    return run_stage(folder / "made", "constrain", {"instructions": ["punctuation:no_comma"]}, prompts=pool)


def cleaned(folder: Path, pool: Artifact) -> Artifact:
    turns = [{"role": "user", "content": "A farmer has seventeen sheep, all but nine of them run away; how many are left now?"}]
    suite = publish(folder / "suite", "item", [{"id": "i", **ITEM, "messages": turns, "verifier": {"name": "gsm8k", "answer": "9"}}])
    return run_stage(folder / "made", "decontaminate", {}, data=pool, benchmarks=suite)


def prepared(folder: Path, pool: Artifact) -> Artifact:
    config = {"record": "prompt", "sources": [{"type": "artifact", "input": "pool"}]}
    return run_stage(folder / "made", "prepare_data", config, rows={"pool": pool})


@pytest.mark.parametrize("make", [selected, narrowed, cleaned, prepared])
def test_rows_that_a_stage_passes_on_lie_as_whoever_has_all_of_them_would_write_them(tmp_path: Path, narrow: None, make: Any) -> None:
    made = make(tmp_path, publish(tmp_path / "pool", "prompt", prompts()))
    assert groups(made.payload) == IN_TWOS
    assert publish(tmp_path / "again", "prompt", rows_of(made)).record.content == made.record.content


# --- blocks ------------------------------------------------------------------------------------------------------------


def paired(folder: Path) -> Artifact:
    return run_stage(folder / "made", "pair", {}, judgments=publish(folder / "judged", "judgment", JUDGED))


def imitated(folder: Path) -> Artifact:
    return run_stage(folder / "made", "best_answers", {"keep": "best_of_n"}, judgments=publish(folder / "judged", "judgment", JUDGED))


def bound(folder: Path) -> Artifact:
    pool = publish(folder / "pool", "prompt", prompts(5))
    return run_stage(folder / "made", "constrain", {"instructions": ["punctuation:no_comma"]}, prompts=pool)


@pytest.mark.parametrize("make", [paired, imitated, bound])
def test_rows_are_objects_together_up_to_so_many_characters_and_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    whole, together, own = make(tmp_path / "whole"), [], columns.to_table

    def noted(rows: Any, record: Any) -> pa.Table:
        together.append(len(rows))
        return own(rows, record)

    monkeypatch.setattr(columns, "to_table", noted)
    monkeypatch.setattr(columns, "CHARACTERS_PER_BLOCK", 1)
    cut = make(tmp_path / "cut")
    assert set(together) - {0} == {1} and cut.record.content == whole.record.content
    together.clear()
    monkeypatch.setattr(columns, "CHARACTERS_PER_BLOCK", 20)
    assert make(tmp_path / "between").record.content == whole.record.content and max(together) <= 3


@pytest.mark.parametrize("kind", ["judgment", "completion"])
def test_of_answers_only_what_goes_into_others_is_read(tmp_path: Path, kind: str) -> None:
    heavy: dict[str, Any] = {"ratings": {"honesty": {"rating": 3, "text": "y" * 4_000_000}}} if kind == "judgment" else {
        "response_ids": list(range(400_000)), "logprobs": [-1.0] * 400_000, "verifier": forbids("x" * 4_000_000)
    }  # fmt: skip
    row = judgment("p", "a", 1.0) if kind == "judgment" else completion("p", "a")
    given = answer_pool.read(publish(tmp_path, kind, [row, row | heavy | {"id": "p/a/1"}]), None)
    before = pa.total_allocated_bytes()
    lookup = given.read([0, 1])
    assert pa.total_allocated_bytes() - before < 1_000_000
    rows = lookup([0, 1])
    assert sorted(one["id"] for one in rows.values()) == ["p/a/0", "p/a/1"]
    for one in rows.values():
        assert one == {name: value for name, value in (row | {"id": one["id"]}).items() if name in answer_pool.WORDS}
    best_answers.conversation(rows[0])
    pair.answer_of(None, rows[0], rows[1])
