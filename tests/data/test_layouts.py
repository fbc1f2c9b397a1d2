"""Layouts of well-known preference sets and prompt collections: made rows with their quirks, and what becomes of each."""

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


def test_a_pair_of_transcripts_answers_what_they_have_in_common():
    before = [turn("user", "How old is it?"), turn("assistant", "Which one?"), turn("user", "The tree.")]
    assert pair({"chosen": f"{SAME}Ninety years.\n", "rejected": f"{SAME}No idea."}) == (before, ["Ninety years.", "No idea."])
    # a blank line within a turn is no mark
    asked = f"{HUMAN}A list, please.\n\nHumans: none.{ASSISTANT}"
    before = [turn("user", "A list, please.\n\nHumans: none.")]
    assert pair({"chosen": f"{asked}1.\n\n2.", "rejected": f"{asked}No."}) == (before, ["1.\n\n2.", "No."])


def test_a_prompt_beside_texts_leaves_them_as_they_are():
    """What is preferred may itself be a transcript."""
    assert pair({"prompt": "Write a dialogue.", "chosen": SAME, "rejected": "No."}) == ([turn("user", "Write a dialogue.")], [SAME, "No."])


def ranked(*ranks: Any, prompt: Any = f"{HUMAN}Name a sea.{ASSISTANT}") -> dict[str, Any]:
    answers = [{"answer": f"answer {rank}", "rank": rank, "model": "some"} for rank in ranks]
    return {"prompt": prompt, "answers": answers, "source": ["lmsys"]}


def test_the_answer_of_the_first_rank_is_the_best():
    assert pair(ranked(3.0, 1.0, 2.0)) == ([turn("user", "Name a sea.")], ["answer 1.0", "answer 2.0", "answer 3.0"])
    assert [answer["score"] for answer in example_of(ranked(2, 1)).answers] == [None, None]
    assert pair(ranked(1, 2, prompt="Name a sea."))[0] == [turn("user", "Name a sea.")]
    several = f"{HUMAN}Hello.{ASSISTANT}Hello!{HUMAN}Name a sea.{ASSISTANT}"
    assert pair(ranked(1, 2, prompt=several))[0] == [turn("user", "Hello."), turn("assistant", "Hello!"), turn("user", "Name a sea.")]


def transcripts(before: str) -> dict[str, str]:
    return {side: f"{before}{ASSISTANT}{side}" for side in ("chosen", "rejected")}


def compared(preference: Any, context: Any = "Name a sea.") -> dict[str, Any]:
    return {"context": context, "response1": "one", "response2": "two", "overall_preference": preference, "domain": "general"}


def test_a_preference_below_zero_is_for_the_first_response_and_the_context_may_be_a_conversation():
    assert pair(compared(-3)) == ([turn("user", "Name a sea.")], ["one", "two"])
    assert pair(compared(1)) == ([turn("user", "Name a sea.")], ["two", "one"])
    turns = [turn("system", "Be brief."), turn("user", "Hello."), turn("assistant", "Hello!"), turn("user", "Name a sea.")]
    assert pair(compared(-1, turns))[0] == turns


def test_other_names_for_messages_are_known():
    turns = [turn("user", "Name a sea."), turn("assistant", "The North Sea.")]
    for column in ("conversation", "context_messages"):
        example = example_of({column: [{**one, "language": "English", "toxic": False} for one in turns], "model": "some-4"})
        assert (example.messages, example.answer) == (turns[:1], "The North Sea.")
    prompt = example_of({"dataset": "some/prompts", "context": "Name a sea.", "context_messages": turns[:1], "id": 7})
    assert prompt.messages == turns[:1] and not prompt.answers and prompt.verifier is None


def node(role: str, text: str, *replies: dict[str, Any], rank: int | None = None) -> dict[str, Any]:
    return {"text": text, "role": role, "rank": rank, "lang": "en", "replies": list(replies)}


TREE = {
    "message_tree_id": "7",
    "prompt": node(
        "prompter", "Hello.",
        node("assistant", "Hello!", node("prompter", "And?", node("assistant", "Nothing.")), node("prompter", "Bye."), rank=1),
        node("assistant", "Hi!", node("prompter", "Who are you?"), rank=0),
        node("assistant", "What?"),
    ),
}  # fmt: skip


def said(messages: list[dict[str, str]]) -> str:
    return " ".join(message["content"] for message in messages)


