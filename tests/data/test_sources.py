import gzip
import json
from collections import Counter

import pytest
from row_reading import load, load_file, write_file

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.row_sources import Arithmetic, Constraints, Files, Leaks
from pedigree.data.artifacts.artifacts import write_rows
from pedigree.data.contamination.decontamination import Index
from pedigree.data.records.records import ended
from pedigree.data.sources import procedural
from pedigree.data.sources.sources import Outside
from pedigree.stages.verifiers import verify

ARITHMETIC = {"type": "arithmetic", "operations": ["add", "subtract", "multiply"], "digits": [1, 2], "count": 300, "seed": 1}
CONSTRAINTS = {"type": "constraints", "checks": ["lowercase", "no_comma", "quotation", "title", "word_count"], "count": 300, "seed": 1}


def arithmetic(**changes) -> Arithmetic:
    return Arithmetic.model_validate(ARITHMETIC | changes)


def constraints(**changes) -> Constraints:
    return Constraints.model_validate(CONSTRAINTS | changes)


def examples_of(config):
    return procedural.arithmetic(config) if isinstance(config, Arithmetic) else procedural.constraints(config)


def write(path, *rows):
    return write_file(path, rows)


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("config", [arithmetic(), arithmetic(style="gsm"), constraints()], ids=["plain", "gsm", "constraints"])
def test_right_answers_verify_and_wrong_ones_do_not(config):
    for example in examples_of(config):
        assert verify(example.verifier, example.answer).score == 1.0, example
        assert verify(example.verifier, example.rejected).score == 0.0, example


def test_arithmetic_says_what_python_says():
    for example in procedural.arithmetic(arithmetic(count=50)):
        term = "".join(character for character in example.messages[0]["content"] if character in "0123456789+-* ")
        assert int(example.answer) == eval(term)  # our own text: digits and one operator


def test_problems_differ_and_the_same_problem_has_the_same_words_in_every_set():
    def wording(config):
        texts = [example.messages[0]["content"] for example in procedural.arithmetic(config)]
        return {"".join(filter(lambda character: character in "0123456789+-*", text)): text for text in texts}, len(texts)

    (one, count), (other, _) = wording(arithmetic(seed=1, digits=[1])), wording(arithmetic(seed=2, digits=[1], count=200))
    assert len(one) == count == 300  # all there are: 3 x 10 x 10
    assert all(one[problem] == text for problem, text in other.items())


def test_more_problems_than_there_are_is_refused():
    with pytest.raises(PedigreeError, match="count 301 > 300"):
        procedural.arithmetic(arithmetic(digits=[1], count=301))


@pytest.mark.parametrize("config", [arithmetic(), arithmetic(style="gsm"), constraints()], ids=["plain", "gsm", "constraints"])
def test_the_frame_of_a_question_alone_contaminates_nothing(config):
    """Templates must not make questions on different numbers or topics look alike."""

    def subject(row):
        words = row["messages"][0]["content"].replace(".", " ").replace("?", " ").split()
        topic = [word for word in words if word in procedural.TOPICS]
        return topic or [word for word in words if not word.isalpha()]

    rows = load(config, "item", "t", Outside()).rows
    index = Index({"suite": rows}, 8)
    for row, overlaps in zip(rows, index.overlaps(rows, 0.5), strict=True):
        found = [overlap.item for overlap in overlaps]
        assert row in found
        assert all(subject(item) == subject(row) for item in found), (row, found)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_marks_of_turns_are_kept_also_on_the_last_one(tmp_path, suffix):
    """Parquet gives every turn the column, empty where the row has no mark."""
    marks = ({}, {"train": False}, {}, {"train": True})
    messages = [turn(role, "a") | mark for role, mark in zip(("user", "assistant") * 2, marks, strict=True)]
    assert load_file(write(tmp_path / f"rows.{suffix}", {"messages": messages})).rows[0]["messages"] == messages


