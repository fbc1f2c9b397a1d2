"""Layouts of well-known datasets beyond the rows in `formats/`: rare forms, and reasons for refusing a row."""

from typing import Any

import pytest

from pedigree.data.sources.attributes import grouped
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
