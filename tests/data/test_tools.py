"""Tools in conversations: what is a conversation with them, what is kept of it, and that whatever looks at texts sees theirs."""

import json
import re

import pytest
from pyarrow import Table, parquet

from pedigree.configs.rows.filters import ControlTokens, EmptyOrRepeatedTurns, Keywords, Pattern, Turns
from pedigree.data.chat.tools import calls_in, tools_in, turns_of
from pedigree.data.chat.turns import messages_from
from pedigree.data.contamination.decontamination import Index
from pedigree.data.expectations import row_facts
from pedigree.data.expectations.row_statistics import noted
from pedigree.data.filters.row_filters import evidence_of
from pedigree.data.records import records
from pedigree.data.records.messages import FAULTS, ROW_FAULTS, message_problem
from pedigree.data.sources import row_files
from pedigree.data.sources.examples import example_in as made_example
from pedigree.data.sources.examples import record_of
from pedigree.data.sources.layouts import example_of
from pedigree.pipelines.lineage.trace import RowQuery

PARAMETERS = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(**arguments):
    return turn("call", json.dumps({"name": "look", "arguments": arguments}))


def asked(**arguments):
    """A call as OpenAI has it."""
    return {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}


OF_LETTER = {
    "s": turn("system", "Be brief."),
    "u": turn("user", "Look."),
    "a": turn("assistant", "I look."),
    "c": call(),
    "t": turn("tool", ""),
}
SPELLED = turn("assistant", "<tool_call>\n{}\n</tool_call>")


@pytest.mark.parametrize("turns", ["uc", "uac", "ucta", "suacctta", "uctcta", "uctauctta", "uctac"])
def test_a_turn_may_end_with_calls_and_goes_on_after_their_results(turns):
    assert message_problem([OF_LETTER[letter] for letter in turns], "assistant") is None


@pytest.mark.parametrize("turns", ["u", "uct", "uactt", "uctct", "uctau"])
def test_an_answer_is_asked_for_by_a_user_or_a_result(turns):
    assert message_problem([OF_LETTER[letter] for letter in turns], "user") is None


@pytest.mark.parametrize(
    ("turns", "last", "problem"),
    [
        ("uta", "assistant", "turn 1 is the tool's where the assistant's is due"),
        ("ata", "assistant", "turn 0 is the assistant's where the user's is due: see `out_of_turn.assistant_first`"),
        ("uata", "assistant", "turn 2 is the result of a call that was not made"),
        ("uca", "assistant", "turn 2 is the assistant's where the tool's is due"),
        ("ucua", "assistant", "turn 2 is the user's where the tool's is due"),
        ("uctua", "assistant", "turn 3 is the user's where the assistant's is due"),
        ("uct", "assistant", "the last turn is the tool's, not the assistant's"),
        ("uc", "user", "the result of the last call is missing"),
    ],
)
def test_a_call_without_a_result_and_a_result_without_a_call_are_told(turns, last, problem):
    assert message_problem([OF_LETTER[letter] for letter in turns], last) == problem


def test_a_result_may_follow_a_call_that_an_environment_read():
    turns = [OF_LETTER[letter] for letter in "uata"]
    assert message_problem(turns, "assistant", ROW_FAULTS) is None and message_problem(turns, "assistant", FAULTS) is not None
    assert message_problem([OF_LETTER[letter] for letter in "utaua"], "assistant", ROW_FAULTS) is not None


def test_a_call_may_be_spelled_out_in_what_is_said():
    assert message_problem([OF_LETTER["u"], SPELLED, OF_LETTER["t"], OF_LETTER["a"]], "assistant") is None


@pytest.mark.parametrize(
    "content", ["look()", "[]", '{"name": "look"}', '{"name": 1, "arguments": {}}', '{"name": "a", "arguments": []}', "[" * 99_999]
)
def test_a_call_that_is_none_is_no_message(content):
    assert message_problem([OF_LETTER["u"], turn("call", content)], "assistant") == "message 1 (call) is no {name, arguments} as JSON"


