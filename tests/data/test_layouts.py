"""Layouts of well-known datasets beyond the rows in `formats/`: rare forms, and reasons for refusing a row."""

from typing import Any

import pyarrow as pa
import pytest

from pedigree.data.sources.attributes import grouped
from pedigree.data.sources.examples import record_of
from pedigree.data.sources.layouts import example_of, unfolded
from pedigree.data.sources.row_files import Unreadable

HUMAN, ASSISTANT = "\n\nHuman: ", "\n\nAssistant: "


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def pair(row: Any) -> tuple[list[Any], list[str]]:
    example = example_of(row)
    return example.messages, [answer["text"] for answer in example.answers]


SAME = f"{HUMAN}How old is it?{ASSISTANT}Which one?{HUMAN}The tree.{ASSISTANT}"


def test_a_prompt_beside_texts_leaves_them_as_they_are():
    """What is preferred may itself be a transcript."""
    assert pair({"prompt": "Write a dialogue.", "chosen": SAME, "rejected": "No."}) == ([turn("user", "Write a dialogue.")], [SAME, "No."])


def test_a_prompt_of_ranked_answers_may_be_a_text():
    answers = [{"answer": f"answer {rank}", "rank": rank} for rank in (3.0, 1.0, 2.0)]
    expected = [turn("user", "Name a sea.")], ["answer 1.0", "answer 2.0", "answer 3.0"]
    assert pair({"prompt": "Name a sea.", "answers": answers}) == expected


def transcripts(before: str) -> dict[str, str]:
    return {side: f"{before}{ASSISTANT}{side}" for side in ("chosen", "rejected")}


def compared(preference: Any) -> dict[str, Any]:
    return {"context": "Name a sea.", "response1": "one", "response2": "two", "overall_preference": preference}


def test_a_context_may_be_a_text():
    assert pair(compared(-3)) == ([turn("user", "Name a sea.")], ["one", "two"])


def node(role: str, text: str, *replies: dict[str, Any], rank: int | None = None) -> dict[str, Any]:
    return {"text": text, "role": role, "rank": rank, "lang": "en", "replies": list(replies)}


@pytest.mark.parametrize("record", ["conversation", "preference"])
@pytest.mark.parametrize("replies", ["Hi!", ["Hi!", node("assistant", "Hello!")], {"0": node("assistant", "Hi!")}])
def test_a_tree_with_replies_that_are_no_turns_is_a_bad_row(record, replies):
    broken = {"prompt": node("prompter", "Hello.") | {"replies": replies}}
    ((place, part),) = unfolded("x.jsonl:1", broken, record)
    assert place == "x.jsonl:1" and isinstance(part, Unreadable) and "are no list of turns" in part.reason


def test_each_answer_of_a_tree_has_a_place():
    tree = {"prompt": node("prompter", "Hello.", node("assistant", "Hello!", node("prompter", "And?")), node("assistant", "Hi!"))}
    assert [(place, part["messages"][-1]["content"]) for place, part in unfolded("x.jsonl:1", tree, "conversation")] == [
        ("x.jsonl:1/0", "Hello!"),
        ("x.jsonl:1/1", "Hi!"),
    ]


def test_a_tree_of_ten_thousand_turns_is_read():
    deep = node("assistant", "end")
    for number in range(9_999):
        deep = node(("prompter", "assistant")[number % 2], str(number), deep)
    ((place, part),) = unfolded("x.jsonl:1", {"prompt": deep}, "conversation")
    assert place == "x.jsonl:1/0" and len(part["messages"]) == 10_000


def test_ratings_that_weigh_the_same_are_a_tie_whatever_floats_make_of_them():
    weights = {"a": 0.1, "b": 0.2, "c": 0.3}
    first, second = {"response": "x", "a": 1, "b": 1, "c": 0}, {"response": "y", "a": 0, "b": 0, "c": 1}
    ((place, tie),) = grouped([("0", {"prompt": "p", **first}), ("1", {"prompt": "p", **second})], weights)
    assert 0.1 + 0.2 != 0.3 and place == "0" and tie.reason == "all 2 responses have the score 0.3: none is the better one"


def test_rows_without_a_response_are_bad_rows_and_the_others_stay():
    rows = [{"prompt": "Hello."}, {"prompt": "Hello.", "response": "Hello!", "help": 4}, "text"]
    found = [row for _, row in grouped([(str(number), row) for number, row in enumerate(rows)], {"help": 1.0})]
    assert [one.reason for one in found if isinstance(one, Unreadable)] == ["the row has no response"] * 2
    assert [one["score"] for one in found if not isinstance(one, Unreadable)] == [4.0]


