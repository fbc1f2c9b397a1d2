"""Data sets of the field, each with its quirks: what becomes of every row, word for word.

Beside the made rows of a set, `formats/NAME.jsonl`, lies what is expected of them, `formats/NAME.yaml`:

    data_set: OWNER/NAME       # as docs/layouts.md has it
    quirks: WHAT               # for people
    rows: PATH                 # where they lie elsewhere
    only_json: WHY             # they have no form in Parquet
    reads:
      - source: {record: preference, columns: ..., verifier: ...}     # a record, and fields of the source
        gives:                                                        # number of the row, from 1 on → what becomes of it
          1: "user: Name a sea. | + The North Sea. | - No."           # a record, see `shown`; a list of them, of a tree
          2: "refused: the rejected answer is empty"                  # ends with ... where more follows that is no matter here
          3: with 1                                                   # it is part of what became of an earlier row
"""

import json
from collections.abc import Iterator
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from row_reading import load_file, load_items, write_file

from pedigree.configs.rows.row_sources import Files
from pedigree.configs.rows.suite_forms import load_form
from pedigree.data.sources import row_files
from pedigree.data.sources.sources import Outside, opened
from pedigree.stages.verifiers import check

ROOT = Path(__file__).parents[2]
FORMATS = Path(__file__).parent / "formats"
NAMES = sorted(path.stem for path in FORMATS.glob("*.yaml"))
STATED: dict[str, dict[str, Any]] = {name: yaml.safe_load((FORMATS / f"{name}.yaml").read_text()) for name in NAMES}
READS = [(name, number) for name in NAMES for number in range(len(STATED[name]["reads"]))]
MOST = 13
"""Rows of a fixture."""
ALLOWED = 10_000
"""Bad rows."""


def file_of(name: str) -> Path:
    elsewhere = STATED[name].get("rows")
    return ROOT / elsewhere if elsewhere else FORMATS / f"{name}.jsonl"


def rows_of(name: str) -> list[Any]:
    return [row for _, row in row_files.read(file_of(name))]


def outcomes(file: Path, fields: dict[str, Any]) -> dict[int, Any]:
    """Number of a row → what becomes of it: a text, or several."""
    fields = dict(fields)
    record, form = fields.pop("record"), fields.pop("form", None)
    source = Files.model_validate({"type": "files", "path": file.name, **fields})
    outside = Outside(files={file.name: file}, check_verifier=check)
    if form:
        return items_of(source.model_copy(update={"max_bad_rows": ALLOWED}), form, outside)
    given = opened(source, record, "task" if record == "item" else None, outside)
    found = {}
    for place, row in (one for block in given.blocks for one in block()):
        made, bad, *_ = given.parse(partial(list, [(place, row)]))
        texts = [*(shown(one, given.name) for one in made), *(f"refused: {one.reason}" for one in bad)]
        found[number_of(place)] = texts[0] if len(texts) == 1 else texts
    return found


def counted(file: Path, fields: dict[str, Any]) -> int:
    """Rows that a stage gets of a whole file, and those that it lists as bad."""
    loaded = load_file(file, **{"max_bad_rows": ALLOWED, "check_verifier": check, **fields})
    assert len({row["id"] for row in loaded.rows}) == len(loaded.rows)
    return len(loaded.rows) + len(loaded.bad)


def items_of(source: Files, form: str, outside: Outside) -> dict[int, str]:
    """The same of a benchmark's rows, which a form reads all together."""
    loaded = load_items(source, load_form(form), "task", outside)
    found = {number_of(one.place): f"refused: {one.reason}" for one in loaded.bad}
    asked = iter(loaded.rows)
    for number in range(1, len(loaded.rows) + len(found) + 1):
        if number not in found:
            item = next(asked)
            options = [line.strip() for line in item["messages"][-1]["content"].split("\n") if line.startswith(" (")]
            found[number] = " | ".join([item["question"], *options, item["verifier"]["answer"]])
    return found


def number_of(place: str) -> int:
    """From 1 on: lines are counted so, and rows of other files from 0 on."""
    file, line = place.removesuffix("]").replace("[", ":").rsplit(":", 1)
    return int(line) + (0 if file.endswith(".jsonl") else 1)


