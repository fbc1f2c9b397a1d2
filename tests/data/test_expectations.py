import subprocess
import sys

import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.data.expectations.validation import UNUSED, row_problem, validate
from pedigree.data.records.messages import message_problem
from pedigree.stages.verifiers import check

ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
VERIFIER = {"name": "arithmetic", "answer": "2"}
GOOD = {
    "conversation": {"messages": [{"role": "system", "content": "Add."}, ASK, SAY, ASK, SAY]},
    "prompt": {"messages": [ASK], "verifier": None},
    "item": {"messages": [ASK], "task": "t", "verifier": VERIFIER},
    "preference": {"messages": [ASK, SAY, ASK], "answers": [{"text": "2", "score": 0.5}, {"text": "", "score": 0.5}], "strength": 0.9},
}


def answers(*scores, texts=None):
    return [{"text": text, "score": score} for text, score in zip(texts or "abcdef", scores, strict=False)]


def rows(record, **changes):
    second = {"id": "b", "source": "s", **GOOD[record], **changes}
    return [{"id": "a", "source": "s", **GOOD[record]}, {name: value for name, value in second.items() if value != "gone"}]


@pytest.mark.parametrize("record", GOOD)
def test_good_rows_pass_and_equal_rows_give_equal_verdicts(record):
    verdict = validate(rows(record), record, check)
    assert verdict["success"] and verdict["rows"] == 2 and all(one["success"] for one in verdict["expectations"])
    assert record != "item" or verdict == validate(rows(record), record, check)


SHOWN = [
    ("conversation", {"messages": "gone"}, "id,source"),
    ("conversation", {"extra": 1}, "extra"),
    ("conversation", {"source": None}, "source"),
    ("item", {"task": None}, "task"),
    ("preference", {"margin": 1.0}, "margin"),
    ("item", {"verifier": None}, "none of the names"),
    ("conversation", {"messages": [ASK]}, "the last turn is the user's"),
    ("preference", {"answers": []}, "there are no answers"),
]
BAD = [
    ("conversation", {"messages": [SAY, ASK, SAY]}, "turn 0 is the assistant's"),
    ("conversation", {"messages": [ASK, SAY, SAY]}, "turn 2 is the assistant's"),
    ("conversation", {"messages": []}, "there are no messages"),
    ("conversation", {"messages": [ASK, {"role": "assistant", "content": " \n"}]}, "is empty"),
    ("prompt", {"messages": [ASK, SAY]}, "the last turn is the assistant's"),
    ("prompt", {"verifier": {"name": "arithmetic"}}, "must have the fields"),
    ("preference", {"answers": answers(None, None, texts=["2", "2"])}, "are the same"),
    ("preference", {"answers": answers(None, None, texts=[" ", "2"])}, "the best answer is empty"),
    ("preference", {"answers": answers(None, None, texts=["2", None])}, "not {text, score}"),
    ("preference", {"answers": [{"text": "2"}]}, "not {text, score}"),
    ("preference", {"answers": answers(1.0, None, 1.5)}, "[1.0, 1.5] are not best first"),
    ("preference", {"answers": answers(True, None)}, "no finite number"),
    ("preference", {"answers": answers(float("inf"), None)}, "no finite number"),
    ("preference", {"answers": answers(None), "strength": None}, "a single answer has no score"),
    ("preference", {"answers": answers(1.0)}, "strength 0.9 stands beside 1 answers"),
    ("preference", {"answers": answers(3.0, 2.0, 1.0)}, "strength 0.9 stands beside 3 answers"),
    ("preference", {"strength": 1.1}, "no probability"),
    ("preference", {"answers": [{"text": "2", "score": 1.0, "finish_reason": "eos"}] * 2}, "neither stop nor length"),
    ("preference", {"answers": [{"text": "2", "score": 1.0, "win_rate": 1.5}] * 2}, "a win_rate is no probability"),
    ("conversation", {"messages": [ASK, SAY | {"finish_reason": "length"}, ASK, SAY]}, "was cut off (finish_reason length) and is not"),
    ("conversation", {"messages": [ASK | {"finish_reason": "length"}, SAY]}, "message 0 (user) has finish_reason 'length'"),
]


@pytest.mark.parametrize(("record", "changes", "says"), SHOWN)
def test_a_bad_row_is_shown(record, changes, says):
    with pytest.raises(PedigreeError) as error:
        validate(rows(record, **changes), record, check)
    assert "b: " in str(error.value) and says in str(error.value)
    assert "a: " not in str(error.value)


@pytest.mark.parametrize(("record", "changes", "says"), BAD)
def test_what_is_wrong_with_a_row_is_told(record, changes, says):
    assert says in row_problem(rows(record, **changes)[1], record, check)


def test_one_record_serves_singles_and_lists():
    cut_off = [{"text": "2", "score": 0.1, "finish_reason": "length", "win_rate": None}]
    for given in (answers(0.0), answers(None, None, None), answers(2.0, None, 2.0, -1), cut_off):
        assert row_problem(rows("preference", answers=given, strength=None)[1], "preference", check) is None


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([("user", None), ("assistant", True)], None),
        ([("user", None), ("assistant", 1)], "message 1 (assistant) has train 1: true or false is meant, on the assistant's turns"),
        ([("user", True), ("assistant", None)], "message 0 (user) has train True: true or false is meant, on the assistant's turns"),
    ],
)
def test_marks_are_truth_values_on_the_assistants_turns(messages, problem):
    given = [{"role": role, "content": "a"} | ({} if mark is None else {"train": mark}) for role, mark in messages]
    assert message_problem(given, "assistant") == problem


def test_ids_are_unique_and_an_empty_set_is_no_set():
    with pytest.raises(PedigreeError, match="unique"):
        validate(rows("prompt", id="a"), "prompt", check)
    with pytest.raises(PedigreeError, match="row_count"):
        validate([], "prompt", check)


@pytest.mark.integration
def test_what_no_expectation_of_ours_uses_is_not_loaded_before_somebody_asks(root):
    """Half of the start of every data stage went there."""
    code = f"""
import sys
from pedigree.data.expectations.validation import validate
from pedigree.stages.verifiers import check
validate({rows("conversation")}, "conversation", check)
assert not [name for name in {UNUSED} if name in sys.modules]
from great_expectations.expectations.core import expect_column_kl_divergence_to_be_less_than as unused
assert unused.stats.norm.cdf(0) == 0.5 and sys.modules["scipy.stats"].norm.cdf(0) == 0.5
import altair
assert altair.__file__
"""
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