def rated(**asked: Any) -> list[tuple[str, Any]]:
    """Two rows, whose responses are rated otherwise; each column of `asked` has one value for either."""
    rows = [{name: values[number] for name, values in asked.items()} for number in range(2)]
    return [(str(number), {**row, "response": f"answer {number}", "help": number}) for number, row in enumerate(rows)]


ONE, OTHER = [turn("user", "Name a sea.")], [turn("user", "Name a lake.")]
TOOLS = [{"name": "look"}], [{"name": "find"}]
APART = {
    **{name: {name: (ONE, OTHER)} for name in ("messages", "conversations", "conversation", "context_messages", "prompt")},
    **{name: {"prompt": ("Hi.", "Hi."), name: ("Be brief.", "Be long.")} for name in ("system", "system_prompt")},
    "history": {"prompt": ("Hi.", "Hi."), "history": (None, [["Hello.", "Hello!"]])},
    "images": {"prompt": ("Hi.", "Hi."), "images": ([], ["x.png"])},
    "tools": {"prompt": ("Hi.", "Hi."), "tools": TOOLS},
    "functions": {"prompt": ("Hi.", "Hi."), "functions": TOOLS},
}


@pytest.mark.parametrize("what", APART)
def test_rated_responses_to_something_else_are_not_compared(what):
    found = list(grouped(rated(**APART[what]), {"help": 1.0}))
    assert [(place, row["response"], row["score"]) for place, row in found] == [("0", "answer 0", 0.0), ("1", "answer 1", 1.0)]


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation", "context_messages", "prompt"])
def test_rated_responses_to_the_same_turns_are_compared_whichever_column_has_them(column):
    ((_, row),) = grouped(rated(**{column: (ONE, ONE), "system": (None, ""), "tools": ([], None)}), {"help": 1.0})
    example = example_of(row, record="preference")
    assert example.messages == ONE and [(one["text"], one["score"]) for one in example.answers] == [("answer 1", 1), ("answer 0", 0)]


def test_a_rated_response_to_nothing_is_a_bad_row_by_itself():
    found = list(grouped(rated(question=("Hi.", "Hi.")), {"help": 1.0}))
    assert [place for place, _ in found] == ["0", "1"] and all("the row has no prompt: none of messages" in row.reason for _, row in found)


def test_a_rated_response_that_was_cut_off_stays_so():
    ((_, row),) = grouped(rated(prompt=("Hi.", "Hi."), finish_reason=("stop", "length")), {"help": 1.0})
    assert [one.get("finish_reason") for one in example_of(row).answers] == ["length", None]


@pytest.mark.parametrize(("values", "score"), [([0.1, 0.3], 0.3), ([0.7, 0.9], 0.9)])
def test_ratings_in_32_bits_are_what_was_written(values, score):
    ratings = pa.array(values, pa.float32()).to_pylist()
    rows = [(str(number), {"prompt": "Hi.", "response": str(number), "help": rating}) for number, rating in enumerate(ratings)]
    ((_, row),) = grouped(rows, {"help": 1.0})
    assert row["answers"][1]["score"] == score


def test_instructions_have_verifiers_like_prompts():
    asked = {"instruction": "Add the numbers.", "input": "1 and 1"}
    math = {"name": "math", "answer": "2"}
    assert example_of({**asked, "ground_truth": 2}, "math").verifier == math
    assert example_of({**asked, "dataset": "MATH", "ground_truth": "2", "output": "It is 2."}).verifier == math
    assert example_of({**asked, "verifier": {"name": "math", "answer": 2.0, "tests": None}}).verifier == math
    with pytest.raises(ValueError, match="dataset 'chess' is none of the verifiers"):
        example_of({**asked, "dataset": "chess", "ground_truth": "2"})


ASKED = {"instruction": "Add the numbers.", "input": "1 and 1"}
CALL = {"name": "add", "arguments": {"a": 1, "b": 1}}


