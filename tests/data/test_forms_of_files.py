"""Rows as other tools write them: lists of messages as text, lists within an object, other encodings and line ends, nothing at all."""

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from row_reading import load_file, write_file

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.sources import row_files
from pedigree.data.sources.layouts import example_of

ASKED, ANSWERED = [{"role": "user", "content": "How old is it?"}], [{"role": "assistant", "content": "Ninety years."}]
WORSE = [{"role": "assistant", "content": "No idea."}]
SHAREGPT = [{"from": "human", "value": "How old is it?"}, {"from": "gpt", "value": "Ninety years."}]
TURN = pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("us")})
LONGER = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello!"}, *ASKED]


CONVERSATIONS = {
    "prompt and completion": {"prompt": ASKED, "completion": ANSWERED},
    "messages": {"messages": [*ASKED, *ANSWERED]},
    "ShareGPT": {"conversations": SHAREGPT},
}
PREFERENCES = {
    "prompt, chosen and rejected": {"prompt": ASKED, "chosen": ANSWERED, "rejected": WORSE},
    "whole conversations": {"chosen": [*ASKED, *ANSWERED], "rejected": [*ASKED, *WORSE]},
    "a prompt and whole conversations": {"prompt": "How old is it?", "chosen": [*ASKED, *ANSWERED], "rejected": [*ASKED, *WORSE]},
}


