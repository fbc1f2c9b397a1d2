"""Conversations whose turns do not alternate: refused with their count, or cut, joined, dropped or kept as a source says."""

from pathlib import Path
from typing import Any

import pytest
from row_reading import Loaded, load_file, write_file

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.row_sources import Files, OutOfTurn, RecordType
from pedigree.data.records.messages import FAULTS, message_problem

ROLES = {"s": "system", "u": "user", "a": "assistant"}


def turns(written: str) -> list[dict[str, str]]:
    """ "s:x u:y a:z" as messages."""
    return [{"role": ROLES[one[0]], "content": one[2:]} for one in written.split()]


def shown(messages: list[dict[str, Any]]) -> str:
    return " ".join(f"{one['role'][0]}:{one['content']}" for one in messages).replace("\n\n", "+")


def read(folder: Path, rows: list[Any], record: RecordType = "conversation", **fields: Any) -> Loaded:
    file = write_file(folder / "x.jsonl", [row if isinstance(row, dict) else {"messages": turns(row)} for row in rows])
    return load_file(file, record, **fields)


GOOD = "u:1 a:2"
FAULTY = {
    "assistant_first": ["a:0 u:1 a:2", "s:0 a:0 u:1 a:2"],
    "same_role": ["u:1 u:2 a:3", "u:1 a:2 a:3", "s:0 s:1 u:2 a:3", "u:1 a:2 u:3 u:4 u:5 a:6"],
    "late_system": ["u:1 s:2 a:3", "u:1 a:2 s:3 u:4 a:5"],
    "user_last": ["u:1 a:2 u:3"],
}


@pytest.mark.parametrize("fault", FAULTY)
def test_each_fault_is_refused_by_default_with_the_number_of_rows_and_the_option(tmp_path, fault):
    rows = [GOOD, *FAULTY[fault], GOOD]
    with pytest.raises(
        PedigreeError, match=rf"x: {len(rows) - 2} malformed rows of {len(rows)}, .*\n  x.jsonl:2\b.*: .*see `out_of_turn.{fault}`"
    ):
        read(tmp_path, rows)


@pytest.mark.parametrize("fault", FAULTY)
def test_each_fault_can_be_dropped_which_is_counted_by_its_name_and_needs_no_leave_for_bad_rows(tmp_path, fault):
    loaded = read(tmp_path, [GOOD, *FAULTY[fault], GOOD], out_of_turn={fault: "drop"})
    assert [shown(row["messages"]) for row in loaded.rows] == [GOOD, GOOD]
    assert [row.out_of_turn for row in loaded.bad] == [fault] * len(FAULTY[fault])
    with pytest.raises(PedigreeError, match=rf"x: 1 malformed rows of {len(FAULTY[fault]) + 1}"):  # others still are too many
        read(tmp_path, [*FAULTY[fault], {"messages": []}], out_of_turn={fault: "drop"})


MENDED = [
    ("assistant_first", "cut", "a:0 u:1 a:2", "u:1 a:2"),
    ("assistant_first", "cut", "s:0 a:0 a:0 u:1 a:2", "s:0 u:1 a:2"),
    ("assistant_first", "cut", "a:0 s:0 u:1 a:2", "s:0 u:1 a:2"),
    ("same_role", "join", "u:1 u:2 a:3", "u:1+2 a:3"),
    ("same_role", "join", "u:1 a:2 a:3", "u:1 a:2+3"),
    ("same_role", "join", "s:0 s:1 u:2 u:3 u:4 a:5 u:6 a:7 a:8 a:9", "s:0+1 u:2+3+4 a:5 u:6 a:7+8+9"),
    ("late_system", "cut", "s:0 u:1 a:2 s:3 u:4 a:5", "s:0 u:1 a:2 u:4 a:5"),
    ("late_system", "cut", "u:1 a:2 s:3", "u:1 a:2"),
    ("late_system", "join", "u:1 a:2 s:3 u:4 a:5", "u:1 a:2 u:3+4 a:5"),
    ("late_system", "join", "u:1 s:2 a:3", "u:1+2 a:3"),
    ("late_system", "join", "u:1 s:2 u:3 a:4", "u:1+2+3 a:4"),
    ("late_system", "join", "u:1 a:2 s:3 a:4", "u:1 a:2 u:3 a:4"),
    ("user_last", "cut", "u:1 a:2 u:3", "u:1 a:2"),
]


@pytest.mark.parametrize(("fault", "rule", "given", "expected"), MENDED)
def test_turns_are_cut_and_joined(tmp_path, fault, rule, given, expected):
    (row,) = read(tmp_path, [given], out_of_turn={fault: rule}).rows
    assert shown(row["messages"]) == expected