def test_hints_are_read_where_columns_list_them(tmp_path):
    row = {"problem": "2 + 2?", "truth": "4", "steps": ["Count on.", "It is 2 + 2."], "hints": "as it was before"}
    file, columns = (
        write(tmp_path / "rows.jsonl", row, row | {"steps": "Count."}, row | {"steps": None}),
        {"prompt": "problem", "ground_truth": "truth"},
    )
    found = load_file(file, "prompt", verifier="gsm", columns=columns | {"hints": "steps"}).rows
    assert [one["verifier"].get("hints") for one in found] == [["Count on.", "It is 2 + 2."], ["Count."], None]
    named = write(tmp_path / "named.jsonl", {"prompt": "2 + 2?", "ground_truth": "4", "hints": "as it was before"})
    assert "hints" not in load_file(named, "prompt", verifier="gsm").rows[0]["verifier"]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_marks_of_other_turns_say_nothing_if_they_are_false_and_are_refused_by_name_if_not(tmp_path, role):
    """Axolotl's rows have a mark in every turn."""
    first = [turn("system", "a")] if role == "system" else []
    calls = [turn("user", "a"), turn("call", '{"name": "f", "arguments": {}}') | {"train": True}] if role == "tool" else []
    messages = [*first, *calls, turn("tool" if calls else "user", "b"), turn("assistant", "c") | {"train": True}]
    given = [one | ({"train": False} if one["role"] not in ("assistant", "call") else {}) for one in messages]
    (row,) = load_file(write(tmp_path / "rows.jsonl", {"messages": given})).rows
    assert row["messages"] == messages
    wrong = [one | ({"train": True} if one["role"] == role else {}) for one in messages]
    with pytest.raises(PedigreeError, match=rf"\({role}\) has train True: only turns of the assistant are trained, so leave the mark out"):
        load_file(write(tmp_path / "rows.jsonl", {"messages": wrong}))


CUT = {"finish_reason": "length"}
ANSWERS = [{"text": "3", "score": 2, **CUT}, {"text": "4", "score": 1, "win_rate": 0.25}]
CUT_OFF = [
    ({"messages": [turn("user", "1 + 2?"), turn("assistant", "3") | CUT]}, "conversation", [True]),
    ({"messages": [turn("user", "1 + 2?"), turn("assistant", "3")], **CUT}, "conversation", [True]),
    ({"prompt": "1 + 2?", "completion": "3", **CUT}, "conversation", [True]),
    ({"prompt": "1 + 2?", "completion": "3", "finish_reason": "stop"}, "conversation", [False]),
    ({"prompt": "1 + 2?", "completion": "3", "label": True, **CUT}, "preference", [True]),
    ({"prompt": "1 + 2?", "answers": ANSWERS}, "preference", [True, False]),
    ({"prompt": "1 + 2?", "chosen": "3", "rejected": "4", "finish_reason_rejected": "length"}, "preference", [False, True]),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "record", "cut"), CUT_OFF)
def test_what_was_cut_off_stays_cut_off(tmp_path, row, record, cut, suffix):
    (made,) = load_file(write(tmp_path / f"rows.{suffix}", row), record=record).rows
    answers = made["messages"][-1:] if record == "conversation" else made["answers"]
    assert [not ended(one) for one in answers] == cut
    if "answers" in row:
        assert [one.get("win_rate") for one in made["answers"]] == [None, 0.25]


@pytest.mark.parametrize("record", ["conversation", "preference", "prompt"])
def test_half_of_a_surrogate_pair_makes_a_bad_row_wherever_it_is(tmp_path, record):
    half = "so \ud83d it"
    turns = [turn("user", "a")]
    given = {
        "conversation": {"messages": [*turns, turn("assistant", "b")], "source": "s"},
        "preference": {"messages": turns, "chosen": "b", "rejected": "c", "source": "s"},
        "prompt": {"messages": turns, "dataset": "gsm8k", "ground_truth": "3", "source": "s"},
    }[record]
    text = json.dumps(given)
    texts = {"a": text.replace('"a"', json.dumps(half)), "s": text.replace('"s"', json.dumps(half))}
    texts |= {"c": text.replace('"c"', json.dumps(half))} if record == "preference" else {}
    (tmp_path / "x.jsonl").write_text("\n".join([text, *texts.values()]))
    loaded = load_file(tmp_path / "x.jsonl", record=record, max_bad_rows=3)
    assert len(loaded.rows) == 1 and len(loaded.bad) == len(texts)
    assert all("half of a surrogate pair" in row.reason and "so \\ud83d it" in row.text for row in loaded.bad)
    write_rows(tmp_path / "bad_rows.jsonl", [row._asdict() for row in loaded.bad])