def as_text(row: dict[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("stored", [dict, as_text], ids=["lists", "text"])
def test_lists_of_messages_are_read_as_lists_and_as_text(tmp_path, suffix, stored):
    for number, given in enumerate(CONVERSATIONS.values()):
        (row,) = load_file(write_file(tmp_path / f"c{number}.{suffix}", [stored(given)])).rows
        assert row["messages"] == [*ASKED, *ANSWERED]
    for number, given in enumerate(PREFERENCES.values()):
        (row,) = load_file(write_file(tmp_path / f"p{number}.{suffix}", [stored(given)]), "preference").rows
        assert (row["messages"], [one["text"] for one in row["answers"]]) == (ASKED, ["Ninety years.", "No idea."])
    (row,) = load_file(write_file(tmp_path / f"p.{suffix}", [stored({"messages": LONGER})]), "prompt").rows
    assert row["messages"] == LONGER


def test_text_that_is_meant_as_text_remains_text():
    """JSON that a user asks about, or that an assistant is to write, is no conversation."""
    rows = json.dumps([{"name": "a", "role": "admin"}, 7])
    assert example_of({"prompt": rows, "completion": "x"}).messages[0]["content"] == rows
    written = json.dumps([{"role": "assistant", "content": "Hello."}])
    assert example_of({"prompt": "Write a message.", "completion": written}).answer == written
    assert example_of({"messages": "[INST] is a mark.", "completion": "x"}).messages[0]["content"] == "[INST] is a mark."


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': 'Hello.'}]", '[{"role": "user", "content": "Hel', "[]", '[{"content": "a"}]', "[ {}, 7]",
        json.dumps(json.dumps(LONGER)), json.dumps({"messages": LONGER}), json.dumps(["Hello."]),
    ],
)  # fmt: skip
def test_text_that_begins_as_a_list_of_messages_and_is_none_is_refused(text):
    """As `str` or numpy writes lists into a CSV file, or encoded twice; as a prompt of its own it would be trained without a word."""
    with pytest.raises(ValueError, match="messages is a text that begins as a list of messages, and is not one as JSON"):
        example_of({"messages": text, "completion": "x"})


def test_turns_of_a_prompt_beside_whole_conversations_are_their_beginning():
    """Otherwise a system turn that the prompt alone has would be lost without a word; a text is no turn and not compared."""
    whole = {"chosen": [*ASKED, *ANSWERED], "rejected": [*ASKED, *WORSE]}
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    for other in (system, json.dumps(system), LONGER[:1]):
        with pytest.raises(ValueError, match="prompt is not the beginning of chosen"):
            example_of({"prompt": other, **whole})
    for same in (ASKED, json.dumps(ASKED), "How old?"):
        assert example_of({"prompt": same, **whole}).messages == ASKED


def test_decimals_are_numbers(tmp_path):
    """As tables from databases have them."""
    given = {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": Decimal("4.5"), "score_rejected": Decimal("1.25")}
    (row,) = load_file(write_file(tmp_path / "x.parquet", [given | {"strength": Decimal("0.75")}]), "preference").rows
    assert [one["score"] for one in row["answers"]] == [4.5, 1.25] and row["strength"] == 0.75


def test_answers_of_several_turns_continue_the_prompt():
    rest = [{"role": "assistant", "content": "Which one?"}, {"role": "user", "content": "The tree."}]
    example = example_of({"prompt": ASKED, "chosen": [*rest, *ANSWERED], "rejected": [*rest, *WORSE]})
    assert (example.messages, example.answer, example.rejected) == ([*ASKED, *rest], "Ninety years.", "No idea.")
    with pytest.raises(ValueError, match="do not answer the same beginning"):
        example_of({"prompt": ASKED, "chosen": [*rest, *ANSWERED], "rejected": WORSE})


ROWS = [{"prompt": f"Größe {number} 🌳?", "completion": "b"} for number in range(40)]


@pytest.mark.parametrize(
    "wrapped", [{"data": ROWS}, {"version": "1.1", "tags": ["a"], "rows": ROWS, "source": "x"}, {"train": ROWS, "test": []}]
)
def test_the_only_list_of_rows_in_an_object_is_read(tmp_path, wrapped):
    loaded = load_file(write_file(tmp_path / "x.json", wrapped))
    assert [row["messages"][0]["content"] for row in loaded.rows] == [row["prompt"] for row in ROWS]
    assert next(row_files.read(tmp_path / "x.json"))[0] == "x.json[0]"


@pytest.mark.parametrize(
    "given", [{"train": ROWS, "test": ROWS}, {"messages": LONGER}, {"prompt": "a", "completion": "b", "seen": [{}]}, 7]
)
def test_an_object_with_no_list_of_rows_or_several_is_refused(tmp_path, given: Any):
    has = f": it has {', '.join(given)}" if isinstance(given, dict) else ""
    with pytest.raises(PedigreeError, match=rf"x\.json is not a JSON list of rows, nor an object with one such list{has}$"):
        load_file(write_file(tmp_path / "x.json", given))


def test_json_lines_under_the_name_of_json_are_read_as_such(tmp_path):
    (tmp_path / "x.json").write_text("\n".join(map(json.dumps, ROWS)))
    assert len(load_file(tmp_path / "x.json").rows) == 40 and list(row_files.read(tmp_path / "x.json"))[1][0] == "x.json:2"
    (tmp_path / "y.json").write_text(json.dumps(ROWS) + "]")
    with pytest.raises(PedigreeError, match=r"y\.json is not JSON: Extra data"):
        load_file(tmp_path / "y.json")


@pytest.mark.parametrize("first", [{"prompt": "a\u2028b\x85c", "completion": "b"}, {"messages": LONGER}, {"prompt": "a", "seen": [{}]}])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_json_lines_under_the_name_of_json_may_be_one_row_and_hold_any_character(tmp_path, first, end):
    (tmp_path / "x.json").write_text(json.dumps(first, ensure_ascii=False) + end)
    assert list(row_files.read(tmp_path / "x.json")) == [("x.json:1", first)]
    (tmp_path / "y.json").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in [first, *ROWS]))
    assert [row for _, row in row_files.read(tmp_path / "y.json")] == [first, *ROWS]


def test_one_row_under_the_name_of_json_may_have_columns_of_its_own(tmp_path):
    (tmp_path / "x.json").write_text('{"question": "How old is it?", "answer": "Ninety years."}\n')
    (row,) = load_file(tmp_path / "x.json", columns={"prompt": "question", "completion": "answer"}).rows
    assert row["messages"] == [*ASKED, *ANSWERED]
    (tmp_path / "y.json").write_text(json.dumps({"version": "1.1", "data": []}))
    assert list(row_files.read(tmp_path / "y.json")) == []


def test_one_json_document_under_the_name_of_json_lines_is_read_as_such(tmp_path):
    for number, written in enumerate((json.dumps(ROWS, indent=1), "\ufeff[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n")):
        (tmp_path / f"x{number}.jsonl").write_text(written)
        assert [row for _, row in row_files.read(tmp_path / f"x{number}.jsonl")] == ROWS
    (tmp_path / "y.jsonl").write_text("\n".join(json.dumps(row, indent=1) for row in ROWS))
    with pytest.raises(PedigreeError, match=r"y\.jsonl:1, y\.jsonl:5, .* is not JSON: .*: write each row on one line, with `jq -c \.`"):
        load_file(tmp_path / "y.jsonl")
    (tmp_path / "z.jsonl").write_text(json.dumps(ROWS))
    with pytest.raises(PedigreeError, match=r"z\.jsonl:1: the row is not an object with named fields: .* named \.json"):
        load_file(tmp_path / "z.jsonl")


def test_a_mark_within_joined_files_is_no_content(tmp_path):
    """`cat` of files that begin with a byte order mark."""
    (tmp_path / "x.jsonl").write_text("\n".join("\ufeff" + json.dumps(row) for row in ROWS))
    assert len(load_file(tmp_path / "x.jsonl").rows) == 40


@pytest.mark.parametrize("line", ['{"prompt": "a", "completion": "b", "prompt": "c"}', '{"messages": [{"role": "user", "role": "x"}]}'])
def test_an_object_with_one_key_twice_is_a_bad_row(tmp_path, line):
    """Readers differ in which of the values they take."""
    name = "prompt" if "prompt" in line else "role"
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(PedigreeError, match=rf"x\.jsonl:1: is not JSON: an object has the key '{name}' twice"):
        load_file(tmp_path / "x.jsonl")


@pytest.mark.parametrize("block", [1000, 1 << 22])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_any_encoding_of_unicode_and_any_line_end_gives_the_same_rows(tmp_path, monkeypatch, encoding, end, block):
    monkeypatch.setattr(row_files, "BLOCK_BYTES", block)
    lines = end.join(json.dumps(row, ensure_ascii=False) for row in ROWS) + end
    (tmp_path / "x.jsonl").write_bytes(lines.encode(encoding))
    found = list(row_files.read(tmp_path / "x.jsonl"))
    assert [row for _, row in found] == ROWS and [place for place, _ in found] == [f"x.jsonl:{number}" for number in range(1, 41)]
    (tmp_path / "x.json").write_bytes((json.dumps(ROWS, ensure_ascii=False, indent=1).replace("\n", end)).encode(encoding))
    assert [row for _, row in row_files.read(tmp_path / "x.json")] == ROWS


def test_damage_in_utf16_is_a_bad_row_among_good_ones(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False).encode("utf-16-le") for row in ROWS[:3]]
    lines[1] = lines[1].replace("ö".encode("utf-16-le"), b"\x00\xdc")  # the second half of a pair, alone
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe" + b"\n\x00".join(lines))
    loaded = load_file(tmp_path / "x.jsonl", max_bad_rows=1)
    assert len(loaded.rows) == 2 and [bad.place for bad in loaded.bad] == ["x.jsonl:2"]


