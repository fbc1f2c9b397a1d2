"""Filters by what data sets say of rows in other columns, and by licences: what stays, whatever a source reads of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_lab import rows_of, run_stage
from pyarrow import Table, parquet
from pydantic import ValidationError
from row_reading import read_rows

from pedigree.configs.rows.datasets import PrepareData
from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.sources import row_files
from pedigree.stages.job.failures import StageError
from pedigree.stages.verifiers import sandbox

RATES = ["0.95", "3/8", 0.5, None, "n/a"]
SUMS = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 3, "seed": 0}


def solved(number: int, rate: Any, **more: Any) -> dict[str, Any]:
    return {"problem": f"Problem {number}?", "answer": f"It is {number}.", "extra": {"rate": rate}, **more}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Rows with pass rates in texts, as JSON lines and, as numbers, in Parquet; a chat without any; a tree of one row."""
    write_rows(tmp_path / "hard.jsonl", [solved(number, rate, license="MIT" if number % 2 else None) for number, rate in enumerate(RATES)])
    table = Table.from_pylist([solved(number, number / 4) for number in range(5, 9)])
    parquet.write_table(table, tmp_path / "more.parquet")
    turns = [{"role": "user", "content": "Chat?"}, {"role": "assistant", "content": "Yes."}]
    write_rows(tmp_path / "chat.jsonl", [{"messages": turns}])
    answers = [{"role": "assistant", "text": text, "replies": []} for text in ("One.", "Two.")]
    prompt = {"role": "prompter", "text": "Tree?", "replies": answers}
    write_rows(tmp_path / "tree.jsonl", [{"message_tree_id": "t", "prompt": prompt, "quality": 0.2}])
    return {path.name: path for path in tmp_path.iterdir()}


def source(name: str, **more: Any) -> dict[str, Any]:
    columns = {"prompt": "problem", "completion": "answer"} if name in ("hard.jsonl", "more.parquet") else {}
    return {"type": "files", "path": name, "columns": columns, **more}


def made(folder: Path, files: dict[str, Path], sources: list[dict[str, Any]], *filters: dict[str, Any], threads: int = 1) -> Artifact:
    config = {"record": "conversation", "sources": sources, "filters": list(filters)}
    return run_stage(folder, "prepare_data", config, files=files, threads=threads)


def asked(artifact: Artifact) -> list[str]:
    return sorted(row["messages"][0]["content"] for row in rows_of(artifact))


def evidence(artifact: Artifact) -> dict[str, str]:
    lines = read_rows(artifact.evidence / "drops.jsonl")
    return {line["text"].split("\n")[0]: line["evidence"] for line in lines}


def test_rows_go_by_columns_that_no_layout_reads_and_their_records_stay_what_they_were(files, tmp_path):
    sources = [source(name) for name in ("hard.jsonl", "more.parquet", "chat.jsonl")]
    hard = {"type": "values", "column": "extra.rate", "min": 0.3, "max": 0.9}
    every = made(tmp_path / "every", files, sources)
    loose, strict = (made(tmp_path / how, files, sources, hard | {"missing": how}) for how in ("keep", "drop"))
    assert asked(strict) == ["Problem 1?", "Problem 2?"]
    assert asked(loose) == ["Chat?", "Problem 1?", "Problem 2?", "Problem 3?", "Problem 4?"]
    assert evidence(strict) == {
        "Problem 0?": "extra.rate '0.95' > 0.9", "Problem 3?": "extra.rate says nothing", "Problem 4?": "extra.rate 'n/a' is no number",
        "Problem 5?": "extra.rate 1.25 > 0.9", "Problem 6?": "extra.rate 1.5 > 0.9", "Problem 7?": "extra.rate 1.75 > 0.9",
        "Problem 8?": "extra.rate 2.0 > 0.9", "Chat?": "extra.rate says nothing",
    }  # fmt: skip
    kept = {row["id"]: row for row in rows_of(loose)}
    assert kept == {row["id"]: row for row in rows_of(every) if row["id"] in kept}


def test_a_row_that_becomes_several_says_the_same_of_each(files, tmp_path):
    by_quality = {"type": "values", "column": "quality", "min": 0.5}
    with pytest.raises(StageError, match=r"no row is left of 2 \(dropped: {'values': 2}\)"):
        made(tmp_path / "made", files, [source("tree.jsonl")], by_quality)
    assert len(rows_of(made(tmp_path / "low", files, [source("tree.jsonl")], by_quality | {"min": 0.1, "missing": "drop"}))) == 2


def test_a_column_that_no_row_has_ends_the_stage_and_one_that_some_have_does_not(files, tmp_path):
    sources = [source("chat.jsonl"), source("hard.jsonl")]
    wrong = {"type": "values", "column": ["pass_rate", "extra.pass_rate"], "min": 0.5}
    with pytest.raises(StageError, match=r"the column pass_rate or extra\.pass_rate, which no row of any source has"):
        made(tmp_path / "wrong", files, sources, wrong)
    assert len(asked(made(tmp_path / "right", files, sources, wrong | {"column": ["pass_rate", "extra.rate"]}))) == 5


def test_licences_are_the_rows_own_or_those_of_their_sources_and_counted_by_source(files, tmp_path):
    sources = [source("hard.jsonl", licence="cc-by-nc-4.0"), source("more.parquet"), source("chat.jsonl", licence="odc-by"), SUMS]
    artifact = made(tmp_path / "made", files, sources, {"type": "licences", "allow": ["mit", "odc-by"]})
    assert [name for name in asked(artifact) if "+" not in name] == ["Chat?", "Problem 1?", "Problem 3?"] and len(asked(artifact)) == 6
    found = json.loads((artifact.evidence / "counts.json").read_text())["per_source"]
    assert [part["dropped"] for part in found] == [{"licences": 3}, {"licences": 4}, {}, {}]
    assert evidence(artifact)["Problem 0?"] == "cc-by-nc-4.0 (as the source states)"
    assert evidence(artifact)["Problem 5?"] == "unknown (as the source states)"