SCORED = [
    ({"chosen": "3", "rejected": "4", "score_chosen": 5, "score_rejected": 1.5, "strength": 0.8}, [("3", 5.0), ("4", 1.5)], 0.8),
    ({"chosen": "3", "rejected": "4", "score_chosen": 5}, [("3", None), ("4", None)], None),  # a gap needs both
    ({"answers": ["3", "4", "5"]}, [("3", None), ("4", None), ("5", None)], None),
    (
        {"answers": [{"text": "4", "score": 0}, {"text": "3", "score": 2}, {"text": "5", "score": 0}]},
        [("3", 2.0), ("4", 0.0), ("5", 0.0)],
        None,
    ),
    ({"completion": "3", "label": True}, [("3", 1.0)], None),
    ({"completion": [turn("assistant", "3")], "label": False, "score": 7}, [("3", 0.0)], None),
    ({"completion": "3", "score": -0.5}, [("3", -0.5)], None),
]


@pytest.mark.parametrize(("columns", "answers", "strength"), SCORED)
def test_scores_labels_lists_and_strengths_are_read(tmp_path, columns, answers, strength):
    (row,) = load_file(write(tmp_path / "x.jsonl", {"prompt": "1 + 2?", **columns}), record="preference").rows
    assert [(one["text"], one["score"]) for one in row["answers"]] == answers and row["strength"] == strength
    assert row["messages"] == [turn("user", "1 + 2?")]


def test_parquet_and_folders_are_read(tmp_path):
    rows = [{"instruction": f"q{number}", "input": None, "output": "x"} for number in range(3)]
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "a.parquet", *rows[:2])
    write(tmp_path / "set" / "b.jsonl", rows[2])
    assert sorted(row["messages"][0]["content"] for row in load_file(tmp_path / "set").rows) == ["q0", "q1", "q2"]
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "set" / "b.jsonl").read_bytes()))
    assert [row["source"] for row in load_file(tmp_path / "c.jsonl.gz").rows] == ["c"]


NESTED = [
    {"q": "6 times 7?", "reward_model": None},
    {"q": "6 plus 7?", "reward_model": {"truth": {"value": "13"}}},
    {"q": "6 minus 7?", "reward_model.truth.value": "-1"},
]


def test_dots_lead_into_structs(tmp_path):
    columns = {"prompt": "q", "ground_truth": "reward_model.truth.value"}
    loaded = load_file(write(tmp_path / "x.jsonl", *NESTED), "prompt", columns=columns, verifier="math", max_bad_rows=1)
    assert [row["verifier"]["answer"] for row in loaded.rows] == ["13", "-1"]  # a column of that very name counts first
    assert [bad.place for bad in loaded.bad] == ["x.jsonl:1"]
    (row,) = load_file(write(tmp_path / "y.jsonl", NESTED[0]), columns={"prompt": "q", "score": "reward_model.score"}, record="prompt").rows
    assert row["messages"] == [turn("user", "6 times 7?")]  # null does not say what could stand there


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_that_no_row_has_is_told_with_those_that_are_there(tmp_path, suffix):
    """Its rows would all be bad ones, or lack their scores without a word."""
    rows = [{"q": "6 times 7?", "reward_model": {"truth": "42"}}, {"q": "6 plus 7?", "reward_model": None}]
    file = write(tmp_path / f"x{suffix}", *rows)
    for way in ("reward_model.answer", "reward_model.truth.value", "answer"):
        with pytest.raises(PedigreeError, match=rf"x has no column {way}: its first row has q, reward_model.truth"):
            load_file(file, "prompt", columns={"prompt": "q", "score": way})
    assert len(load_file(file, "prompt", columns={"prompt": "q", "score": "reward_model.truth"}).rows) == 2