def shown(record: dict[str, Any], name: str) -> str:
    """All that a record says, on one line; where it is from unless that is the file's name."""
    parts = [f"{turn['role']}{marks(turn)}: {turn['content']}" for turn in record["messages"]]
    for place, answer in enumerate(record.get("answers", ())):
        score = "" if answer["score"] is None else f" ({answer['score']:g})"
        parts.append(f"{'-' if place else '+'}{score}{marks(answer)} {answer['text']}")
    if record.get("strength") is not None:
        parts.append(f"strength {record['strength']:g}")
    if record.get("verifier"):
        fields = {field: value for field, value in record["verifier"].items() if field != "name"}
        told = fields["answer"] if set(fields) == {"answer"} else json.dumps(fields, sort_keys=True)
        parts.append(f"{record['verifier']['name']} {told}")
    if "template_arguments" in record:
        parts.append(f"arguments {json.dumps(record['template_arguments'], sort_keys=True)}")
    if record["source"] != name:
        parts.append(f"from {record['source']}")
    return " | ".join(parts)


def marks(given: dict[str, Any]) -> str:
    known = [f"{mark} {given[mark]}" for mark in ("train", "finish_reason") if mark in given]
    return f" [{', '.join(known)}]" if known else ""


def agree(found: dict[int, Any], gives: dict[int, Any]) -> bool:
    """Whether it is what is stated; rows that are part of what became of earlier ones give nothing of their own."""
    stated = {number: given for number, given in gives.items() if not str(given).startswith("with ")}
    cut = {number: f"{text[: len(stated[number]) - 3]}..." for number, text in found.items() if str(stated.get(number)).endswith("...")}
    assert found | cut == stated
    return True


@pytest.mark.parametrize(("name", "number"), READS)
def test_every_row_becomes_what_is_stated(name, number):
    read = STATED[name]["reads"][number]
    assert list(read["gives"]) == list(range(1, len(rows_of(name)) + 1))  # none is forgotten
    found = outcomes(file_of(name), read["source"])
    assert agree(found, read["gives"])
    if "form" not in read["source"]:
        assert counted(file_of(name), read["source"]) == sum(1 if isinstance(one, str) else len(one) for one in found.values())


@pytest.mark.parametrize(("name", "number"), [(name, number) for name, number in READS if "only_json" not in STATED[name]])
def test_rows_of_parquet_become_the_same(tmp_path, name, number):
    """Where every row has every column and every field of a struct, null where it had none."""
    read = STATED[name]["reads"][number]
    rows = rows_of(name)
    columns = dict.fromkeys(column for row in rows for column in row)
    file = write_file(tmp_path / f"{file_of(name).stem}.parquet", [{column: row.get(column) for column in columns} for row in rows])
    assert agree(outcomes(file, read["source"]), read["gives"])


GARBAGE: tuple[Any, ...] = (None, 7, -0.5, True, "", "x", [], [None], ["x"], {}, {"x": [1]}, float("nan"), "\ud800")


def spoilt(value: Any) -> Iterator[Any]:
    """A value with each of its parts, and itself, replaced by each piece of garbage."""
    yield from GARBAGE
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        for broken in spoilt(part):
            changed = copy(value)
            changed[key] = broken
            yield changed


@pytest.mark.parametrize(("name", "number"), READS)
def test_no_broken_row_ends_a_job(tmp_path, name, number):
    """It is read or refused, whatever stands wherever in it."""
    read = STATED[name]["reads"][number]["source"]
    file = tmp_path / "rows.jsonl"
    broken = [json.dumps(one) for row in rows_of(name)[:3] for one in spoilt(row)]
    file.write_text("\n".join(broken))
    found = outcomes(file, read)
    assert len(found) == len(broken) or "attributes" in read  # by which rows are joined


def test_every_data_set_stands_in_the_table_of_the_documentation():
    table = (ROOT / "docs" / "layouts.md").read_text()
    assert [name for name in NAMES if STATED[name]["data_set"] not in table] == []
    assert all(0 < len(rows_of(name)) <= MOST for name in NAMES)
    assert {path.stem for path in FORMATS.iterdir()} == set(NAMES)
