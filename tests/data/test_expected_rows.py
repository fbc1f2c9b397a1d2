"""What a recipe and a type expect of rows: each expectation says what its name says, and shows the rows that it does not hold of."""

import subprocess
import sys

import pyarrow as pa
import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.expectations import EXPECTATIONS, Expectation
from pedigree.data.expectations.results import recorded, refuse, warnings
from pedigree.data.expectations.row_facts import look, texts_of
from pedigree.data.expectations.validation import UNUSED, examine, facts_of, row_problem, validate
from pedigree.data.records.messages import message_problem
from pedigree.stages.verifiers import check

ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


def facts_with(count=5, **columns):
    """Facts of well-formed rows a, b, c, ..., with columns as given."""
    facts = facts_of([{"id": "abcdefghij"[n], "source": "s", "messages": [ASK, SAY]} for n in range(count)], "conversation", lambda _: None)
    for name, values in columns.items():
        place = facts.schema.get_field_index(name)
        facts = facts.set_column(place, name, pa.array(values)) if place >= 0 else facts.append_column(name, pa.array(values))
    return facts


def held(facts, *expectations, **more):
    """The verdict's entries of these expectations."""
    verdict = examine(facts, "conversation", [Expectation.model_validate(one) for one in expectations], **more)
    return verdict["expectations"][-len(expectations) :]


def quantiles(*ranges):
    return {"quantile_ranges": {"quantiles": [0.0, 0.5], "value_ranges": list(ranges)}}


MEETS = [  # name, column, arguments that 1 1 2 3 null or xy x x x x or true true false true true meet, and some that they do not
    ("column_values_to_be_between", "turns", {"min_value": 1, "max_value": 3}, {"min_value": 1, "strict_min": True}),
    ("column_values_to_be_in_set", "source", {"value_set": ["x", "xy"]}, {"value_set": ["x"]}),
    ("column_values_to_not_be_in_set", "has_system", {"value_set": [False], "mostly": 0.8}, {"value_set": [False], "mostly": 0.81}),
    ("column_values_to_be_null", "turns", {"mostly": 0.2}, {"mostly": 0.21}),
    ("column_values_to_not_be_null", "turns", {"mostly": 0.8}, {}),
    ("column_values_to_be_unique", "turns", {"mostly": 0.5}, {}),
    ("column_values_to_match_regex", "source", {"regex": "^x"}, {"regex": "y"}),
    ("column_values_to_not_match_regex", "source", {"regex": "^y"}, {"regex": "(?<=x)y"}),
    ("column_values_to_match_regex_list", "source", {"regex_list": ["y", "x"]}, {"regex_list": ["y", "x"], "match_on": "all"}),
    ("column_values_to_not_match_regex_list", "source", {"regex_list": ["z", "^y"]}, {"regex_list": ["z", "y"]}),
    ("column_value_lengths_to_be_between", "source", {"min_value": 1, "max_value": 2}, {"max_value": 1}),
    ("column_min_to_be_between", "turns", {"max_value": 1}, {"min_value": 2}),
    ("column_max_to_be_between", "turns", {"max_value": 3}, {"max_value": 3, "strict_max": True}),
    ("column_mean_to_be_between", "turns", {"min_value": 1.75, "max_value": 1.75}, {"min_value": 1.76}),
    ("column_median_to_be_between", "turns", {"min_value": 1.5, "max_value": 1.5}, {"max_value": 1}),
    ("column_stdev_to_be_between", "turns", {"min_value": 0.957, "max_value": 0.958}, {"max_value": 0.9}),
    ("column_sum_to_be_between", "turns", {"min_value": 7, "max_value": 7}, {"min_value": 8}),
    ("column_quantile_values_to_be_between", "turns", quantiles([1, 1], [2, 2]), quantiles([1, 1], [None, 1])),
    ("column_distinct_values_to_be_in_set", "source", {"value_set": ["x", "xy", "z"]}, {"value_set": ["x"]}),
    ("column_distinct_values_to_contain_set", "source", {"value_set": ["x"]}, {"value_set": ["x", "z"]}),
    ("column_distinct_values_to_equal_set", "has_system", {"value_set": [True, False]}, {"value_set": [True]}),
    ("column_most_common_value_to_be_in_set", "source", {"value_set": ["x"]}, {"value_set": ["xy"]}),
    ("column_unique_value_count_to_be_between", "turns", {"min_value": 3, "max_value": 3}, {"max_value": 2}),
    ("column_proportion_of_unique_values_to_be_between", "turns", {"min_value": 0.75, "max_value": 0.75}, {"min_value": 0.8}),
    ("column_proportion_of_non_null_values_to_be_between", "turns", {"min_value": 0.8}, {"min_value": 0.9}),
    ("table_row_count_to_be_between", None, {"min_value": 5, "max_value": 5}, {"max_value": 4}),
]  # fmt: skip


