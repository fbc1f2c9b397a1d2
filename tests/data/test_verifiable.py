"""Rows as open-instruct's RLVR sets have them, with their quirks."""

import json

import pytest

from pedigree.data.sources import layouts
from pedigree.data.sources.verifiable import verifier_of
from pedigree.stages.verifiers import check, verify

BULLETS = {"func_name": "verify_bullet_points", "N": 2, "quantifier": None, "options": None}
NEW = {"instruction_id": ["punctuation:no_comma", "keywords:existence"], "kwargs": [None, {"keywords": ["sea"], "letter": None}]}
INSTRUCTIONS = [{"id": "punctuation:no_comma"}, {"id": "keywords:existence", "keywords": ["sea"]}]
CONSTRAINT = {"name": "constraint", "function": "verify_bullet_points", "arguments": {"N": 2}}
SHARE = {"name": "ifeval", "instructions": INSTRUCTIONS, "score": "share"}

ROWS = [
    ("gsm8k", "72", {"name": "gsm8k", "answer": "72"}),
    ("GSM8K", ["72"], {"name": "gsm8k", "answer": "72"}),
    ("MATH", r" \frac{1}{2}", {"name": "math", "answer": r"\frac{1}{2}"}),
    (["math"], ["5"], {"name": "math", "answer": "5"}),
    ("ifeval", json.dumps(BULLETS), CONSTRAINT),
    ("ifeval_old", [json.dumps(BULLETS)], CONSTRAINT),
    ("IFEval", BULLETS, CONSTRAINT),
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
    ("code", "x", "none of the verifiers gsm8k"),
    (["math", "max_length"], ["5", "100"], r"several verifiers \(math, max_length\)"),
    (["math"], ["5", "five"], "ground_truth has 2 values"),
    ("gsm8k", None, "no answer"),
    (7, "5", "no verifier's name"),
    ("ifeval", "no_comma", "neither JSON nor a Python literal"),
    ("ifeval", "{'a': 1}", "names neither"),
    ("ifeval", {"instruction_id": ["a", "b"], "kwargs": [None]}, "of one length"),
    ("ifeval", "[" * 100_000, "neither JSON nor a Python literal"),
    ("ifeval", '[{"instruction_id": ["a"], "kwargs": ["x"]}]', "arguments 'x' of instruction a are no mapping"),
    ("ifeval", '[{"instruction_id": [["a"]], "kwargs": [null]}]', r"the id \['a'\] of an instruction is no text"),
    ("ifeval", '{"func_name": {"a": 1}}', "func_name {'a': 1} is no text"),
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
