"""Mixtures: which rows of a source are taken, and how often, whatever stands beside it."""

import hashlib
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from data_lab import rows_of, run_stage

from pedigree.configs.base.problems import PedigreeError

LATE = {"draw": "after_filters"}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """a: 20 rows, of which 10 say `bad`; b: 30 rows from three places, of 3, 9 and 18; each row has a text of its own."""
    folder = tmp_path_factory.mktemp("given")

    def row(name: str, number: int, **more: Any) -> dict[str, Any]:
        turns = [("user", f"{name} {number}"), ("assistant", "x" * (number + 1))] * (1 + number % 3)
        return {"messages": [{"role": role, "content": text} for role, text in turns], **more}

    rows = {
        "a": [row("bad" if number % 2 else "good", number) for number in range(20)],
        "b": [row("b", number, source="small" if number < 3 else "middle" if number < 12 else "large") for number in range(30)],
        "c": [row("c", number) for number in range(7)],
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
    return {name: folder / f"{name}.jsonl" for name in rows}


@pytest.fixture
def mixed(files, tmp_path):
    """Runs the stage over these files, one after the other: name → how it is drawn, and what the stage says."""

    def run(given: dict[str, dict[str, Any]] | list[tuple[str, dict[str, Any]]], **stage: Any) -> Any:
        given = list(given.items()) if isinstance(given, dict) else given
        sources = [{"type": "files", "path": name, **how} for name, how in given]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return run_stage(folder, "prepare_data", {"record": "conversation", "sources": sources, **stage}, files=files)

    return run


def texts(artifact: Any) -> list[str]:
    return [row["messages"][0]["content"] for row in rows_of(artifact)]


def by_source(artifact: Any) -> dict[str, int]:
    return {name: count for name, count in sorted(Counter(row["source"] for row in rows_of(artifact)).items())}


def per_source(artifact: Any) -> list[dict[str, Any]]:
    return json.loads((artifact.evidence / "counts.json").read_text())["per_source"]


def test_shares_are_of_the_total_and_leave_room_for_counts(mixed):
    made = mixed({"a": {"share": 0.3}, "b": {"share": 0.5}, "c": {"count": 6}}, total=30)
    assert by_source(made) | {"a": 9, "c": 6} == by_source(made) and len(rows_of(made)) == 30
    assert [(one["left_out"], one["in"], one["kept"]) for one in per_source(made)] == [
        ({"not drawn": 11}, 9, 9), ({"not drawn": 15}, 15, 15), ({"not drawn": 1}, 6, 6)
    ]  # fmt: skip


def test_another_source_changes_no_row_of_the_others(mixed):
    for stage in ({}, LATE):
        alone = set(texts(mixed({"a": {"count": 5}}, **stage)))
        first = texts(mixed({"c": {}, "a": {"count": 5}}, **stage))
        last = texts(mixed({"a": {"count": 5}, "b": {"count": 9, "seed": 3}}, **stage))
        assert len(alone) == 5 and alone == {text for text in first if text[0] != "c"} == {text for text in last if text[:2] != "b "}


def test_fewer_rows_are_among_more_of_them(mixed):
    few, more = (set(texts(mixed({"a": {"count": count}}))) for count in (4, 9))
    assert few < more and few != set(texts(mixed({"a": {"count": 4, "seed": 1}})))


KEYWORDS = {"filters": [{"type": "keywords", "words": ["bad"]}]}


def test_after_the_filters_a_mixture_is_what_the_recipe_says(mixed):
    before = mixed({"a": {"share": 0.5}, "c": {"share": 0.5}}, total=12, **KEYWORDS)
    assert by_source(before)["a"] < 6 == by_source(before)["c"]
    after = mixed({"a": {"share": 0.5}, "c": {"share": 0.5}}, total=12, **KEYWORDS, **LATE)
    assert by_source(after) == {"a": 6, "c": 6}
    one, other = per_source(after)
    assert (one["left_out"], one["in"], one["dropped"], one["kept"]) == ({"not drawn": 4}, 16, {"keywords": 10}, 6)
    assert (other["left_out"], other["in"], other["kept"]) == ({"not drawn": 1}, 6, 6)


def test_too_few_rows_after_the_filters_are_told(mixed):
    with pytest.raises(PedigreeError, match=r"a: count 12 > 10 rows that the filters keep: take fewer, or repeat rows with `repeat: true`"):
        mixed({"a": {"count": 12}, "c": {}}, **KEYWORDS, **LATE)
    with pytest.raises(PedigreeError, match=r"a: share 0.75 of total 28, 21 rows, > 20 usable rows"):
        mixed({"a": {"share": 0.75}, "c": {"share": 0.25}}, total=28)
    with pytest.raises(PedigreeError, match=r"c: epochs 0.1 takes none of 7 usable rows: raise it"):
        mixed({"c": {"epochs": 0.1}})
    with pytest.raises(PedigreeError, match=r"a: count 5 > 0 rows that the filters keep: leave the source out$"):
        mixed({"a": {"repeat": True, "count": 5}}, filters=[{"type": "max_characters", "limit": 1}], **LATE)


def test_what_filters_keep_is_repeated_under_ids_of_its_own(mixed):
    made = mixed(
        {"a": {"count": 25, "repeat": True}, "c": {"epochs": 2.5}}, filters=[{"type": "exact_duplicates"}, *KEYWORDS["filters"]], **LATE
    )
    found = Counter(texts(made))
    assert sorted(found[text] for text in found if text.startswith("good")) == [2] * 5 + [3] * 5
    assert sorted(found[text] for text in found if text.startswith("c")) == [2] * 4 + [3] * 3  # 17.5 rows, rounded down
    ids = [row["id"] for row in rows_of(made)]
    assert len(set(ids)) == len(ids) == 42 and Counter(name.count("-") for name in ids) == {1: 17, 2: 25}
    order = [name.rpartition("-")[0] if name.count("-") == 2 else name for name in ids]
    assert sum(one == other for one, other in pairwise(order)) < 10  # shuffled like any other
    again = {row["id"]: row["messages"] for row in rows_of(made)}
    assert all(again[name] == again[name.rpartition("-")[0]] for name in ids if name.count("-") == 2)
    assert [(one["in"], one["repeated"], one["kept"]) for one in per_source(made)] == [(20, 15, 25), (7, 10, 17)]


def test_equal_rows_and_their_repetitions_never_share_an_id(mixed):
    made = mixed([("c", {"epochs": 2}), ("c", {"epochs": 1.5, "seed": 4})], **LATE)
    ids = [row["id"] for row in rows_of(made)]
    assert len(ids) == len(set(ids)) == 14 + 10 and set(Counter(texts(made)).values()) == {3, 4}


def test_rows_of_many_sources_are_capped_and_weighted(mixed):
    assert by_source(mixed({"b": {"most_per_source": 5}})) == {"large": 5, "middle": 5, "small": 3}
    assert by_source(mixed({"b": {"count": 8, "weights": {"large": 3, "small": 1}}})) == {"large": 6, "small": 2}
    made = mixed({"b": {"share": 1.0, "weights": {"large": 1, "small": 1}, "repeat": True}}, total=20, **LATE)
    assert by_source(made) == {"large": 10, "small": 10}


def test_neither_processes_nor_groups_change_a_byte_of_a_mixture(files, tmp_path, monkeypatch):
    monkeypatch.setattr("pedigree.data.sources.row_files.BLOCK_BYTES", 200)
    sources = [{"type": "files", "path": "a", "share": 0.7, "repeat": True}, {"type": "files", "path": "b", "share": 0.3}]
    config = {"record": "conversation", "sources": sources, "total": 50, "order": "interleaved", **LATE, **KEYWORDS}
    one, other = (run_stage(tmp_path / str(workers), "prepare_data", config, files=files, threads=workers) for workers in (1, 3))
    assert one.record.content == other.record.content and len(rows_of(one)) == 50


def test_rows_stand_in_the_order_that_the_recipe_says(mixed):
    given = {"c": {}, "a": {"count": 14}}
    plain = rows_of(mixed(given))
    by = {order: [row["source"] for row in rows_of(mixed(given, order=order))] for order in ("by_source", "interleaved")}
    assert by["by_source"] == ["c"] * 7 + ["a"] * 14
    assert by["interleaved"] == ["a", "c", "a"] * 7  # c stands at (2k + 1)/14, between a's at (4k + 1)/28 and (4k + 3)/28
    sizes = [sum(len(turn["content"]) for turn in row["messages"]) for row in rows_of(mixed(given, order={"by": "length"}))]
    assert sizes == sorted(sizes) and sizes != [sum(len(turn["content"]) for turn in row["messages"]) for row in plain]
    turns = [len(row["messages"]) for row in rows_of(mixed(given, order={"by": "turns", "direction": "descending"}))]
    assert turns == sorted(turns, reverse=True)
    shuffled = [row["id"] for row in plain]
    for count in set(turns):  # equal ones as they are shuffled
        equal = [row["id"] for row in rows_of(mixed(given, order={"by": "turns"})) if len(row["messages"]) == count]
        assert equal == [name for name in shuffled if name in set(equal)]


@pytest.mark.parametrize("seed", [0, 7])
def test_a_count_takes_the_rows_whose_hashes_are_smallest(mixed, seed):
    """As it did before mixtures: of (seed, id), also where two rows are equal."""
    ids = [row["id"] for row in rows_of(mixed([("c", {}), ("b", {})]))]

    def hashed(name: str) -> str:
        return hashlib.sha256(json.dumps([seed, name], separators=(",", ":")).encode()).hexdigest()

    found = rows_of(mixed([("c", {"count": 3, "seed": seed}), ("b", {})]))
    expected = sorted((name for name in ids if name.startswith("c-")), key=hashed)[:3]
    assert {row["id"] for row in found if row["source"] == "c"} == set(expected)