def test_names_keep_their_order_from_the_file_to_the_rows(tmp_path):
    """A model learns to write arguments as they were written; columns of JSON sort them."""
    example = example_of({"messages": [turn("user", "Look."), turn("assistant", None, tool_calls=[asked(z=1, a=2)])], "tools": TOOLS})
    row = {"id": "i", **record_of(example, "conversation", None, "s")}
    records.save(tmp_path, "conversation", [row])
    (kept,) = records.stream(tmp_path / "payload")
    assert kept == row and kept["messages"][1]["content"] == '{"name": "look", "arguments": {"z": 1, "a": 2}}'
    assert kept["template_arguments"]["tools"] == json.dumps(TOOLS)


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])], [TOOLS[0]["function"]]])
@pytest.mark.parametrize("column", ["tools", "functions", "template_arguments"])
def test_what_is_offered_has_one_form(given, column):
    row = {"messages": [turn("user", "Look.")], column: {"tools": given} if column == "template_arguments" else given}
    assert example_of(row).template_arguments == {"tools": json.dumps(TOOLS)}


def test_what_a_table_fills_in_is_no_argument(tmp_path):
    """In Parquet each call has the arguments of all, null where it has none."""
    rows = [
        {"messages": [turn("user", "Look."), turn("assistant", None, tool_calls=[asked(**given)])], "tools": TOOLS}
        for given in ({"z": "sea"}, {"a": {"deep": [1]}})
    ]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "rows.parquet")
    calls = [example_of(row).calls for _, row in row_files.read(tmp_path / "rows.parquet")]
    assert calls == [('{"name": "look", "arguments": {"z": "sea"}}',), ('{"name": "look", "arguments": {"a": {"deep": [1]}}}',)]


@pytest.mark.parametrize("record", ["conversation", "prompt"])
def test_a_row_of_a_stage_with_calls_is_the_same_again_and_a_prompt_without_its_last_turn(record):
    messages = [OF_LETTER["u"], call(), OF_LETTER["t"], turn("assistant", "Again.", train=False), call(z=1) | {"train": False}]
    made = record_of(made_example({"source": "s", "messages": messages}), record, None, "s")
    assert made["messages"] == (messages if record == "conversation" else messages[:3])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "Look.", "chosen": [turn("assistant", None, tool_calls=[asked()])], "rejected": "No."}, "chosen ends with a call"),
        ({"prompt": "Look.", "chosen": "So.", "rejected": "No.", "tool_calls": [asked()]}, "the row has tool_calls and chosen, rejected"),
        ({"messages": [turn("user", "Look."), turn("assistant", None, tool_calls=[asked()])], "label": True}, "the answer calls tools"),
    ],
)
def test_answers_that_are_compared_call_no_tools(row, says):
    with pytest.raises(ValueError, match=says):
        record_of(example_of(row), "preference", None, "s")


