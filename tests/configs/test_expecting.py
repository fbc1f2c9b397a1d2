"""What a recipe may expect of its rows: nonsense is told when the recipe is loaded, without Great Expectations."""

import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.expectations import COLUMNS, EXPECTATIONS, FACTS, TEXTS, Expectation
from pedigree.data.expectations.row_facts import OF_ROWS, OF_TEXTS

SUMS = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 9, "seed": 1}


def expecting(*expectations, record="conversation"):
    return PrepareData.model_validate({"record": record, "sources": [SUMS], "expectations": list(expectations)})


BETWEEN = {"expect": "column_values_to_be_between", "column": "characters", "max_value": 9}
REGEX = {"expect": "column_values_to_match_regex", "column": "source"}
QUANTILES = {"expect": "column_quantile_values_to_be_between", "column": "turns"}
WRONG = [
    (BETWEEN | {"expect": "column_values_to_be_betwene"}, "supported: column_values_to_be_between"),
    (BETWEEN | {"column": "charcters"}, "column 'charcters' is not one of id, source, characters"),
    (BETWEEN | {"column": None}, "needs a column: one of"),
    (BETWEEN | {"column": "source"}, "does not apply to column source of kind text: use one of characters, prompt_characters"),
    (BETWEEN | {"max_value": None}, "needs min_value or max_value"),
    (BETWEEN | {"strict_min": True}, "strict_min has no effect without min_value"),
    ({"expect": "table_row_count_to_be_between", "min_value": 0.5}, "counts, so 0.5 must be a whole number"),
    (BETWEEN | {"column": ["characters"]}, "column"),
    (REGEX | {"regex": "a{99999999999999999999}"}, "is not a valid Python regular expression"),
    (REGEX | {"regex": "(" * 5000}, "is not a valid Python regular expression"),
    (BETWEEN | {"min_value": 10}, "minimum 10 exceeds maximum 9"),
    (BETWEEN | {"max_value": "9"}, "max_value"),
    (BETWEEN | {"regex": "a"}, "does not accept regex: it accepts min_value, max_value, strict_min, strict_max, mostly"),
    (BETWEEN | {"maximum": 9}, "maximum"),
    (BETWEEN | {"mostly": 0}, "mostly"),
    (BETWEEN | {"mostly": 1.1}, "mostly"),
    (BETWEEN | {"severity": "info"}, "severity"),
    (BETWEEN | {"sample": 5}, "sample 5 applies only to text and answer; here all rows are tested"),
    (REGEX, "needs regex"),
    (REGEX | {"regex": "(a"}, "'(a' is not a valid Python regular expression: missing )"),
    ({"expect": "column_values_to_be_in_set", "column": "turns", "value_set": []}, "value_set"),
    ({"expect": "column_values_to_be_in_set", "column": "turns", "value_set": [2, True]}, "[True] cannot occur in column turns"),
    ({"expect": "column_values_to_be_in_set", "column": "has_system", "value_set": ["yes"]}, "['yes'] cannot occur"),
    ({"expect": "column_values_to_be_unique", "column": "id", "value_set": ["a"]}, "does not accept value_set: it accepts mostly"),
    ({"expect": "table_row_count_to_be_between", "column": "id", "min_value": 1}, "applies to the rows as a whole: remove column 'id'"),
    (QUANTILES | {"quantile_ranges": {"quantiles": [0.5, 0.9], "value_ranges": [[1, 2]]}}, "value_ranges must be 2 pairs"),
    (QUANTILES | {"quantile_ranges": {"quantiles": [50.0], "value_ranges": [[1, 2]]}}, "quantiles [50.0] are outside 0 to 1"),
    ({"expect": "column_values_to_not_be_null", "column": "strength"}, "column strength exists for preference rows, but these are of type"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_what_can_never_be_meant_is_told_when_the_recipe_is_loaded(wrong, said):
    with pytest.raises(ValidationError) as error:
        expecting({name: value for name, value in wrong.items() if value is not None})
    assert said in str(error.value)


def test_an_expectation_stands_there_once():
    assert len(expecting(BETWEEN, BETWEEN | {"max_value": 8}).expectations) == 2
    with pytest.raises(ValidationError, match="duplicate column_values_to_be_between of characters"):
        expecting(BETWEEN, BETWEEN | {"severity": "warn"})


def test_a_dump_holds_what_was_said_and_can_be_read_back():
    given = expecting(BETWEEN, {"expect": "column_values_to_not_match_regex", "column": "text", "regex": "a|b", "severity": "warn"})
    dumped = given.model_dump(mode="json")["expectations"]
    assert dumped == [
        BETWEEN | {"severity": "fail"},
        {"expect": "column_values_to_not_match_regex", "column": "text", "regex": "a|b", "sample": 10000, "severity": "warn"},
    ]
    assert PrepareData.model_validate(given.model_dump(mode="json")) == given


def test_every_column_has_a_source():
    assert set(OF_ROWS) | {"id", "source"} == set(FACTS) and set(OF_TEXTS) == set(TEXTS)


def test_the_documentation_has_them_all(root):
    page = (root / "docs" / "expectations.md").read_text()
    assert all(f"| `{name}` | {fact.meaning}" in page for name, fact in COLUMNS.items())
    stems = [re.sub("^column_(?=(?!values|value).*_to_be_between$)|_to_be_between$", "", name) for name in EXPECTATIONS]
    assert all(stem.removeprefix("column_distinct_values_") in page for stem in stems), stems


@pytest.mark.integration
def test_a_recipe_is_checked_without_the_library(root):
    """It takes seconds to import, and every command loads a recipe."""
    heavy = {"great_expectations", "pandas", "pyarrow", "numpy"}
    code = f"import sys; import pedigree.configs.rows.datasets; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_texts_are_looked_at_in_a_sample():
    assert Expectation.model_validate(REGEX | {"regex": "a", "column": "answer"}).sample == 10_000
    assert Expectation.model_validate(REGEX | {"regex": "a", "column": "answer", "sample": 7}).sample == 7
    assert Expectation.model_validate(REGEX | {"regex": "a"}).sample is None
