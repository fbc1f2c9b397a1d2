"""What columns of others say, held against what a recipe asks: strictly, since nobody looks at a million rows."""

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pydantic import TypeAdapter, ValidationError

from pedigree.configs.rows.filters import Filter
from pedigree.data.filters.row_values import against, unlicensed


def chosen(**config: Any) -> Any:
    return TypeAdapter(Filter).validate_python({"type": "values", "column": "it", **config})


def verdict(value: Any, **config: Any) -> str | None:
    return against(chosen(missing="drop", **config), {"it": value})


@pytest.mark.parametrize("value", [0.5, "0.5", " 0.5 ", "1/2", "4/8", "5e-1", "+.5", Decimal("0.50"), [0.5], 0.1, "1/10", 0.9, "9/10"])
def test_numbers_within_the_bounds_stay_however_they_are_written(value):
    assert verdict(value, min=0.1, max=0.9) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.95, "it 0.95 > 0.9"), ("7/8", None), ("19/20", "it '19/20' > 0.9"), ("0/8", "it '0/8' < 0.1"), (0, "it 0 < 0.1"),
        (-3, "it -3 < 0.1"), (10**400, f"it 1{'0' * 99} > 0.9"),
    ],
)  # fmt: skip
def test_numbers_outside_go_with_what_they_are(value, said):
    assert verdict(value, min=0.1, max=0.9) == said


@pytest.mark.parametrize(
    "value", ["75%", "n/a", "1,000", "3/0", "1/2/3", "0x1", "nan", "inf", "٣", "", "1e9999", "1e-999999999", "½", True, [], [0.5, 0.6],
              {"a": 1}, float("nan"), float("inf"), b"1"],
)  # fmt: skip
def test_what_is_no_number_is_missing_and_not_guessed_at(value):
    assert verdict(value, min=0) == f"it {value!r} is no number"
    assert against(chosen(min=0), {"it": value}) is None
    assert verdict(None, min=0) == "it says nothing" == against(chosen(min=0, missing="drop"), {})


@pytest.mark.parametrize(
    ("value", "stays"),
    [
        ("2023-12-31T23:59:59Z", True), ("2023-12-31 23:59", True), ("2024-01-01", False), ("2023-03-14", True), ("2023-03-13", False),
        ("2023-03", False), (datetime.date(2023, 5, 1), True), (datetime.datetime(2024, 1, 1, 0, 0), False),
        (datetime.datetime(2023, 3, 14, 1, 2), True), ("May 2023", False), (20230501, False),
    ],
)  # fmt: skip
def test_dates_are_compared_as_far_as_the_bound_is_written(value, stays):
    assert (verdict(value, min="2023-03-14", max="2023") is None) == stays


@pytest.mark.parametrize("value", ["2023/01/05", "20230105", "2023-1-5", "1696118400", "2023-10/05", "2023-10-051", "2023-10.5"])
def test_what_is_a_number_or_a_date_in_another_form_is_no_date(value):
    assert verdict(value, min="2000") == f"it {value!r} is no date"


@pytest.mark.parametrize("value", ["2023", "2023-10", "2023-10-05", "2023-10-05T12:00-05:00", "2023-10-05 12:00:00.123 UTC"])
def test_a_date_may_be_less_than_a_day_or_more_than_a_second(value):
    assert verdict(value, min="2023", max="2023") is None


def test_a_date_that_yaml_has_read_is_one():
    assert chosen(min=datetime.date(2023, 3, 14)) == chosen(min="2023-03-14")
    assert verdict("2023-03-14 08:00", min=datetime.datetime(2023, 3, 14, 9)) == "it '2023-03-14 08:00' < 2023-03-14T09:00:00"


def test_values_are_equal_by_kind_and_letter():
    named = ["mit", 3, True, datetime.date(2024, 5, 1)]
    for value in ("mit", 3, 3.0, "3", "6/2", True, ["mit"], Decimal("3.0"), datetime.date(2024, 5, 1), "2024-05-01"):
        assert verdict(value, one_of=named) is None and verdict(value, none_of=named) == f"it {_shown(value)}"
    for value in ("MIT", "true", 1, False, "mit "):
        assert verdict(value, one_of=named) == f"it {value!r}" and verdict(value, none_of=named) is None
    assert verdict(["mit", "gpl"], one_of=named) == "it ['mit', 'gpl'] is no single value"