ITEM = {"id": "i", "question": 'Which "sea" lies\nbetween the capes of Horn and of Good Hope, by the oldest map?', "messages": []}
PLACES = {
    "result": ({"messages": [OF_LETTER["u"], call(), turn("tool", f"Found: {ITEM['question']}"), OF_LETTER["a"]]}, "user"),
    "call": ({"messages": [OF_LETTER["u"], call(query=[{"text": ITEM["question"]}])]}, "assistant"),
    "tool": (
        {
            "messages": [OF_LETTER["u"], OF_LETTER["a"]],
            "template_arguments": {"tools": json.dumps([{"function": {"name": "look", "description": ITEM["question"]}}])},
        },
        "system",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_item_is_found_in_a_result_a_call_and_a_tool_though_json_writes_line_ends_as_letters(place):
    row, searched_with = PLACES[place]
    assert [overlap.score for overlap in Index({"b": [ITEM]}, 8).overlaps([row], 0.5)[0]] == [1.0]
    for turns in ("system", "user", "assistant"):
        assert len(Index({"b": [ITEM]}, 8, [turns]).overlaps([row], 0.5)[0]) == (turns == searched_with)


@pytest.mark.parametrize("place", PLACES)
def test_a_row_is_traced_by_what_stands_in_a_result_a_call_or_a_tool(place):
    row, _ = PLACES[place]
    assert RowQuery(text='"sea" lies between the capes', contains=True).is_in({"id": "r", **row})
    assert not RowQuery(text='"sea" lies behind the capes', contains=True).is_in({"id": "r", **row})


AGENT = {
    "messages": [
        *(turn("user", "Look."), call(), turn("tool", "")),
        *(turn("assistant", "Again."), call(a="x"), turn("tool", "x"), turn("assistant", "Done.")),
    ]
}


def test_turns_are_the_users_and_the_assistants():
    """Look. | a call | Again. and a call | Done. Results are nobody's turn, and a call belongs to what is said before it."""
    assert [*evidence_of(Turns(type="turns", max=3), [AGENT])] == ["4 > 3"]
    assert [*evidence_of(Turns(type="turns", min=4, max=4), [AGENT])] == [None]
    counts = {name: column.to_pylist() for name, column in noted([AGENT]).items()}
    assert counts == {"turns of system": [0], "turns of user": [1], "turns of assistant": [3], "turns of call": [2], "turns of tool": [2]}
    facts = row_facts.look(["turns", "prompt_characters", "answer_characters"], [{"messages": AGENT["messages"][:5]}])
    before, answer = ["Look.", call()["content"]], f"Again.\n{call(a='x')['content']}"
    assert {name: column.to_pylist() for name, column in facts.items()} == {
        "turns": [3],
        "prompt_characters": [len("".join(before))],
        "answer_characters": [len(answer)],
    }


def test_filters_see_what_is_called_and_what_comes_of_it_where_they_are_asked_to():
    def drops(regex, *roles):
        return [*evidence_of(Pattern(type="pattern", regex=regex, roles=roles), [AGENT])]

    assert drops('"a": "x"', "call") == ['"a": "x"'] and drops("^x$", "tool") == ["x"]
    assert drops("x", "user", "assistant", "system") == [None]
    assert [*evidence_of(EmptyOrRepeatedTurns(type="empty_or_repeated_turns"), [AGENT])] == [None]  # a tool may say nothing


@pytest.mark.parametrize("place", ["call", "tool"])
def test_words_and_control_tokens_are_found_in_calls_and_tools_though_json_writes_them_otherwise(place):
    given = {"a": 'the "big"\nsecret', "b": "<|e\\nd|>"}
    offers = json.dumps([{"type": "function", "function": {"name": "look", "description": given["a"], "enum": [given["b"]]}}])
    row = {
        "messages": [OF_LETTER["u"], call(**given) if place == "call" else OF_LETTER["a"]],
        "template_arguments": {"tools": offers} if place == "tool" else {},
    }
    assert [*evidence_of(Keywords(type="keywords", words=('"big"\nsecret',)), [row])] == ['"big"\nsecret']
    assert [*evidence_of(ControlTokens(type="control_tokens", tokens=("<|e\\nd|>",)), [row])] == ["<|e\\nd|>"]


@pytest.mark.parametrize(("turns", "repeats"), [("uactactu", False), ("uactacta", False), ("uauacta", True), ("uauact", False)])
def test_words_beside_a_call_are_no_answer_that_could_be_repeated(turns, repeats):
    row = {"messages": [OF_LETTER[letter] for letter in turns]}
    (found,) = evidence_of(EmptyOrRepeatedTurns(type="empty_or_repeated_turns"), [row])
    assert (found is not None) is repeats


@pytest.mark.parametrize("of", ["text", "table"])
def test_what_is_nested_too_deeply_is_a_bad_row_and_no_end_of_the_stage(of):
    deep = []
    for _ in range(99_999):
        deep = [deep]
    given = "[" * 99_999 if of == "text" else deep
    with pytest.raises(ValueError, match="tools is nested too deeply"):
        tools_in({"tools": given})
    with pytest.raises(ValueError, match="nested too deeply"):
        calls_in({"name": "look", "arguments": {"a": given} if of == "table" else given}, "message 1")


@pytest.mark.parametrize("marks", [({"weight": 1}, {"weight": 0}), ({"train": False}, {"train": True}), ({"train": True}, {})])
def test_a_call_with_another_mark_than_its_turn_is_refused_and_one_with_the_same_is_not(marks):
    said, called = marks
    turns = [turn("user", "Look."), turn("assistant", "I look.", **said), {"role": "function_call", "content": call()["content"]}]
    with pytest.raises(ValueError, match="a call has another mark or weight than the turn that it belongs to: give both the same"):
        messages_from([*turns[:2], turns[2] | called])
    _, *both = messages_from([*turns[:2], turns[2] | said])
    assert [message["train"] for message in both] == [bool(value) for value in said.values()] * 2


def test_a_call_has_the_same_id_whatever_follows_and_its_result_names_it():
    whole = [OF_LETTER[letter] for letter in "uccttatuaccttt"]
    turns = turns_of(whole)
    named = [turn.get("tool_call_id") for turn in turns if turn["role"] == "tool"]
    known = [call["id"] for turn in turns for call in turn.get("tool_calls", [])]
    assert named == [*known[:2], None, *known[2:], None]
    assert len(set(known)) == 4 and all(re.fullmatch("[0-9a-zA-Z]{9}", one) for one in known)
    spelled = turns_of([*(OF_LETTER[letter] for letter in "ucctau"), SPELLED, OF_LETTER["t"]])
    assert "tool_call_id" in spelled[2] and "tool_call_id" not in spelled[-1]  # its call is none of those before
    for end in (3, 4, 5, 6, 7, 8, 12):
        begun = turns_of(whole[:end])
        assert begun == turns[: len(begun)]


def by_id(*results: tuple[str | None, str], calls: str = "ab", then: tuple[dict, ...] = ()) -> list[str]:
    """The results of a row whose calls have these ids, in the order of the calls."""
    called = turn("assistant", None, tool_calls=[asked(n=number) | {"id": name} for number, name in enumerate(calls)])
    told = [turn("tool", text, tool_call_id=name) for name, text in results]
    return [message["content"] for message in messages_from([turn("user", "Look."), called, *told, *then]) if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("results", "calls", "ordered"),
    [
        ([("b", "of b"), ("a", "of a")], "ab", ["of a", "of b"]),
        ([("a", "of a")], "ab", ["of a"]),  # the conversation may end there
        ([(None, "of a"), ("b", "of b")], "ab", ["of a", "of b"]),
        ([("b", "of b"), (None, "of a")], "ab", ["of a", "of b"]),
        ([("a", "first"), ("a", "second")], "aa", ["first", "second"]),
        ([("c", "of c"), ("a", "first"), ("a", "second")], "aac", ["first", "second", "of c"]),
    ],
)
def test_results_are_those_of_the_first_calls_in_whatever_order_they_come(results, calls, ordered):
    assert by_id(*results, calls=calls) == ordered


@pytest.mark.parametrize(
    ("results", "says"),
    [
        ([("b", "of b")], "the call 'a' has no result, and one after it has"),
        ([("c", "of c"), ("a", "of a")], "the call 'b' has no result, and one after it has"),
        ([("a", "first"), ("a", "second")], "message 3 is one more result of the call 'a'"),
        ([("a", "of a"), ("b", "of b"), ("a", "second")], "message 4 is one more result of the call 'a'"),
        ([("d", "of none")], "message 2 is the result of the call 'd', which is none of those before it"),
    ],
)
def test_no_result_is_given_to_another_call(results, says):
    for then in ((), (turn("assistant", "So it is."),)):  # also where the conversation goes on
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            by_id(*results, calls="abc", then=then)