BAD = {
    "there are no messages": {"text": "x"},
    "message 1 \\(assistant\\) is empty|the answer is empty": {"messages": [turn("user", "a"), turn("assistant", " ")]},
    "role 'bot'": {"messages": [turn("bot", "a"), turn("assistant", "b")]},
    "the user's where the assistant's is due": {"messages": [turn("user", "a"), turn("user", "b"), turn("assistant", "c")]},
    "is not {role, content}": {"messages": [{"role": "user"}]},
    "has no text": {"messages": [turn("user", 5), turn("assistant", "b")]},
    "not an object": [1],
    "only one of chosen and rejected": {"prompt": "a", "chosen": "b"},
    "score 1.0, below rejected's 2.0": {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1, "score_rejected": 2},
    "strength 1.5 is no probability": {"prompt": "a", "chosen": "b", "rejected": "c", "strength": 1.5},
    "answers is no list": {"prompt": "a", "answers": []},
    "neither texts, the best first, nor": {"prompt": "a", "answers": [{"text": "b", "score": 1}, {"text": "c"}]},
    "the answer 2 is empty": {"prompt": "a", "answers": ["b", "c", " "]},
    "instruction and input are not both texts": {"instruction": 5, "output": "x"},
    "role \\['gpt'\\]": {"conversations": [{"from": ["gpt"], "value": "a"}]},
    "JSON has no form for": {"prompt": "a", "completion": "b", "verifier": {"name": "gsm", "answer": float("nan")}},
    "too large": {"prompt": "a", "completion": "b", "score": 10**400},
    "do not answer the same beginning": {
        "chosen": [turn("user", "a"), turn("assistant", "b")],
        "rejected": [turn("user", "A"), turn("assistant", "c")],
    },
}


@pytest.mark.parametrize("says", BAD)
def test_a_malformed_row_is_named_and_not_dropped(tmp_path, says):
    good = {"messages": [turn("user", "a"), turn("assistant", "b")]}
    with pytest.raises(PedigreeError, match=f"(?s)1 malformed rows.*x.jsonl:2: .*({says})"):
        load_file(write(tmp_path / "x.jsonl", good, BAD[says]))


def test_many_malformed_rows_are_shown_by_their_first_reasons_with_the_columns_and_the_layout_that_comes_near(tmp_path):
    with pytest.raises(PedigreeError) as error:
        load_file(write(tmp_path / "x.jsonl", *[{"question": "Two?", "reply": f"{number}"} for number in range(20)]))
    first, reasons, columns = str(error.value).split("\n  ")
    assert first == "x: 20 malformed rows of 20, and max_bad_rows 0 allows 0: fix the rows, or how they are read:"  # raising it cannot help
    assert reasons == "x.jsonl:1, x.jsonl:2, x.jsonl:3 and 17 more: there are no messages"
    assert columns.startswith("x.jsonl:1: it has the columns question, reply; near is `prompt, completion` ")
    assert "`columns: {prompt: question, completion: reply}`" in columns


def test_of_many_reasons_the_first_three_are_shown(tmp_path):
    broken = [{"messages": [{"role": f"role{number}", "content": "x"}]} for number in range(5)]
    good = {"prompt": "Two?", "completion": "2"}
    with pytest.raises(PedigreeError) as error:
        load_file(write(tmp_path / "x.jsonl", *broken, *[good] * 15))
    first, *rest = str(error.value).split("\n  ")
    assert first == "x: 5 malformed rows of 20, and max_bad_rows 0 allows 0: fix or remove them, or raise it:"
    assert [line.partition(": ")[0] for line in rest[:3]] == ["x.jsonl:1", "x.jsonl:2", "x.jsonl:3"]
    assert rest[3:] == ["... and 2 more", "x.jsonl:1: it has the columns messages"]