@pytest.mark.parametrize(
    ("columns", "answers"),
    [
        ({"output": "2"}, [("2", None)]),
        ({"response": "2"}, [("2", None)]),
        ({"completion": "2", "label": "0"}, [("2", 0.0)]),
        ({"chosen": "2", "rejected": "3"}, [("2", None), ("3", None)]),
        ({"chosen": [turn("assistant", "2")], "rejected": [turn("assistant", "3")]}, [("2", None), ("3", None)]),
        ({"answers": ["2", "3"]}, [("2", None), ("3", None)]),
        ({"answers": [{"answer": "3", "rank": 2}, {"answer": "2", "rank": 1}]}, [("2", None), ("3", None)]),
        ({"responses": ["3", "2"], "rewards": [0.1, 0.9]}, [("2", 0.9), ("3", 0.1)]),
        ({"tool_calls": [CALL]}, [("", None)]),
    ],
)  # fmt: skip
def test_an_instruction_is_a_prompt_in_every_layout(columns, answers):
    found = example_of({**ASKED, **columns})
    assert found.messages == [{"role": "user", "content": "Add the numbers.\n\n1 and 1"}]
    assert [(one["text"], one["score"]) for one in found.answers] == answers
    assert found == example_of(
        {
            "prompt": "Add the numbers.\n\n1 and 1",
            **({"completion" if name == "output" else name: value for name, value in columns.items()}),
        }
    )


def test_the_context_of_a_row_of_dolly_belongs_to_its_prompt():
    dolly = {"instruction": "When did it open?", "context": "It opened in 1889.", "response": "In 1889.", "category": "closed_qa"}
    row = record_of(example_of(dolly, record="conversation"), "conversation", None, "dolly")
    assert row["messages"] == [
        {"role": "user", "content": "When did it open?\n\nIt opened in 1889."},
        {"role": "assistant", "content": "In 1889."},
    ]
    assert example_of({**dolly, "context": ""}).messages == [{"role": "user", "content": "When did it open?"}]
    with pytest.raises(ValueError, match="instruction and context are not both texts"):
        example_of({**dolly, "context": ["a"]})


def test_rated_responses_to_an_instruction_are_compared():
    rows = [{**ASKED, "response": text, "help": rating} for text, rating in (("3", 0.1), ("2", 0.9))]
    rows += [{**ASKED, "input": "2 and 2", "response": "4", "help": 0.5}, {"instruction": 5, "response": "4", "help": 0.5}]
    (_, ranked), (_, single), (_, wrong) = grouped([(str(number), row) for number, row in enumerate(rows)], {"help": 1.0})
    assert pair(ranked) == ([turn("user", "Add the numbers.\n\n1 and 1")], ["2", "3"])
    assert pair(single) == ([turn("user", "Add the numbers.\n\n2 and 2")], ["4"])
    assert wrong.reason == "instruction and context are not both texts"


def test_an_instruction_beside_whole_conversations_is_not_read_a_second_time():
    turns = [turn("user", "Hi."), turn("assistant", "Yes.")]
    whole = {"instruction": "Hi.", "chosen": turns, "rejected": [turns[0], turn("assistant", "No.")]}
    assert pair(whole) == (turns[:1], ["Yes.", "No."])
    found = example_of({"instruction": "Hi.", "chosen": f"{HUMAN}Hi.{ASSISTANT}Yes.", "rejected": f"{HUMAN}Hi.{ASSISTANT}No."})
    assert found.messages == turns[:1] and [one["text"] for one in found.answers] == ["Yes.", "No."]
    assert example_of({"prompt": "Hi.", "instruction": "Other.", "chosen": "Yes.", "rejected": "No."}).messages == turns[:1]
    with pytest.raises(ValueError, match="the row has tool_calls and output, and one of them alone can be the answer"):
        example_of({"instruction": "Hi.", "output": "Yes.", "tool_calls": [CALL]})


@pytest.mark.parametrize(("label", "score"), [("1", 1.0), ("0", 0.0), (" True", 1.0), ("false", 0.0), (1, 1.0), (False, 0.0)])
def test_labels_are_read_as_text_too(label, score):
    """As in rows of tables without types."""
    example = example_of({"prompt": "Hi.", "completion": "Yes.", "label": label, "score": 0.5}, record="preference")
    assert [one["score"] for one in example.answers] == [score]


REFUSED = {
    r"message 1 \(assistant\) is empty": transcripts(f"{HUMAN}Hi.{ASSISTANT}{HUMAN}Hi?"),
    "turn 1 is the user's where the assistant's is due": transcripts(f"{HUMAN}Hi.{HUMAN}Hi?"),
    "there is no prompt": {"chosen": f"{SAME}Yes.", "rejected": "No."},
    "overall_preference 'much better' is no number": compared("much better"),
    "there are no messages": {"response1": "one", "response2": "two", "overall_preference": 1},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_used_is_refused_with_its_reason(reason):
    with pytest.raises(ValueError, match=reason):
        example_of(REFUSED[reason])
