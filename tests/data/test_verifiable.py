"""Rows as open-instruct's RLVR sets have them, with their quirks."""

import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pedigree.data.sources import layouts, row_files
from pedigree.data.sources.verifiable import verifier_of
from pedigree.stages.verifiers import check, verify

BULLETS = {"func_name": "verify_bullet_points", "N": 2, "quantifier": None, "options": None}
NEW = {"instruction_id": ["punctuation:no_comma", "keywords:existence"], "kwargs": [None, {"keywords": ["sea"], "letter": None}]}
INSTRUCTIONS = [{"id": "punctuation:no_comma"}, {"id": "keywords:existence", "keywords": ["sea"]}]
CONSTRAINT = {"name": "constraint", "function": "verify_bullet_points", "arguments": {"N": 2}}
SHARE = {"name": "ifeval", "instructions": INSTRUCTIONS, "score": "share"}

TESTS = ["assert twice(2) == 4", "assert abs(twice(0.5) - 1) < 1e-9, 'half'"]
FUNCTION = {"name": "python", "before": "", "tests": "\n".join(TESTS) + "\n", "entry": "twice"}
EXAMPLES = [{"input": "1 2", "output": "3"}, {"input": "2 2\n", "output": "4\n"}]
SCRIPT = {"name": "python", "examples": EXAMPLES}
WITH_CHECK = "def check(candidate):\n    for one in range(3):\n        assert candidate(one) == 2 * one\n\ncheck(twice)"

ROWS = [
    ("gsm8k", "72", {"name": "gsm", "answer": "72"}),
    ("GSM8K", ["72"], {"name": "gsm", "answer": "72"}),
    (["gsm8k"], ["72"], {"name": "gsm", "answer": "72"}),
    ("gsm8k", "6 * 12 = 72\n#### 72", {"name": "gsm", "answer": "72"}),
    # numbers of tables
    ("gsm8k", 72, {"name": "gsm", "answer": "72"}),
    ("gsm8k", 72.0, {"name": "gsm", "answer": "72"}),
    ("gsm8k", [72.5], {"name": "gsm", "answer": "72.5"}),
    ("gsm8k", Decimal("1234.50"), {"name": "gsm", "answer": "1234.5"}),
    ("gsm8k", Decimal("1000"), {"name": "gsm", "answer": "1000"}),
    ("gsm8k", 1e22, {"name": "gsm", "answer": "1" + 22 * "0"}),
    ("gsm8k", 1e-7, {"name": "gsm", "answer": "0.0000001"}),
    ("gsm8k", np.int64(72), {"name": "gsm", "answer": "72"}),
    ("gsm8k", np.float32(0.1), {"name": "gsm", "answer": "0.1"}),
    ("gsm8k", float(np.float32(0.1)), {"name": "gsm", "answer": "0.1"}),
    ("gsm8k", 2.0**-13, {"name": "gsm", "answer": "0.0001220703125"}),
    ("gsm8k", float(np.float32(100000.1)), {"name": "gsm", "answer": "100000.1"}),
    ("gsm8k", 123456792.0, {"name": "gsm", "answer": "123456792"}),
    ("math", np.float64(0.25), {"name": "math", "answer": "0.25"}),
    # programs
    ("code", TESTS, FUNCTION),
    ("code", json.dumps(TESTS), FUNCTION),
    (["code"], [json.dumps(TESTS)], FUNCTION),
    ("code", TESTS[0], {**FUNCTION, "tests": TESTS[0] + "\n"}),
    ("code", WITH_CHECK, {**FUNCTION, "tests": WITH_CHECK + "\n"}),
    (
        "code",
        ["from math import inf", "assert twice(inf) == inf"],
        {**FUNCTION, "tests": "from math import inf\nassert twice(inf) == inf\n"},
    ),
    ("code_stdio", EXAMPLES, SCRIPT),
    ("code_stdio", json.dumps([{**one, "type": "stdin_stdout"} for one in EXAMPLES]), SCRIPT),
    ("code_stdio", {"inputs": ["1 2", "2 2\n"], "outputs": ["3", "4\n"]}, SCRIPT),
    ("code_stdio", [{"input": 1, "output": Decimal("2.0")}], {"name": "python", "examples": [{"input": "1", "output": "2"}]}),
    ("code_stdio", {"inputs": [["1", "2"]], "outputs": [["3"]]}, {"name": "python", "examples": [{"input": "1\n2", "output": "3"}]}),
    ("code", json.dumps(json.dumps(TESTS)), FUNCTION),
    ("code", str(TESTS), FUNCTION),
    # several
    (
        ["math", "ifeval"],
        ["5", json.dumps(BULLETS)],
        {"name": "several", "verifiers": [{"name": "math", "answer": "5"}, CONSTRAINT], "score": "share"},
    ),
    ("MATH", r" \frac{1}{2}", {"name": "math", "answer": r"\frac{1}{2}"}),
    (["math"], ["5"], {"name": "math", "answer": "5"}),
    ("ifeval", json.dumps(BULLETS), CONSTRAINT),
    ("ifeval_old", [json.dumps(BULLETS)], CONSTRAINT),
    ("IFEval", BULLETS, CONSTRAINT),
    ("ifeval", {**BULLETS, "N": 2.0}, CONSTRAINT),  # a column of integers with nulls is one of floats
    ("ifeval", str([NEW]), SHARE),  # a Python literal, with None
    ("ifeval", str([json.dumps(NEW)]), SHARE),  # JSON within it
    ("ifeval", json.dumps([NEW]), SHARE),
    (
        "ifeval",
        json.dumps({"func_name": "validate_choice", "options": "yes"}),
        {"name": "constraint", "function": "validate_choice", "arguments": {"options": ["yes"]}},
    ),
]