def test_every_expectation_means_what_its_name_says():
    assert [name for name, *_ in MEETS] == list(EXPECTATIONS)
    facts = facts_with(turns=[1, 1, 2, 3, None], has_system=[True, True, False, True, True], source=["xy", "x", "x", "x", "x"])
    asked = [
        {"expect": name, **({"column": column} if column else {}), **arguments}
        for name, column, met, unmet in MEETS
        for arguments in (met, unmet)
    ]
    entries = held(facts, *asked)
    wrong = [one["expectation"] for number, one in enumerate(entries) if one["success"] != (number % 2 == 0)]
    assert not wrong
    for entry in entries:
        assert ("observed" in entry) != ("unexpected" in entry), entry
    observed = {entry["expectation"].removeprefix("expect_"): entry["observed"] for entry in entries if "observed" in entry}
    assert observed["column_mean_to_be_between"] == 1.75 and observed["column_stdev_to_be_between"] == 0.957427108
    assert observed["column_quantile_values_to_be_between"] == [1, 2]  # values of the column, and not between them
    assert observed["column_distinct_values_to_be_in_set"] == ["x", "xy"]


def test_the_table_of_expectations_is_the_librarys_own():
    """A name or an argument that it does not have would be told after hours of reading; one that it needs would be lacking."""
    examine(facts_with(), "conversation")  # imports it without what nobody uses
    import great_expectations.expectations as library

    for name, takes in EXPECTATIONS.items():
        fields = getattr(library, "Expect" + "".join(part.capitalize() for part in name.split("_"))).__fields__
        assert set(takes.arguments) <= set(fields), name
        assert {field for field in fields if fields[field].required} - {"column"} <= set(takes.one_of), name
        assert ("column" in fields) == bool(takes.of), name
        assert ("mostly" in fields) == ("mostly" in takes.also), name


BETWEEN = {"expect": "column_values_to_be_between", "column": "turns", "max_value": 2}


def test_a_share_is_of_the_values_that_there_are_and_says_so():
    (met, unmet) = held(facts_with(turns=[1, 9, None, 1, 1]), BETWEEN | {"mostly": 0.75}, BETWEEN | {"mostly": 0.76})
    assert met["success"] and not unmet["success"]
    assert (met["rows"], met["nulls"], met["unexpected"]) == (5, 1, 1) and "examples" not in met


def test_rows_that_are_not_as_expected_are_shown_with_place_and_value():
    facts = facts_with(10, turns=[3, 1, 4, 5, 6, 7, 8, 9, 1, None])
    verdict = examine(
        facts, "conversation", [Expectation.model_validate(BETWEEN)], None, lambda rows: [f"chat.jsonl:{n + 1}" for n in rows]
    )
    assert not verdict["success"] and len(verdict["expectations"][-1]["examples"]) == 7
    with pytest.raises(PedigreeError) as error:
        refuse(verdict)
    assert str(error.value) == (
        "conversation rows are not as expected: column_values_to_be_between(turns, max_value 2): 7 rows unexpected "
        "(77.8 % of 9, without the 1 nulls), as a at chat.jsonl:1\n"
        "  column_values_to_be_between(turns, max_value 2): 7 rows unexpected (77.8 % of 9, without the 1 nulls)\n"
        "    a at chat.jsonl:1: 3\n    c at chat.jsonl:3: 4\n    d at chat.jsonl:4: 5\n    e at chat.jsonl:5: 6\n    f at chat.jsonl:6: 7\n"
        "    ... and 2 more"
    )
    assert "examples" not in recorded(verdict)["expectations"][-1]


def test_many_rows_that_are_not_as_expected_make_no_long_verdict():
    facts = pa.concat_tables([facts_with(10)] * 500).append_column("turns", pa.array(range(5000)))
    (entry,) = held(facts.set_column(0, "id", pa.array([f"r{n}" for n in range(5000)])), BETWEEN | {"severity": "warn"})
    assert entry["unexpected"] == 4997 and [one["id"] for one in entry["examples"]] == [f"r{n}" for n in range(3, 23)]


def test_what_is_warned_of_fails_nothing():
    verdict = examine(facts_with(turns=[1, 2, 3, 4, 5]), "conversation", [Expectation.model_validate(BETWEEN | {"severity": "warn"})])
    refuse(verdict)
    assert verdict["success"]
    assert warnings(verdict) == ["not as expected: column_values_to_be_between(turns, max_value 2): 3 rows unexpected (60 % of 5)"]


def test_patterns_are_pythons_however_texts_lie_in_memory():
    """Arrow's own engine knows no atomic group, and takes neither é nor １ for a letter and a digit."""
    facts = facts_with(source=["é１"] * 5)
    for pattern in (r"^\w\d$", "(?>é)１", r"(.)\d(?<!x)\Z"):
        (entry,) = held(facts, {"expect": "column_values_to_match_regex", "column": "source", "regex": pattern})
        assert entry["success"], pattern