def _shown(value: Any) -> str:
    value = value[0] if isinstance(value, list) else value
    return repr(value.isoformat() if isinstance(value, datetime.date) else value)


def test_the_first_column_with_a_value_counts():
    one = chosen(column=["pass_rate", "extra.solve_rate"], max=0.5)
    assert against(one, {"pass_rate": None, "extra.solve_rate": 0.6}) == "extra.solve_rate 0.6 > 0.5"
    assert against(one, {"pass_rate": 0.4, "extra.solve_rate": 0.6}) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "set exactly one of: bounds"),
        ({"min": 0, "one_of": [1]}, "set exactly one of: bounds"),
        ({"one_of": [1], "none_of": [2]}, "set exactly one of: bounds"),
        ({"min": 2, "max": 1}, "min 2 exceeds max 1"),
        ({"min": "2024", "max": "2023-05"}, "min '2024' exceeds max '2023-05'"),
        ({"min": "0.5"}, "'0.5' is neither a number nor a date"),
        ({"min": "last year"}, "'last year' is neither a number nor a date"),
        ({"min": 2023, "max": "2024"}, "a number and a date"),
        ({"min": True}, "valid"),
        ({"one_of": []}, "at least 1"),
        ({"column": [], "min": 1}, "must name one column"),
        ({"column": ["a", "a"], "min": 1}, "must name one column"),
    ],
)
def test_what_cannot_be_meant_is_refused(config, said):
    with pytest.raises(ValidationError, match=said):
        chosen(**config)


def test_a_rows_own_licence_comes_before_its_sources_and_spelling_is_no_matter():
    one = TypeAdapter(Filter).validate_python({"type": "licences", "allow": ["MIT", "apache-2.0", "unknown"]})
    assert unlicensed(one, {}, "mit") is None and unlicensed(one, {}, "unknown") is None
    assert unlicensed(one, {"license": "gpl-3.0"}, None) is None  # made here
    assert unlicensed(one, {}, "cc-by-nc-4.0") == "cc-by-nc-4.0 (as the source states)"
    assert unlicensed(one, {"license": "Apache-2.0"}, "cc-by-nc-4.0") is None
    assert unlicensed(one, {"license": "GPL-3.0"}, "mit") == "gpl-3.0 (license)"
    assert unlicensed(one, {"license": " ", "licence": "see the file"}, "mit") == "see the file (licence)"
    assert unlicensed(one, {"license": None}, "mit") is None
    assert unlicensed(one, {"license": "my \ud800 own"}, "mit") == r"my \ud800 own (license)"  # evidence is written


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["gpl-3.0"], "gpl-3.0 (license)"),
        (["MIT"], None),
        (["mit", "Apache-2.0"], None),
        (["mit", "GPL-3.0", "agpl-3.0"], "gpl-3.0 (license)"),
        (["mit", None, " "], None),
        ([], "cc-by-4.0 (as the source states)"),
        ([None, "", 3], "cc-by-4.0 (as the source states)"),
        (["my \ud800 own"], r"my \ud800 own (license)"),
    ],
)
def test_a_row_under_several_licences_stays_where_all_are_allowed(value, says):
    one = TypeAdapter(Filter).validate_python({"type": "licences", "allow": ["mit", "apache-2.0"]})
    assert unlicensed(one, {"license": value, "licence": None}, "cc-by-4.0") == says


def test_the_first_column_with_a_licence_counts_whether_it_is_a_text_or_a_list():
    one = TypeAdapter(Filter).validate_python({"type": "licences", "allow": ["mit"]})
    assert unlicensed(one, {"license": [], "licence": ["gpl-3.0"]}, "mit") == "gpl-3.0 (licence)"
    assert unlicensed(one, {"license": ["mit"], "licence": "gpl-3.0"}, "gpl-3.0") is None


@pytest.mark.parametrize("written", [0.1, 0.3, 0.7, 0.9, 1e-7, 123.456])
def test_a_number_in_32_bits_is_what_was_written(written):
    (value,) = pa.array([written], pa.float32()).to_pylist()
    assert value != written
    assert verdict(value, min=written, max=written) is None and verdict(value, one_of=[written]) is None


@pytest.mark.parametrize("value", [2**-13, 1365 / 4096, 1 / 3, 1e300])
def test_a_number_in_64_bits_is_itself(value):
    assert verdict(value, min=value, max=value) is None and verdict(value, max=value - value / 1000) is not None
