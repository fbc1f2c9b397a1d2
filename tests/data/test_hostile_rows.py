"""Rows that somebody wrote to do harm, or that a broken program did: each is a bad row, and what is said of it can be written."""

import json
from pathlib import Path
from typing import Any

import pytest
from row_reading import load_file, load_items, write_file

from pedigree.configs.rows.row_sources import Files
from pedigree.configs.rows.suite_forms import load_form
from pedigree.data.artifacts.artifacts import write_rows
from pedigree.data.sources.attributes import grouped
from pedigree.data.sources.row_files import REASON, BadRow, Unreadable
from pedigree.data.sources.sources import Outside
from pedigree.stages.verifiers import check

HALF = "\ud800"
ANSWER = {"role": "assistant", "content": "So it is."}
REASONS: list[tuple[str, dict[str, Any]]] = [
    ("conversation", {"messages": [{"role": "user", "content": [{"type": HALF, "text": "x"}]}, ANSWER]}),
    ("conversation", {"messages": [{"role": HALF, "content": "x", "tool_calls": [{"name": "look", "arguments": {}}]}, ANSWER]}),
    ("conversation", {"messages": [{"role": "user", "content": "x"}, {**ANSWER, "tool_calls": [{"name": HALF, "arguments": "[1]"}]}]}),
    ("prompt", {"prompt": "x", "dataset": [HALF, "b"], "ground_truth": "1"}),
]


def bad_rows(folder: Path, record: Any, *rows: Any) -> list[BadRow]:
    return load_file(write_file(folder / "x.jsonl", rows), record, check, max_bad_rows=len(rows)).bad


@pytest.mark.parametrize(("record", "row"), REASONS)
def test_a_reason_with_half_a_surrogate_pair_can_be_written(tmp_path, record, row):
    (bad,) = bad_rows(tmp_path, record, row)
    assert r"\ud800" in bad.reason
    write_rows(tmp_path / "bad_rows.jsonl", [bad._asdict()])
    assert json.loads((tmp_path / "bad_rows.jsonl").read_text())["reason"] == bad.reason


def test_a_reason_is_no_longer_than_people_read(tmp_path):
    """A million of them are held until the stage ends."""
    verifier = {"name": "python", "before": "", "tests": "t" * 1_000_000, "entry": "f", "extra": 1}
    (bad,) = bad_rows(tmp_path, "prompt", {"prompt": "x", "verifier": verifier})
    assert len(bad.reason) == REASON and "extra" in bad.reason


def test_a_row_that_is_nested_too_deeply_to_be_shown_is_a_bad_row_too():
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert BadRow.of("x:1", "there are no messages", {"a": deep}).text == "(nested too deeply to be shown)"


def test_what_is_said_of_an_item_is_cut_and_written_too(tmp_path, monkeypatch):
    monkeypatch.setattr("pedigree.data.sources.sources.row_problem", lambda *given: f"{HALF}{'long' * 1000}")
    row = {"question": "2 + 2?", "answer": "#### 4"}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    source = Files.model_validate({"type": "files", "path": "x.jsonl", "max_bad_rows": 1})
    (bad,) = load_items(source, load_form("gsm8k"), "task", Outside(files={"x.jsonl": tmp_path / "x.jsonl"})).bad
    assert bad.reason.startswith(r"\ud800long") and len(bad.reason) == REASON


LARGE = 10**400


@pytest.mark.parametrize("rating", [LARGE, -LARGE, str(LARGE), "1e999999999", float("inf")], ids=lambda rating: str(rating)[:5])
def test_a_rating_that_no_float_holds_is_no_number(rating):
    row = {"prompt": "x", "response": "y", "help": rating}
    ((place, found),) = grouped([("x:1", row)], {"help": 1.0})
    assert place == "x:1" and isinstance(found, Unreadable) and found.reason.startswith("help ") and found.reason.endswith("is no number")


def test_ratings_whose_sum_no_float_holds_are_refused_and_one_next_to_nothing_is_read_at_once():
    """As a fraction it has a thousand million digits."""
    row = {"prompt": "x", "response": "y", "help": 1e308, "tone": 1e308}
    ((_, found),) = grouped([("x:1", row)], {"help": 1.0, "tone": 1.0})
    assert isinstance(found, Unreadable) and found.reason == "the score is larger than any float"
    ((_, found),) = grouped([("x:1", {"prompt": "x", "response": "y", "help": "1e-999999999"})], {"help": 1.0})
    assert found["score"] == 0.0