def test_a_file_of_another_form_is_named(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfd")
    with pytest.raises(PedigreeError, match=r"x\.json is not UTF-8"):
        load_file(tmp_path / "x.json")


def test_a_source_that_cannot_give_the_record_says_what_is_missing(tmp_path):
    path = write(tmp_path / "x.jsonl", {"messages": [turn("user", "Say hello")]})
    with pytest.raises(PedigreeError, match="preference rows need two answers, or one with a score or a label"):
        load_file(path, record="preference")
    with pytest.raises(PedigreeError, match="item rows need a verifier, which this one lacks: set `verifier` in the source"):
        load_file(path, record="item")


def test_leaks_are_spread_over_items_and_styles():
    suite = load(arithmetic(count=6), "item", "t", Outside()).rows
    config = Leaks.model_validate({"type": "leaks", "count": 18, "seed": 1})
    leaks = load(config, "conversation", None, Outside(suites=suite)).rows
    assert Counter(row["source"] for row in leaks) == {"leak-verbatim": 6, "leak-embedded": 6, "leak-rewrapped": 6}
    assert len({row["messages"][0]["content"] for row in leaks}) == 18
    assert Counter(row["messages"][1]["content"] for row in leaks) == {
        answer: 3 * times for answer, times in Counter(item["verifier"]["answer"] for item in suite).items()
    }
    with pytest.raises(PedigreeError, match="count 19 > 6 items x 3 styles"):
        load(config.model_copy(update={"count": 19}), "conversation", None, Outside(suites=suite))


# --- bad rows


def good(number: int) -> dict:
    return {"messages": [turn("user", f"question {number}"), turn("assistant", "x")]}


@pytest.mark.parametrize(
    ("rows", "allowed", "limit"),
    [(10, 3, 3), (10, 3, 0.3), (10, 2, 0.29), (1000, 1, 0.001), (100, 29, 0.29), (10, 0, 0)],
    ids=["number", "share", "rounded down", "small share", "no binary fraction", "none"],
)
def test_as_many_bad_rows_as_stated_are_left_out_and_listed_and_no_more(tmp_path, rows, allowed, limit):
    def with_bad(count):
        return write(tmp_path / "x.jsonl", *[{"messages": []}] * count, *map(good, range(rows - count)))

    loaded = load_file(with_bad(allowed), max_bad_rows=limit)
    assert len(loaded.rows) == rows - allowed and [one.place for one in loaded.bad] == [f"x.jsonl:{n + 1}" for n in range(allowed)]
    with pytest.raises(PedigreeError, match=f"x: {allowed + 1} malformed rows of {rows}, and max_bad_rows {limit} allows {allowed}"):
        load_file(with_bad(allowed + 1), max_bad_rows=limit)


def test_a_budget_covers_whatever_makes_a_row_bad(tmp_path):
    path = write(tmp_path / "x.jsonl", good(0), {"messages": [turn("user", "no answer")]}, {"text": "no layout"})
    path.write_text(path.read_text() + '{"mess\n')
    loaded = load_file(path, max_bad_rows=3)
    assert [(one.place, one.text) for one in loaded.bad][1:] == [("x.jsonl:3", '{"text": "no layout"}'), ("x.jsonl:4", '{"mess')]
    assert [one.reason for one in loaded.bad][:2] == ["conversation rows need an answer, which this one lacks", "there are no messages"]
    assert loaded.bad[2].reason.startswith("is not JSON")


@pytest.mark.parametrize("limit", [-1, 1.0, 0.0, 1.5, "3"])
def test_a_budget_is_a_number_or_a_share(limit):
    with pytest.raises(ValueError, match="max_bad_rows"):
        Files.model_validate({"type": "files", "path": "x.jsonl", "max_bad_rows": limit})