@pytest.mark.parametrize(("dataset", "truth", "verifier"), ROWS)
def test_a_row_names_its_verifier(dataset, truth, verifier):
    assert verifier_of(dataset, truth) == verifier
    check(verifier)


REFUSED = [
    ("chess", "x", "none of the verifiers gsm8k"),
    (["math", "max_length"], ["5", "100"], "'max_length' is none of the verifiers"),
    (["math", "gsm8k"], ["5"], r"several verifiers \(math, gsm8k\), and ground_truth has 1 values"),
    (["math", "gsm8k"], "5", r"several verifiers \(math, gsm8k\), and ground_truth has 1 values"),
    ("gsm8k", float("inf"), "no answer"),
    ("gsm8k", True, "no answer"),
    ("math", "nan", "no answer"),
    ("math", float("nan"), "no answer"),
    ("math", {"a": 1}, "no answer"),
    ("math", b"4", "no answer"),
    ("code_stdio", [{"input": "1", "output": None}], "output None"),
    ("gsm8k", Decimal("NaN"), "no answer"),
    ("code", [], "no list of tests"),
    ("code", None, "no list of tests"),
    ("code", 7, "no list of tests"),
    ("code", "twice(2) == 4", "assert nothing"),
    ("code", "assert twice(2 == 4", "not valid Python"),
    ("code", "assert 2 + 2 == 4", "use nothing of the program"),
    ("code", "assert twice(2) == half(8)", "use half, twice: tests of one function"),
    ("code", "assert Solution().twice(2) == 4", "use Solution: tests of one function are understood, and no class"),
    ("code_stdio", {"inputs": ["1"], "outputs": []}, "not lists of one length"),
    ("code_stdio", {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, "no list of tests"),
    (["math"], ["5", "five"], "ground_truth has 2 values"),
    ("gsm8k", None, "no answer"),
    (7, "5", "no verifier's name"),
    ("ifeval", "no_comma", "neither JSON nor a Python literal"),
    ("ifeval", "{'a': 1}", "names neither"),
    ("ifeval", {"instruction_id": ["a", "b"], "kwargs": [None]}, "of one length"),
    ("ifeval", "[" * 100_000, "neither JSON nor a Python literal"),
    ("ifeval", '[{"instruction_id": ["a"], "kwargs": ["x"]}]', "arguments 'x' of instruction a are no mapping"),
    ("ifeval", '[{"instruction_id": [["a"]], "kwargs": [null]}]', r"the id \['a'\] of an instruction is not text"),
    ("ifeval", '{"func_name": {"a": 1}}', "func_name {'a': 1} is not text"),
    ("ifeval", "{'func_name': 'verify_bullet_points', 1: 2}", "argument 1 has no text for a name"),
    ("ifeval", "[{'instruction_id': ['a'], 'kwargs': [{1: 2}]}]", "argument 1 has no text for a name"),
]


@pytest.mark.parametrize(("dataset", "truth", "why"), REFUSED)
def test_what_is_no_verifier_is_refused_by_name(dataset, truth, why):
    with pytest.raises(ValueError, match=why):
        verifier_of(dataset, truth)


def test_a_prompt_of_an_rlvr_set_is_read_with_its_verifier():
    messages = [{"role": "user", "content": "Question: 2 + 2?\nAnswer: 4\n\nQuestion: 40 + 2?\nAnswer:"}]
    row = {"messages": messages, "ground_truth": "42", "dataset": "gsm8k", "constraint_type": None, "constraint": None}
    example = layouts.example_of(row)
    assert example.messages == messages and verify(example.verifier, "It is 42.").score == 1.0
    with pytest.raises(ValueError, match="dataset 'chess'"):
        layouts.example_of(row | {"dataset": "chess"})


OWN = [
    ({"name": "gsm", "answer": 42}, {"name": "gsm", "answer": "42"}),
    ({"name": "math", "answer": Decimal("0.50"), "tests": None}, {"name": "math", "answer": "0.5"}),
    (json.dumps({"name": "exact_match", "answer": ["a", "b"]}), {"name": "exact_match", "answer": ["a", "b"]}),
    ({"name": "constraint", "function": "verify_bullet_points", "arguments": {"N": 2.0, "word": None}}, CONSTRAINT),
    ({"name": "choice", "answer": 1.0, "labels": None}, {"name": "choice", "answer": 1}),
    (
        {"name": "several", "verifiers": [{"name": "gsm", "answer": 2.5}, {"name": "ifeval", "instructions": INSTRUCTIONS}]},
        {"name": "several", "verifiers": [{"name": "gsm", "answer": "2.5"}, {"name": "ifeval", "instructions": INSTRUCTIONS}]},
    ),
]


@pytest.mark.parametrize(("given", "verifier"), OWN)
def test_a_rows_own_verifier_may_hold_numbers_and_the_nulls_of_a_table(given, verifier):
    assert layouts.example_of({"prompt": "x", "verifier": given}).verifier == verifier
    check(verifier)


NUMBERS = {
    "float32": pa.array([0.1, 72], pa.float32()),
    "float64": pa.array([0.1, 72.0]),
    "decimal": pa.array([Decimal("0.10"), Decimal("72.00")]),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_ground_truths_of_parquet_may_be_numbers(kind, tmp_path):
    pq.write_table(pa.table({"prompt": ["How many?"] * 2, "ground_truth": NUMBERS[kind]}), tmp_path / "rows.parquet")
    rows = [row for _, row in row_files.read(tmp_path / "rows.parquet")]
    assert [layouts.example_of(row, "gsm").verifier for row in rows] == [{"name": "gsm", "answer": one} for one in ("0.1", "72")]


@pytest.mark.parametrize(
    ("name", "truth", "verifier"),
    [
        ("gsm8k", "1,234", {"name": "gsm8k", "answer": "1,234"}),  # the published rule, where a recipe names it
        ("exact_match", ["Paris", "Lutetia"], {"name": "exact_match", "answer": ["Paris", "Lutetia"]}),
        ("exact_match", "Paris", {"name": "exact_match", "answer": "Paris"}),
        ("python", TESTS, FUNCTION),
    ],
)
def test_a_recipe_names_the_verifier_itself(name, truth, verifier):
    assert layouts.example_of({"prompt": "x", "ground_truth": truth, "dataset": "other"}, name).verifier == verifier
    check(verifier)


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ("12", {"answer": "12"}),
        (7, {"answer": 7}),
        (["a", "b"], {"answer": ["a", "b"]}),
        ({"solution": "12", "level": 3}, {"solution": "12", "level": 3}),
        ('{"solution": "12", "level": 3}', {"solution": "12", "level": 3}),
        ({"name": None, "level": 3}, {"level": 3}),
    ],
)
def test_facts_keep_the_ground_truth_as_it_is(truth, expected):
    row = {"prompt": "q", "ground_truth": truth}
    assert layouts.example_of(row, "facts").verifier == {"name": "facts", **expected}


def test_a_fact_has_another_name_than_the_verifiers():
    with pytest.raises(ValueError, match=r"ground_truth has a fact called name \('Bob'\), which is the verifier's: call it otherwise"):
        layouts.example_of({"prompt": "q", "ground_truth": {"name": "Bob", "age": 3}}, "facts")