def test_texts_are_looked_at_in_a_sample_that_is_stated():
    texts = ["fine " * 100 + f"as an AI {n}, " + "more " * 100 for n in range(10)]
    asked = []

    def texts_of_first(count):
        asked.append(count)
        return pa.table({"answer": pa.array(texts[:count], pa.large_string())})

    pattern = {"expect": "column_values_to_not_match_regex", "column": "answer", "regex": r"as an AI \d"}
    few, all_ = held(facts_with(10), pattern | {"sample": 4}, pattern | {"sample": 99}, texts_of=texts_of_first)
    assert asked == [4, 99] and (few["rows"], few["of"], few["unexpected"]) == (4, 10, 4) and all_["rows"] == 10 and "of" not in all_
    shown = few["examples"][3]
    assert shown["id"] == "d" and "as an AI 3" in shown["value"] and len(shown["value"]) < 210
    text = "\n".join(warnings({"expectations": [few]}))
    assert "4 rows unexpected (100 % of 4), in a sample of 4 of 10 rows" in text


def test_what_the_library_cannot_do_is_told():
    with pytest.raises(PedigreeError, match=r"expect_column_mean_to_be_between cannot be evaluated on turns, .*mean"):
        held(facts_with(turns=list("abcde")), {"expect": "column_mean_to_be_between", "column": "turns", "min_value": 1})


SYSTEM = {"role": "system", "content": "Add."}
CONVERSATION = {"id": "a", "source": "s", "messages": [SYSTEM, ASK, SAY, ASK, {"role": "assistant", "content": "four"}]}
SCORED = [{"text": "two", "score": 0.5}, {"text": "", "score": None}, {"text": "3", "score": -1}]
PREFERENCE = {"id": "b", "source": "s", "messages": [ASK], "answers": SCORED, "strength": None}
PROMPT = {"id": "c", "source": "s", "messages": [SYSTEM, ASK], "verifier": {"name": "math", "answer": "2"}}
FACTS_BY_HAND = [
    (CONVERSATION, {"characters": 21, "prompt_characters": 17, "turns": 4, "has_system": True, "answer_characters": 4}),
    (
        PREFERENCE,
        {"characters": 10, "prompt_characters": 6, "turns": 2, "has_system": False, "answer_characters": 3}
        | {"answer_count": 3, "best_score": 0.5, "score_gap": 1.5, "strength": None},
    ),
    (PREFERENCE | {"answers": SCORED[:2], "strength": 0.75}, {"score_gap": None, "strength": 0.75, "answer_count": 2}),
    (PROMPT, {"characters": 10, "prompt_characters": 10, "turns": 1, "has_system": True, "verifier_name": "math"}),
    (PROMPT | {"verifier": None}, {"verifier_name": None}),
]


@pytest.mark.parametrize(("row", "facts"), FACTS_BY_HAND)
def test_facts_by_hand(row, facts):
    assert {name: values.to_pylist() for name, values in look(list(facts), [row]).items()} == {name: [fact] for name, fact in facts.items()}


def test_texts_by_hand():
    texts = texts_of([CONVERSATION | {"messages": [SYSTEM, ASK, SAY]}], ["text", "answer"]).to_pylist()
    assert texts == [{"text": "Add.\n1 + 1?\n2", "answer": "2"}]
    assert texts_of([PREFERENCE], ["text", "answer"]).to_pylist() == [{"text": "1 + 1?\ntwo\n\n3", "answer": "two"}]


# --- what every row of a type is ---------------------------------------------------------------------------------------

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
    ("preference", {"answers": []}, "there are no answers"),
]
BAD = [
    ("item", {"verifier": None}, "must have a name"),
    ("conversation", {"messages": [ASK]}, "the last turn is the user's"),
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
    ("preference", {"answers": answers(1.0)}, "strength 0.9 needs 2 answers, but there are 1"),
    ("preference", {"answers": answers(3.0, 2.0, 1.0)}, "strength 0.9 needs 2 answers, but there are 3"),
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


def test_marks_are_truth_values_on_the_assistants_turns():
    meant = "true or false is meant, on the assistant's turns"
    assert message_problem([ASK, SAY | {"train": True}], "assistant") is None
    assert message_problem([ASK, SAY | {"train": 1}], "assistant") == f"message 1 (assistant) has train 1: {meant}"
    assert message_problem([ASK | {"train": True}, SAY], "assistant") == f"message 0 (user) has train True: {meant}"


def test_ids_are_unique_and_an_empty_set_is_no_set():
    with pytest.raises(PedigreeError, match="unique"):
        validate(rows("prompt", id="a"), "prompt", check)
    with pytest.raises(PedigreeError, match="row_count"):
        validate([], "prompt", check)


@pytest.mark.nightly
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