def test_rows_of_a_program_have_columns_and_the_licence_that_is_stated_for_it(tmp_path):
    source = {"type": "program", "path": "data/made.py", "count": 3, "seed": 0, "licence": "GPL-3.0"}
    filters = [{"type": "values", "column": "rate", "min": 1}, {"type": "licences", "allow": ["mit"]}]
    assert config(source, filters=filters).model_dump(mode="json")["filters"][1]["stated"] == ["gpl-3.0"]
    if sandbox.program() is None:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")
    row = '{"prompt": f"{number}?", "completion": "Yes.", "rate": number, "license": ("mit", "gpl-3.0")[number == 2]}'
    (tmp_path / "made.py").write_text(f"def rows(count, seed):\n    for number in range(count):\n        yield {row}\n")
    artifact = made(tmp_path / "job", {"data/made.py": tmp_path / "made.py"}, [source], *filters)
    assert asked(artifact) == ["1?"] and artifact.record.metrics["dropped"] == {"values": 1, "licences": 1}


def test_neither_processes_nor_blocks_change_a_byte(files, tmp_path, monkeypatch):
    licences = ("mit", "gpl-3.0", None)
    write_rows(tmp_path / "hard.jsonl", [solved(number, f"{number % 8}/8", license=licences[number % 3]) for number in range(200)])
    sources = [source("chat.jsonl"), source("hard.jsonl", licence="mit"), source("more.parquet", licence="gpl-3.0")]
    filters = [{"type": "values", "column": "extra.rate", "min": 0.25, "max": 0.75}, {"type": "licences", "allow": ["mit"]}]
    whole = made(tmp_path / "whole", files, sources, *filters)
    bad = sum(number % 8 in range(2, 7) and number % 3 == 1 for number in range(200))
    assert whole.record.metrics["dropped"] == {"values": 75 + 4, "licences": bad + 1} and len(rows_of(whole)) == 125 - bad
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 900)
    monkeypatch.setattr(row_files, "BLOCK_ROWS", 2)
    cut = made(tmp_path / "cut", files, sources, *filters, threads=3)
    assert cut.record.content == whole.record.content
    for file in whole.evidence.iterdir():
        assert (cut.evidence / file.name).read_bytes() == file.read_bytes(), file.name


# --- what a recipe may say ---------------------------------------------------------------------------------------------


def config(*sources: dict[str, Any], **more: Any) -> PrepareData:
    return PrepareData.model_validate({"record": "conversation", "sources": list(sources), **more})


ALLOWED = [{"type": "licences", "allow": ["mit"]}]


def test_a_licence_is_identity_of_a_stage_that_goes_by_licences_and_of_no_other():
    mit, gpl = (source("chat.jsonl", licence=name) for name in ("MIT", "gpl-3.0"))
    assert config(mit).model_dump(mode="json") == config(gpl).model_dump(mode="json")
    dumps = [config(one, SUMS, filters=ALLOWED).model_dump(mode="json") for one in (mit, gpl, source("chat.jsonl"))]
    assert [dump["filters"][0]["stated"] for dump in dumps] == [["mit", None], ["gpl-3.0", None], ["unknown", None]]
    read = PrepareData.model_validate(dumps[1])  # as a job reads it, to whom the source says nothing
    assert read.model_dump(mode="json") == dumps[1]


@pytest.mark.parametrize(
    ("sources", "more", "said"),
    [
        ([SUMS], {"filters": [{"type": "values", "column": "rate", "min": 1}]}, "a filter reads rate, but no source has columns"),
        (
            [source("a.jsonl", attributes={"helpfulness": 1.0})],
            {"filters": [{"type": "values", "column": "helpfulness", "min": 1}]},
            "source a.jsonl combines rows by `attributes`",
        ),
        (
            [source("a.jsonl", attributes={"helpfulness": 1.0})],
            {"filters": ALLOWED},
            "`attributes` combine rows, so .* only use the licenses of sources: set `columns: \\[\\]`",
        ),
        (
            [{"type": "files", "path": "a.jsonl"}],
            {"record": "item", "task": "gsm8k", "form": "gsm8k", "filters": ALLOWED},
            "form gsm8k reads a benchmark as published, so .*: set `columns: \\[\\]`",
        ),
        ([{"type": "artifact", "input": "chat"}], {"filters": ALLOWED}, "rows of chat are imported by other stages"),
        ([source("a.jsonl", licence="mit")], {"filters": [ALLOWED[0] | {"stated": ["apache-2.0"]}]}, "remove `stated`"),
        ([source("a.jsonl", licence="mit")], {"filters": [ALLOWED[0] | {"stated": ["mit", "mit"]}]}, "remove `stated`"),
        ([source("a.jsonl", licence="see the file")], {"filters": ALLOWED}, "'see the file' is not a license"),
        ([source("a.jsonl")], {"filters": [{"type": "licences", "allow": ["see the file"]}]}, "'see the file' is not a license"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_here_is_refused_with_the_recipe(sources, more, said):
    with pytest.raises(ValidationError, match=said):
        config(*sources, **more)


def test_what_sources_state_is_enough_where_no_column_is_asked_for():
    rated = source("a.jsonl", attributes={"helpfulness": 1.0}, licence="mit")
    assert config(rated, filters=[ALLOWED[0] | {"columns": []}]).filters