def test_rules_apply_together_and_leave_what_is_in_turn(tmp_path):
    every = {"assistant_first": "cut", "same_role": "join", "late_system": "cut", "user_last": "cut"}
    rows = ["a:0 u:1 s:2 u:3 a:4 a:5 u:6 u:7", GOOD, "s:0 u:1 a:2 u:3 a:4"]
    assert [shown(row["messages"]) for row in read(tmp_path, rows, out_of_turn=every).rows] == ["u:1+3 a:4+5", *rows[1:]]
    plain = read(tmp_path, rows[1:])
    assert [row["id"] for row in read(tmp_path, rows[1:], out_of_turn=every).rows] == [row["id"] for row in plain.rows]


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_each_fault_can_be_kept(tmp_path, fault):
    loaded = read(tmp_path, FAULTY[fault], out_of_turn={fault: "keep"})
    assert [shown(row["messages"]) for row in loaded.rows] == FAULTY[fault]
    for other in FAULTS - {fault}:
        with pytest.raises(PedigreeError, match=f"see `out_of_turn.{other}`"):
            read(tmp_path, FAULTY[other][:1], out_of_turn={fault: "keep"})


def test_a_kept_answer_after_another_has_its_beginning_in_the_marks(tmp_path):
    marked = [turns("u:1")[0], {**turns("a:2")[0], "train": False}, {**turns("a:3")[0], "train": True}]
    (row,) = read(tmp_path, [{"messages": marked}], out_of_turn={"same_role": "keep"}).rows
    assert row["messages"] == marked
    with pytest.raises(PedigreeError, match="message 2 has another mark or weight than the turn before, to which it is joined"):
        read(tmp_path, [{"messages": marked}], out_of_turn={"same_role": "join"})


def test_a_prompt_ends_with_the_user_and_the_beginning_of_a_pair_is_mended_too(tmp_path):
    assert shown(read(tmp_path, ["u:1 a:2 u:3"], "prompt").rows[0]["messages"]) == "u:1 a:2 u:3"
    assert shown(read(tmp_path, ["a:0 u:1"], "prompt", out_of_turn={"assistant_first": "keep"}).rows[0]["messages"]) == "a:0 u:1"
    pair = {"prompt": turns("a:0 u:1 u:2"), "chosen": "b", "rejected": "c"}
    whole = {"chosen": turns("a:0 u:1 u:2 a:b"), "rejected": turns("a:0 u:1 u:2 a:c")}
    rules = {"assistant_first": "cut", "same_role": "join"}
    assert [shown(row["messages"]) for row in read(tmp_path, [pair, whole], "preference", out_of_turn=rules).rows] == ["u:1+2", "u:1+2"]
    (row,) = read(tmp_path, [{"prompt": turns("u:1 a:2"), "completion": "3"}], out_of_turn={"same_role": "join"}).rows
    assert shown(row["messages"]) == "u:1 a:2+3"


@pytest.mark.parametrize("given", ["a:1", "s:0 a:1", "a:1 a:2"])
def test_a_conversation_without_a_user_is_never_kept(tmp_path, given):
    everything = dict.fromkeys(FAULTS, "keep")
    with pytest.raises(PedigreeError, match="there is no turn of the user"):
        read(tmp_path, [given], out_of_turn=everything)


def test_tools_keep_their_own_order(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [{"messages": [*turns("u:1"), call, {"role": "tool", "content": "2"}, *turns("a:3 a:4")]}]
    (row,) = read(tmp_path, rows, out_of_turn={"same_role": "join"}).rows
    assert [one["role"] for one in row["messages"]] == ["user", "call", "tool", "assistant"] and row["messages"][-1]["content"] == "3\n\n4"
    with pytest.raises(PedigreeError, match=r"turn 2 is the assistant's where the tool's is due\n"):  # a call without a result
        read(tmp_path, [{"messages": [*turns("u:1"), call, *turns("a:3")]}], out_of_turn=dict.fromkeys(FAULTS, "keep"))


def test_refusing_everything_is_no_part_of_a_sources_identity():
    plain = Files.model_validate({"type": "files", "path": "x.jsonl"})
    written = Files.model_validate({"type": "files", "path": "x.jsonl", "out_of_turn": {"same_role": "refuse"}})
    assert plain.model_dump(mode="json") == written.model_dump(mode="json") and "out_of_turn" not in plain.model_dump(mode="json")
    joined = Files.model_validate({"type": "files", "path": "x.jsonl", "out_of_turn": {"same_role": "join"}})
    assert Files.model_validate(joined.model_dump(mode="json")) == joined and joined.out_of_turn == OutOfTurn(same_role="join")


def test_what_was_kept_once_is_well_formed_later():
    for rows in (FAULTY[fault] for fault in FAULTS):
        assert all(message_problem(turns(row), "assistant", FAULTS) is None and message_problem(turns(row), "assistant") for row in rows)