def test_a_tree_is_every_way_to_a_last_answer():
    parts = dict(unfolded([("x.jsonl:1", TREE), ("x.jsonl:2", {"prompt": "a", "completion": "b"})], "conversation"))
    assert list(parts) == ["x.jsonl:1/0", "x.jsonl:1/1", "x.jsonl:1/2", "x.jsonl:2"]
    examples = [example_of(part) for part in parts.values()]
    assert [said(one.messages) for one in examples] == ["Hello. Hello! And?", "Hello.", "Hello.", "a"]
    assert [one.answer for one in examples] == ["Nothing.", "Hi!", "What?", "b"]


def test_of_a_tree_the_ranked_answers_to_one_turn_are_compared():
    ((place, part),) = unfolded([("x.jsonl:1", TREE)], "preference")
    assert place == "x.jsonl:1/0" and pair(part) == ([turn("user", "Hello.")], ["Hi!", "Hello!"])


@pytest.mark.parametrize(("record", "lacks"), [("conversation", "an answer"), ("preference", "two answers with ranks to one turn")])
def test_a_tree_that_gives_nothing_is_a_bad_row(record, lacks):
    ((place, part),) = unfolded([("x.jsonl:1", {"prompt": node("prompter", "Hello.")})], record)
    assert place == "x.jsonl:1" and isinstance(part, Unreadable) and part.reason == f"the tree of conversations lacks {lacks}"


@pytest.mark.parametrize("record", ["conversation", "preference"])
@pytest.mark.parametrize("replies", ["Hi!", ["Hi!", node("assistant", "Hello!")], {"0": node("assistant", "Hi!")}])
def test_a_tree_with_replies_that_are_no_turns_is_a_bad_row(record, replies):
    broken = {"prompt": node("prompter", "Hello.") | {"replies": replies}}
    ((place, part),) = unfolded([("x.jsonl:1", broken)], record)
    assert place == "x.jsonl:1" and isinstance(part, Unreadable) and "are no list of turns" in part.reason


def test_a_tree_of_ten_thousand_turns_is_read():
    deep = node("assistant", "end")
    for number in range(9_999):
        deep = node(("prompter", "assistant")[number % 2], str(number), deep)
    ((_, part),) = unfolded([("x.jsonl:1", {"prompt": deep})], "conversation")
    assert len(part["messages"]) == 10_000


WEIGHTS = {"helpfulness": 0.65, "correctness": 0.8, "coherence": 0.45, "complexity": 0.55, "verbosity": -0.4}
"""Of the 70B model in the paper of HelpSteer2."""