def test_an_empty_part_of_a_folder_is_no_mistake(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.jsonl").write_bytes(b"")
    write_file(tmp_path / "set/b.jsonl", ROWS)
    assert len(load_file(tmp_path / "set").rows) == 40


def test_columns_that_are_not_read_may_hold_anything(tmp_path):
    """Dates, decimals, bytes, integers of any size and nulls beside what is read."""
    beside = {"at": date(2024, 1, 1), "price": Decimal("1.50"), "raw": b"\xff", "more": {"none": None, "at": date(2024, 1, 2)}}
    (row,) = load_file(write_file(tmp_path / "x.parquet", [{"prompt": "a", "completion": "b", **beside}])).rows
    (tmp_path / "y.jsonl").write_text('{"prompt": "a", "completion": "b", "id": 1' + "0" * 400 + ', "seen": NaN}')
    assert row["messages"] == load_file(tmp_path / "y.jsonl").rows[0]["messages"]


def test_a_time_that_python_has_no_form_for_harms_no_row_that_leaves_it_unread(tmp_path):
    late, turns = pa.array([0, 2**62], pa.timestamp("us")), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    at = pa.array([[one | {"at": when} for one in turns] for when in (0, 2**62)], pa.list_(TURN))
    parquet.write_table(pa.table({"prompt": ["a"] * 2, "completion": ["b"] * 2, "at": late}), tmp_path / "x.parquet")
    assert [row["messages"] for row in load_file(tmp_path / "x.parquet").rows] == [turns] * 2
    parquet.write_table(pa.table({"messages": at}), tmp_path / "y.parquet")
    loaded = load_file(tmp_path / "y.parquet", max_bad_rows=1)
    assert [row["messages"] for row in loaded.rows] == [turns] and [bad.place for bad in loaded.bad] == ["y.parquet[1]"]
    parquet.write_table(pa.table({"prompt": ["a"] * 2, "response": ["b", "c"], "help": late}), tmp_path / "z.parquet")
    (bad, _) = load_file(tmp_path / "z.parquet", "preference", attributes={"help": 1.0}, max_bad_rows=2).bad
    assert bad.reason.startswith("help datetime")


@pytest.mark.parametrize("row", [{"prompt": date(2024, 1, 1), "completion": "b"}, {"prompt": "a", "completion": 10**400}])
def test_what_is_read_and_is_no_text_is_a_bad_row(row):
    with pytest.raises(ValueError, match=r"is not \{role, content\}|has no text"):
        example_of(row)


BESIDE = [
    {"instruction": "Name a sea.", "input": "", "output": "The North Sea."},
    {"conversations": [{"from": "human", "value": "Name a sea."}, {"from": "gpt", "value": "The North Sea."}]},
    {"prompt": "Name a sea.", "completion": "The North Sea."},
]


@pytest.mark.parametrize("row", BESIDE)
def test_a_system_prompt_in_a_column_of_its_own_is_not_lost_without_a_word(tmp_path, row):
    for name in ("system", "system_prompt"):
        file = write_file(tmp_path / "x.jsonl", [{**row, name: "Be brief."}])
        columns = {one: one for one in row} | {"system": name}
        listed = ", ".join(f"{one}: {one}" for one in row)
        with pytest.raises(PedigreeError, match=f"the row has {name}, .*`columns: {{system: {name}, {listed}}}`"):
            load_file(file)
        (given,) = load_file(file, columns=columns).rows
        assert [(one["role"], one["content"]) for one in given["messages"]][:2] == [("system", "Be brief."), ("user", "Name a sea.")]
        assert len(load_file(file, columns={one: one for one in row}).rows[0]["messages"]) == 2  # left out on purpose
    for blank in (None, "", []):
        assert len(load_file(write_file(tmp_path / "y.jsonl", [{**row, "system": blank, "history": blank}])).rows[0]["messages"]) == 2
    with pytest.raises(PedigreeError, match="the row has history, which is not read"):
        load_file(write_file(tmp_path / "z.jsonl", [{**row, "history": [["Hello.", "Hello!"]]}]))


def test_a_system_prompt_beside_another_system_turn_is_refused_unless_both_are_equal():
    own = {"messages": [{"role": "system", "content": "Be brief."}, *ASKED, *ANSWERED]}
    assert example_of({**own, "system": "Be brief."}).messages == own["messages"][:2]
    with pytest.raises(ValueError, match="a column system and another system turn"):
        example_of({**own, "system": "Be long."})
    with pytest.raises(ValueError, match="system is a list, not a text"):
        example_of({"prompt": "a", "completion": "b", "system": ["Be brief."]})


@pytest.mark.parametrize(("label", "score"), [(True, 1), (False, 0), (1, 1), (0, 0), (1.0, 1), ("true", 1), ("False", 0)])
def test_labels_are_read_as_tables_and_text_have_them(tmp_path, label, score):
    (row,) = load_file(write_file(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b", "label": label}]), "preference").rows
    assert row["answers"][0]["score"] == score


@pytest.mark.parametrize("label", [True, 1, 1.0, "true"])
def test_a_label_comes_before_a_score_in_each_of_its_forms(tmp_path, label):
    """Scores beside labels are those of a model."""
    row = {"prompt": "a", "completion": "b", "label": label, "score": 0.3}
    (made,) = load_file(write_file(tmp_path / "x.jsonl", [row]), "preference").rows
    assert made["answers"][0]["score"] == 1


@pytest.mark.parametrize("label", ["good", 0.5, -1, 2, [True], "1.0"])
def test_a_label_that_is_neither_true_nor_false_is_named(tmp_path, label):
    row = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(PedigreeError, match=r"x.jsonl:1: label .* is neither true \(a good answer\) nor false"):
        load_file(write_file(tmp_path / "x.jsonl", [row]), "preference")
    assert load_file(tmp_path / "x.jsonl").rows  # a conversation has no use for it
    (scored,) = load_file(write_file(tmp_path / "y.jsonl", [{**row, "score": 0.7}]), "preference").rows
    assert scored["answers"][0]["score"] == 0.7


def test_roles_are_known_in_any_case_and_unknown_ones_and_keys_are_named():
    asked = {"role": " Human", "content": "Hello."}
    assert example_of({"messages": [{"role": "System", "content": "x"}, asked, {"role": "model", "content": "Hello!"}]}).messages == [
        {"role": "system", "content": "x"}, {"role": "user", "content": "Hello."},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="message 1 has role 'Bot', which is none of"):
        example_of({"messages": [asked, {"role": "Bot", "content": "Hello!"}]})
    with pytest.raises(ValueError, match=r"message 0 has from, text and is not \{role, content\}"):
        example_of({"conversations": [{"from": "human", "text": "Hello."}]})


def test_an_answer_of_another_type_is_not_called_empty():
    with pytest.raises(ValueError, match="the answer is a list, not a text"):
        example_of({"instruction": "Name two.", "output": ["a", "b"]})
