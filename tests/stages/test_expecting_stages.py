"""prepare_data with what a recipe expects: who fails and who only warns, with which rows, whatever the processes, blocks and order."""

import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pytest
from data_lab import run_stage
from pyarrow import parquet

from pedigree.configs.base.document import parse_value
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.rows.datasets import PrepareData
from pedigree.data.sources import row_files
from pedigree.stages.job.job import Job
from pedigree.stages.prepare_data import run as prepare_data

EXPECTED = [
    {"expect": "column_values_to_be_between", "column": "characters", "max_value": 40, "severity": "warn"},
    {"expect": "column_values_to_be_in_set", "column": "source", "value_set": ["chat"], "mostly": 0.5},
    {"expect": "column_values_to_not_match_regex", "column": "answer", "regex": "As an AI", "sample": 60, "severity": "warn"},
]


def written(folder: Path, seed: int = 0) -> list[str]:
    """chat.jsonl: 200 conversations, each tenth with an answer that nobody wants, each twentieth too long; returns its lines."""
    turns = [[f"question {n}" + "?" * (30 if n % 20 == 0 else 1), ("As an AI " if n % 10 == 0 else "") + f"answer {n}"] for n in range(200)]
    lines = [json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}) for q, a in turns]
    random.Random(seed).shuffle(lines)
    folder.mkdir(exist_ok=True)
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return lines


def made(folder: Path, expected: list[dict], file: str = "chat.jsonl", threads: int = 1):
    config = {"record": "conversation", "sources": [{"type": "files", "path": file}], "expectations": expected}
    return run_stage(folder / "made", "prepare_data", config, files={file: folder / file}, threads=threads)


def verdict(folder: Path) -> dict:
    return json.loads((folder / "made" / "out" / "evidence" / "validation.json").read_text())


def test_rows_that_break_an_expectation_are_told_with_their_lines_and_nothing_is_made(tmp_path):
    lines = written(tmp_path)
    with pytest.raises(PedigreeError) as error:
        made(tmp_path, [EXPECTED[0] | {"severity": "fail"}, EXPECTED[1]])
    said = str(error.value).splitlines()
    broken = "column_values_to_be_between(characters, max_value 40): 10 rows unexpected (5 % of 200)"
    assert said[0].startswith(f"conversation rows are not as expected: {broken}, as chat-") and said[1] == f"  {broken}"
    found = verdict(tmp_path)
    assert not found["success"] and not (tmp_path / "made" / "out" / "payload").exists()
    (refused,) = [one for one in found["expectations"] if not one["success"]]
    assert len(refused["examples"]) == refused["unexpected"] == 10
    for example in refused["examples"]:
        number = int(example["place"].removeprefix("chat.jsonl:"))
        row = json.loads(lines[number - 1])
        assert example["value"] == sum(len(message["content"]) for message in row["messages"]) > 40
    assert said[2].startswith(f"    {refused['examples'][0]['id']} at {refused['examples'][0]['place']}: ")


def test_places_are_those_of_the_file_whatever_it_is(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}]} for n in (1, 2, 50, 3)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    with pytest.raises(PedigreeError, match=r"at chat\.parquet\[2\]: 51$"):
        made(tmp_path, [EXPECTED[0] | {"severity": "fail"}], "chat.parquet")
    sums = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 9, "seed": 1}
    config = {"record": "conversation", "sources": [sums], "expectations": [EXPECTED[1]]}
    with pytest.raises(PedigreeError, match=r"\n    arithmetic-[0-9a-f]{16}: arithmetic\n"):
        run_stage(tmp_path / "sums", "prepare_data", config)


def test_neither_processes_nor_blocks_nor_the_order_of_lines_change_a_verdict(tmp_path, monkeypatch):
    verdicts, records, sampled = [], [], []
    for number, (threads, size, seed) in enumerate([(1, 1 << 22, 0), (3, 700, 0), (1, 1 << 22, 5)]):
        monkeypatch.setattr(row_files, "BLOCK_BYTES", size)
        folder = tmp_path / str(number)
        lines = written(folder, seed)
        artifact = made(folder, EXPECTED, threads=threads)
        verdicts.append(verdict(folder))
        records.append((artifact.record.content, artifact.record.metrics["validation"]))
        examples = verdicts[-1]["expectations"][-1]["examples"]
        sampled.append([(one["id"], one["value"]) for one in examples])
        read = [json.loads(lines[int(one["place"].removeprefix("chat.jsonl:")) - 1]) for one in examples]
        assert [row["messages"][1]["content"] for row in read] == [one["value"] for one in examples]
    assert verdicts[0] == verdicts[1] != verdicts[2]  # where the lines stand elsewhere
    assert records[0] == records[1] == records[2] and sampled[0] == sampled[2]
    *_, lengths, sources, refusals = records[0][1]["expectations"]
    assert lengths["unexpected"] == 10 and sources["success"] and (refusals["rows"], refusals["of"]) == (60, 200)
    assert 0 < refusals["unexpected"] < 20  # of 20 in all


def test_warnings_are_kept_and_change_no_row(tmp_path):
    written(tmp_path)
    config = {"record": "conversation", "sources": [{"type": "files", "path": "chat.jsonl"}], "expectations": EXPECTED}
    job = Job(tmp_path / "job", "r/s", "k", Numerics(), Placement(), {"chat.jsonl": tmp_path / "chat.jsonl"})
    job.folder.mkdir()
    metrics = prepare_data.run(PrepareData.model_validate(config), {}, job)
    assert job.marks[0] == "not as expected: column_values_to_be_between(characters, max_value 40): 10 rows unexpected (5 % of 200)"
    assert len(job.marks) == 2 and metrics["validation"]["success"] and "examples" not in str(metrics["validation"])
    plain = made(tmp_path, [])
    bare = [{"expectation", "column", "success"} == set(one) for one in plain.record.metrics["validation"]["expectations"]]
    assert all(bare) and len(bare) == 6 and verdict(tmp_path) == plain.record.metrics["validation"]
    payload = {path.name: path.read_bytes() for path in plain.payload.iterdir()}
    assert payload == {path.name: path.read_bytes() for path in (job.out / "payload").iterdir()}


def test_the_example_of_the_documentation_says_what_it_says_there(tmp_path, root):
    block = re.search(r"```yaml\n(stages:\n  chat:.*?)```", (root / "docs" / "expectations.md").read_text(), re.DOTALL)
    assert block is not None
    written(tmp_path)
    config = {name: value for name, value in parse_value(block[1])["stages"]["chat"].items() if name != "kind"}
    files = {"rows/chat.jsonl": tmp_path / "chat.jsonl"}
    artifact = run_stage(tmp_path / "made", "prepare_data", config, files=files)
    entries = artifact.record.metrics["validation"]["expectations"][6:]
    assert [entry["success"] for entry in entries] == [True, True, True, True, True, False]