def rated(prompt: str, response: str, *ratings: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response": response, **dict(zip(WEIGHTS, ratings, strict=True))}


def weighed(*rows: Any) -> list[tuple[str, Any]]:
    return list(unfolded(grouped([(str(number), row) for number, row in enumerate(rows)], WEIGHTS), "preference"))


def test_responses_to_one_prompt_are_compared_by_the_weighted_sum_of_their_ratings():
    rows = [rated("Hello.", "Hi.", 3, 4, 4, 2, 1), rated("Hello.", "Hello!", 4, 4, 4, 2, 1), rated("Bye.", "Bye!", 4, 4, 4, 1, 1)]
    (first, pair_), (second, single) = weighed(*rows)
    assert (first, second) == ("0", "2")
    assert example_of(pair_).answers == ({"text": "Hello!", "score": 8.3}, {"text": "Hi.", "score": 7.65})
    assert example_of(single).answers == ({"text": "Bye!", "score": 7.75},)


def test_ratings_that_weigh_the_same_are_a_tie_whatever_floats_make_of_them():
    weights = {"a": 0.1, "b": 0.2, "c": 0.3}
    first, second = {"response": "x", "a": 1, "b": 1, "c": 0}, {"response": "y", "a": 0, "b": 0, "c": 1}
    ((place, tie),) = unfolded(grouped([("0", {"prompt": "p", **first}), ("1", {"prompt": "p", **second})], weights), "preference")
    assert 0.1 + 0.2 != 0.3 and place == "0" and tie.reason == "all 2 responses have the score 0.3: none is the better one"


def test_a_response_that_is_rated_wrongly_is_a_bad_row_and_the_others_stay():
    rows = [rated("Hello.", "Hi.", 3, None, 4, 2, 1), rated("Hello.", "Hello!", 4, 4, 4, 2, 1), {"prompt": "Hello."}, "text"]
    found = weighed(*rows)
    assert [one.reason for _, one in found if isinstance(one, Unreadable)] == [
        "correctness None is no number", "the row has no response", "the row has no response",
    ]  # fmt: skip
    assert [example_of(one).answer for _, one in found if not isinstance(one, Unreadable)] == ["Hello!"]


def test_a_prompt_of_several_turns_has_marks():
    several = "Hello.\n<extra_id_1>Assistant\nHello!\nWell?\n<extra_id_1>User\nName a sea."
    ((_, row),) = weighed(rated(several, "The North Sea.", 4, 4, 4, 1, 1))
    assert [tuple(message.values()) for message in example_of(row).messages] == [
        ("user", "Hello."), ("assistant", "Hello!\nWell?"), ("user", "Name a sea."),
    ]  # fmt: skip
    ((_, other),) = weighed(rated("Hello.\n<extra_id_1>Tool\nx", "Hm.", 4, 4, 4, 1, 1))
    assert other.reason == "the prompt has <extra_id_1> and neither User nor Assistant on the same line after it"


ASKED = [turn("user", "What is 6 times 7?")]
QUESTIONS = {
    "columns of its own": ("math", {"prompt": "What is 6 times 7?", "ground_truth": "42"}),
    "a whole number": ("math", {"prompt": "What is 6 times 7?", "ground_truth": 42}),
    "verl": ("math", {"prompt": ASKED, "data_source": "some", "reward_model": {"ground_truth": "42", "style": "rule"}}),
    "Open-Reasoner-Zero": ("math", [{"from": "human", "value": "What is 6 times 7?"}, {"from": "x", "ground_truth": {"value": "42"}}]),
    "GSM8K's working": ("gsm8k", {"prompt": "What is 6 times 7?", "ground_truth": "It is <<6*7=42>>42.\n#### 42"}),
    "another name beside it": ("math", {"prompt": "What is 6 times 7?", "ground_truth": "42", "dataset": "olympiads"}),
}


@pytest.mark.parametrize("form", QUESTIONS)
def test_a_recipe_may_say_what_compares_with_the_ground_truth(form):
    name, row = QUESTIONS[form]
    example = example_of(row, name)
    assert example.messages == ASKED and example.verifier == {"name": name, "answer": "42"}


@pytest.mark.parametrize("truth", [None, "", "proof", "notfound", True, float("nan"), {"a": 1}, b"4"])
def test_what_is_no_answer_is_refused(truth):
    with pytest.raises(ValueError, match="is no answer, which math compares with"):
        example_of({"prompt": "Prove it.", "ground_truth": truth}, "math")


REFUSED = {
    "chosen and rejected do not answer the same beginning": {"chosen": f"{SAME}Yes.", "rejected": f"{HUMAN}Is it?{ASSISTANT}No."},
    "the rejected answer is empty": {"chosen": f"{SAME}Yes.", "rejected": SAME},
    r"chosen does not end with the assistant's turn": {"chosen": f"{SAME}Yes.{HUMAN}Why?", "rejected": f"{SAME}Yes.{HUMAN}Why?"},
    r"message 1 \(assistant\) is empty": transcripts(f"{HUMAN}Hi.{ASSISTANT}{HUMAN}Hi?"),
    "turn 1 is the user's where the assistant's is due": transcripts(f"{HUMAN}Hi.{HUMAN}Hi?"),
    "there is no prompt": {"chosen": f"{SAME}Yes.", "rejected": "No."},
    "two answers have the rank 1, so that neither is the better one": ranked(1, 2, 1),
    r"answers with ranks are not \{answer, rank\} with a number each": ranked(1, "2"),
    "the answer is empty": {"prompt": "Name a sea.", "answers": [{"answer": " ", "rank": 1}, {"answer": "The Black Sea.", "rank": 2}]},
    "overall_preference is 0: neither response is the better one": compared(0),
    "overall_preference None is no number": compared(None),
    "overall_preference 'much better' is no number": compared("much better"),
    "there are no messages": {"response1": "one", "response2": "two", "overall_preference": 1},
    r"the last turn is the assistant's, not the user's": compared(1, [turn("user", "Hello."), turn("assistant", "Hello!")]),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_used_is_refused_with_its_reason(reason):
    with pytest.raises(ValueError, match=reason):
        example_of(REFUSED[reason])
