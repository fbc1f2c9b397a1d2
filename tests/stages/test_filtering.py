"""prepare_data with its filters as a whole: why rows went, what stays is like, whatever processes and blocks."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from data_lab import rows_of, run_stage
from row_reading import read_rows

from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.sources import row_files
from pedigree.stages.job.failures import StageError

WORDS = "a bird came down the walk he did not know i saw him bit an angle worm in halves and ate the fellow raw".split()
ENGLISH = "I was looking for the book that you gave me last year, and found it"
GERMAN = "Ich suchte nach dem Buch, das du mir letztes Jahr gegeben hast, und fand es"
ANSWERS = (
    "Da wird sich deine Schwester aber freuen, denn sie wollte es schon lange lesen",
    "Wo lag es denn die ganze Zeit? Unter dem Bett oder hinter dem Schrank im Flur?",
)
FILTERS = [
    {"type": "turns", "min": 2},
    {"type": "refusals"},
    {"type": "exact_duplicates"},
    {"type": "near_duplicates", "shingle": 2},
    {"type": "language", "codes": ["en", "de"]},
]


def conversation(asked: str, said: str, system: str | None = None) -> dict[str, Any]:
    turns = [{"role": "system", "content": system}] if system else []
    return {"messages": [*turns, {"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory) -> Artifact:
    """What is made of both files by one process."""
    return made(tmp_path_factory.mktemp("whole"), given)


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, Path]:
    """Two files: texts with copies of which one word is another, refusals, and a few that only one of them has."""
    folder, draw = tmp_path_factory.mktemp("given"), random.Random(0)
    rows = []
    for number in range(120):
        words = draw.choices(WORDS, k=30)
        rows.append(conversation(f"{ENGLISH} {number}?", " ".join(words)))
        if number % 4 == 0:
            words[draw.randrange(30)] = "other"
            rows.append(conversation(f"{ENGLISH} {number}?", " ".join(words)))
        if number % 10 == 0:
            rows.append(conversation(f"{ENGLISH} {number}?", "I'm sorry, but I can't help with that."))
    draw.shuffle(rows)
    german = [conversation(GERMAN, said, "Sei kurz.") for said in ANSWERS]
    files = {"a.jsonl": rows, "b.jsonl": [*german, *rows[:20]]}
    for name, some in files.items():
        write_rows(folder / name, some)
    return {name: folder / name for name in files}


def made(
    folder: Path, given: dict[str, Path], threads: int = 1, filters: list[dict[str, Any]] = FILTERS, count: int | None = None
) -> Artifact:
    """`count`: rows that are drawn of each file."""
    sources = [{"type": "files", "path": name, "count": count} for name in given]
    config = {"record": "conversation", "sources": sources, "filters": filters}
    return run_stage(folder, "prepare_data", config, files=given, threads=threads)


def evidence(artifact: Artifact) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(artifact.evidence.iterdir())}


def test_neither_processes_nor_blocks_change_a_byte_of_payload_and_evidence(given, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 1500)
    cut = made(tmp_path / "cut", given, threads=3)
    assert cut.record.content == whole.record.content and evidence(cut) == evidence(whole)
    assert min(whole.record.metrics["dropped"].values()) > 5 and len(whole.record.metrics["dropped"]) == 3


def test_evidence_of_a_near_duplicate_leads_to_a_row_that_is_there(given, tmp_path):
    artifact = made(tmp_path / "made", {"a.jsonl": given["a.jsonl"]}, count=150)
    kept = {row["id"] for row in rows_of(artifact)}
    near = [line for line in read_rows(artifact.evidence / "drops.jsonl") if line["reason"] == "near_duplicates"]
    assert len(near) >= 20
    for line in near:
        similarity, name = line["evidence"].split(" like ")
        assert 0.7 <= float(similarity) <= 1 and name in kept and line["id"] not in kept


def test_statistics_are_of_the_rows_that_stay_by_source(whole):
    found = json.loads((whole.evidence / "statistics.json").read_text())
    rows = rows_of(whole)
    per_source = {part["source"]: part for part in found["per_source"]}
    short, long = (len(GERMAN) + len("Sei kurz.") + len(answer) for answer in ANSWERS)
    assert per_source["b"] == {
        "source": "b",
        "rows": 2,
        "characters": {"p50": short, "p90": long, "p99": long, "max": long},
        "turns": {"p50": 2, "p90": 2, "p99": 2, "max": 2},
        "roles": {"system": 2, "user": 2, "assistant": 2},
        "with_system": 1.0,
        "languages": {"de": 2},
    }
    every = found["all"]
    sizes = sorted(sum(len(turn["content"]) for turn in row["messages"]) for row in rows)
    assert every["rows"] == len(rows) and every["with_system"] == round(2 / len(rows), 4)
    assert every["characters"] == {f"p{p}": sizes[-(-p * len(sizes) // 100) - 1] for p in (50, 90, 99)} | {"max": sizes[-1]}
    assert sum(every["languages"].values()) == len(rows) and every["roles"] == {"system": 2, "user": len(rows), "assistant": len(rows)}


def test_a_source_of_which_nothing_stays_and_answers_of_a_preference_in_statistics(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"prompt": "Why?", "chosen": "So.", "rejected": "No, so."}])
    write_rows(tmp_path / "b.jsonl", [{"prompt": "Why not?", "chosen": "So it is.", "rejected": "No."}])
    config = {
        "record": "preference",
        "sources": [{"type": "files", "path": name} for name in ("a.jsonl", "b.jsonl")],
        "filters": [{"type": "max_characters", "limit": 14}],
    }
    files = {name: tmp_path / name for name in ("a.jsonl", "b.jsonl")}
    found = json.loads((run_stage(tmp_path / "made", "prepare_data", config, files=files).evidence / "statistics.json").read_text())
    assert found["per_source"][1] == {"source": "b", "rows": 0} and "languages" not in found["all"]
    assert (found["all"]["turns"]["max"], found["all"]["characters"]["max"]) == (2, 14)
    assert found["all"]["roles"] == {"system": 0, "user": 1, "assistant": 1}


def test_filters_that_leave_nothing_say_which_took_what(given, tmp_path):
    with pytest.raises(StageError, match=r"no row is left of 162 \(dropped: {'refusals': 12, 'pattern': 150}\)"):
        made(tmp_path / "made", {"a.jsonl": given["a.jsonl"]}, filters=[{"type": "refusals"}, {"type": "pattern", "regex": "the book"}])
