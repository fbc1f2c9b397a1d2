"""Rows in no layout: the message states their columns and the layouts that come near."""

import re
from pathlib import Path

import pytest

from pedigree.data.sources.near_layouts import LAYOUTS, hint

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
NEAR = [
    ("conversation", ("question", "answer"), "`columns: {prompt: question, completion: answer}`"),
    ("conversation", ("Prompt", "Completion"), "`columns: {prompt: Prompt, completion: Completion}`"),
    ("conversation", ("promt", "completions"), "`columns: {prompt: promt, completion: completions}`"),
    ("conversation", ("id", "dialog"), "`messages` (write `columns: {messages: dialog}` in the source)"),
    ("conversation", ("prompt", "ansr"), "`columns: {prompt: prompt, completion: ansr}`"),
    ("conversation", ("prompt",), "`prompt, completion` (completion is missing)"),
    ("preference", ("prompt", "chosen"), "`prompt, chosen, rejected` (rejected is missing)"),
    ("preference", ("question", "better", "worse"), "`columns: {prompt: question, chosen: better, rejected: worse}`"),
    ("preference", ("prompt", "completion", "kto_tag"), "`columns: {prompt: prompt, completion: completion, label: kto_tag}`"),
    ("conversation", ("prompt (null)", "completion"), "`prompt, completion` (prompt is missing)"),
    ("conversation", ("instruction", "reply"), "`columns: {instruction: instruction, output: reply}`"),
    ("preference", ("question", "completion", "score"), "`columns: {prompt: question, completion: completion, score: score}`"),
    ("preference", ("system", "question", "chosen", "rejected"), "{prompt: question, chosen: chosen, rejected: rejected, system: system}`"),
    ("conversation", (" prompt", "no 1", "no 2"), '`columns: {prompt: " prompt"}` in the source; completion is missing'),
    ("prompt", ("problem", "n"), "`prompt` (write `columns: {prompt: problem}` in the source)"),
    ("prompt", ("question", "reply"), "; near is `prompt` (write `columns: {prompt: question}` in the source)"),
    ("item", ("question", "verifier"), "`columns: {prompt: question, verifier: verifier}`"),
    (
        "prompt",
        ("question", "answer"),
        "(write `columns: {prompt: question, ground_truth: answer}` and `verifier: ",
    ),
    (
        "item",
        ("problem", "solution"),
        "{prompt: problem, ground_truth: solution}` and `verifier: exact_match` or another in the",
    ),
    ("conversation", ("a", "b"), "conversation rows have `messages` or `prompt, completion` or `instruction, output` (docs/layouts.md)"),
]


@pytest.mark.parametrize(("record", "columns", "expected"), NEAR)
def test_the_nearest_layout_is_named(record, columns, expected):
    said = hint(columns, record)
    assert said.startswith(f"it has the columns {', '.join(columns)}; ") and expected in said


@pytest.mark.parametrize(
    "columns", [("messages",), ("prompt", "response"), ("instruction", "output"), ("conversations", "x"), ("instruction", "response")]
)
def test_where_a_layout_fits_only_the_columns_are_named(columns):
    assert hint(columns, "conversation") == f"it has the columns {', '.join(columns)}"
    assert hint(columns, None) == f"it has the columns {', '.join(columns)}"


def test_of_many_columns_some_are_named():
    assert hint([f"c{number}" for number in range(40)], None).endswith("c10, c11 and 28 more")
    assert hint((), None) == "it has no named columns"


def test_every_column_is_one_that_the_page_of_layouts_states():
    stated = set(re.findall(r"[a-z_0-9]+", PAGE.read_text()))
    assert {column for layouts in LAYOUTS.values() for layout in layouts for column in layout} <= stated
