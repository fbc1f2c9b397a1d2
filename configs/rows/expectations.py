"""Expectations about rows, with the names and arguments of Great Expectations.

The table of supported expectations is repeated here because importing the library takes seconds; a test compares the two.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_serializer, model_validator

from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.base.mistakes import not_one_of

SAMPLE = 10_000
"""Default number of rows sampled for expectations on texts."""
Kind = Literal["text", "number", "truth"]
Scalar = bool | int | float | str


class Fact(NamedTuple):
    """A column that expectations can test."""

    kind: Kind
    meaning: str
    records: tuple[str, ...] = ()
    """Record types that have it; empty: all."""


FACTS = {
    "id": Fact("text", "the row's id"),
    "source": Fact("text", "the name of its source"),
    "characters": Fact("number", "characters of all its texts"),
    "prompt_characters": Fact("number", "characters of what stands before the answer; of all messages where there is none"),
    "turns": Fact("number", "turns of user and assistant; the answers of a preference are one"),
    "has_system": Fact("truth", "whether it begins with a system message"),
    "answer_characters": Fact("number", "characters of its last turn, or of its best answer", ("conversation", "preference")),
    "verifier_name": Fact("text", "what checks its answers; null where nothing does", ("prompt", "item")),
    "answer_count": Fact("number", "how many answers are compared", ("preference",)),
    "best_score": Fact("number", "the score of the best answer; null where it has none", ("preference",)),
    "score_gap": Fact("number", "its best score less its worst; null where fewer than two answers have one", ("preference",)),
    "strength": Fact("number", "the probability that the first answer is the better one; null where it is not known", ("preference",)),
}
"""Facts known for every row, a few bytes each."""
TEXTS = {
    "text": Fact("text", "all its messages and answers, a line end between them"),
    "answer": Fact("text", "its last turn, or its best answer", ("conversation", "preference")),
}
"""Texts that are re-read for a sample of the rows."""
COLUMNS = FACTS | TEXTS


class Takes(NamedTuple):
    """Arguments and columns that an expectation accepts."""

    of: tuple[Kind, ...] = ("text", "number", "truth")
    """Kinds of columns; empty: it applies to the rows as a whole."""
    one_of: tuple[str, ...] = ()
    """Arguments of which at least one is required."""
    also: tuple[str, ...] = ()
    """Optional arguments."""
    counts: bool = False
    """Whether its bounds are counts."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.one_of, *self.also)


BOUNDS, STRICT = ("min_value", "max_value"), ("strict_min", "strict_max")
SET, SHARE = ("value_set",), ("mostly",)
EXPECTATIONS = {
    # of each value
    "column_values_to_be_between": Takes(("number",), BOUNDS, STRICT + SHARE),
    "column_values_to_be_in_set": Takes(one_of=SET, also=SHARE),
    "column_values_to_not_be_in_set": Takes(one_of=SET, also=SHARE),
    "column_values_to_be_null": Takes(also=SHARE),
    "column_values_to_not_be_null": Takes(also=SHARE),
    "column_values_to_be_unique": Takes(also=SHARE),
    "column_values_to_match_regex": Takes(("text",), ("regex",), SHARE),
    "column_values_to_not_match_regex": Takes(("text",), ("regex",), SHARE),
    "column_values_to_match_regex_list": Takes(("text",), ("regex_list",), ("match_on", *SHARE)),
    "column_values_to_not_match_regex_list": Takes(("text",), ("regex_list",), SHARE),
    "column_value_lengths_to_be_between": Takes(("text",), BOUNDS, STRICT + SHARE, counts=True),
    # of a column
    "column_min_to_be_between": Takes(("number",), BOUNDS, STRICT),
    "column_max_to_be_between": Takes(("number",), BOUNDS, STRICT),
    "column_mean_to_be_between": Takes(("number",), BOUNDS, STRICT),
    "column_median_to_be_between": Takes(("number",), BOUNDS, STRICT),
    "column_stdev_to_be_between": Takes(("number",), BOUNDS, STRICT),
    "column_sum_to_be_between": Takes(("number",), BOUNDS, STRICT),
    "column_quantile_values_to_be_between": Takes(("number",), ("quantile_ranges",)),
    "column_distinct_values_to_be_in_set": Takes(one_of=SET),
    "column_distinct_values_to_contain_set": Takes(one_of=SET),
    "column_distinct_values_to_equal_set": Takes(one_of=SET),
    "column_most_common_value_to_be_in_set": Takes(one_of=SET),
    "column_unique_value_count_to_be_between": Takes(one_of=BOUNDS, also=STRICT, counts=True),
    "column_proportion_of_unique_values_to_be_between": Takes(one_of=BOUNDS, also=STRICT),
    "column_proportion_of_non_null_values_to_be_between": Takes(one_of=BOUNDS, also=STRICT),
    # of all rows
    "table_row_count_to_be_between": Takes((), BOUNDS, STRICT, counts=True),
}
"""The library's names, without `expect_`, with the arguments that each accepts."""


class QuantileRanges(Frozen):
    """Quantiles of a column with their bounds."""

    quantiles: Many[float] = Field(min_length=1)
    """From 0 to 1, e.g. [0.5, 0.99]."""
    value_ranges: Many[Many[int | float | None]]
    """[minimum, maximum] for each quantile; null: no bound."""

    @model_validator(mode="after")
    def _check_ranges(self) -> "QuantileRanges":
        outside = [quantile for quantile in self.quantiles if not 0 <= quantile <= 1]
        if outside:
            raise ValueError(f"quantiles {outside} are outside 0 to 1")
        if len(self.value_ranges) != len(self.quantiles) or any(len(bounds) != 2 for bounds in self.value_ranges):
            raise ValueError(f"value_ranges must be {len(self.quantiles)} pairs [minimum, maximum], one for each quantile")
        for bounds in self.value_ranges:
            _ordered(*bounds)
        return self


class Expectation(Frozen):
    """One expectation of Great Expectations, with the library's own arguments, tested on the rows that remain after filtering."""

    expect: str
    """Its name without `expect_`, e.g. `column_values_to_be_between`."""
    column: str | None = None
    """A fact about each row, or `text` or `answer`; see docs/expectations.md."""
    min_value: int | float | None = None
    """Minimum; no bound by default."""
    max_value: int | float | None = None
    """Maximum; no bound by default."""
    strict_min: bool | None = None
    """Whether to exclude `min_value` itself."""
    strict_max: bool | None = None
    """Whether to exclude `max_value` itself."""
    value_set: Many[Scalar] | None = Field(default=None, min_length=1)
    """Values of the column's kind."""
    regex: str | None = None
    """Python pattern, searched anywhere in the text."""
    regex_list: Many[str] | None = Field(default=None, min_length=1)
    """Several patterns."""
    match_on: Literal["any", "all"] | None = None
    """Whether any or all of `regex_list` must match; `any` by default."""
    quantile_ranges: QuantileRanges | None = None
    """Quantiles and their bounds."""
    mostly: float | None = Field(default=None, gt=0, le=1)
    """Share of non-null values that must meet the expectation; all by default."""
    sample: int | None = Field(default=None, ge=1, le=100_000)
    """For text columns: number of rows to test, drawn by hash of (seed, id); 10000 by default, or all rows if there are fewer."""
    severity: Literal["fail", "warn"] = "fail"
    """If not met: `fail` fails the stage, `warn` records and displays it."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_sample(cls, value: Any) -> Any:
        if isinstance(value, dict) and str(value.get("column")) in TEXTS and value.get("sample") is None:
            return {**value, "sample": SAMPLE}
        return value

    @field_validator("expect")
    @classmethod
    def _check_expect(cls, value: str) -> str:
        if value not in EXPECTATIONS:
            raise ValueError(f"unsupported expectation {value!r}; supported: {', '.join(EXPECTATIONS)}")
        return value

    @field_validator("regex", "regex_list")
    @classmethod
    def _check_regex(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for pattern in (value,) if isinstance(value, str) else value or ():
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{pattern!r} is not a valid Python regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _check_arguments(self) -> "Expectation":
        takes, given = EXPECTATIONS[self.expect], self.arguments()
        unknown = [name for name in given if name not in takes.arguments]
        if unknown:
            known = ", ".join(takes.arguments)
            raise ValueError(f"{self.expect} does not accept {', '.join(unknown)}: it accepts {known}")
        if takes.one_of and not any(name in given for name in takes.one_of):
            raise ValueError(f"{self.expect} needs {' or '.join(takes.one_of)}")
        self._refuse_bounds(takes)
        self._refuse_other_column(takes)
        return self

    def _refuse_bounds(self, takes: Takes) -> None:
        """Raise ValueError for empty ranges and bounds without effect."""
        _ordered(self.min_value, self.max_value)
        for bound, strict in zip((self.min_value, self.max_value), STRICT, strict=True):
            if takes.counts and isinstance(bound, float):
                raise ValueError(f"{self.expect} counts, so {bound} must be a whole number")
            if bound is None and getattr(self, strict) is not None:
                raise ValueError(f"{strict} has no effect without {strict.removeprefix('strict_')}_value: set that too, or remove it")

    def _refuse_other_column(self, takes: Takes) -> None:
        """Raise ValueError for a column that does not exist or does not suit the expectation."""
        if not takes.of:
            if self.column is not None:
                raise ValueError(f"{self.expect} applies to the rows as a whole: remove column {self.column!r}")
        elif self.column is None:
            raise ValueError(f"{self.expect} needs a column: one of {', '.join(COLUMNS)}")
        elif self.column not in COLUMNS:
            raise ValueError(f"column {not_one_of(self.column, [*COLUMNS])}")
        elif COLUMNS[self.column].kind not in takes.of:
            fitting = ", ".join(name for name, fact in COLUMNS.items() if fact.kind in takes.of)
            raise ValueError(
                f"{self.expect} does not apply to column {self.column} of kind {COLUMNS[self.column].kind}: use one of {fitting}"
            )
        else:
            kind = COLUMNS[self.column].kind
            others = [value for value in self.value_set or () if _kind_of(value) != kind]
            if others:
                raise ValueError(f"value_set {others} cannot occur in column {self.column}: its values are of kind {kind}")
        if self.sample is not None and self.column not in TEXTS:
            raise ValueError(f"sample {self.sample} applies only to {' and '.join(TEXTS)}; here all rows are tested: remove it")

    @model_serializer(mode="plain")
    def _serialize(self) -> dict[str, Any]:
        """Dump without the arguments of other expectations."""
        own = {"expect": self.expect, "column": self.column, **self.arguments(), "sample": self.sample, "severity": self.severity}
        return {name: value for name, value in own.items() if value is not None}

    def arguments(self) -> dict[str, Any]:
        """Arguments for the library besides the column, as plain values."""
        names = dict.fromkeys(name for takes in EXPECTATIONS.values() for name in takes.arguments)
        return {name: _plain(value) for name in names if (value := getattr(self, name)) is not None}


def refuse_unfit(expectations: Sequence[Expectation], record: str) -> None:
    """Raise ValueError for duplicates, and for columns that this record type does not have."""
    keys = [(one.expect, one.column, one.arguments(), one.sample) for one in expectations]
    for place, one in enumerate(expectations):
        if keys[place] in keys[:place]:
            raise ValueError(f"expectations: duplicate {one.expect} of {one.column or 'rows'} with equal arguments: remove one")
        of = COLUMNS[one.column].records if one.column else ()
        if of and record not in of:
            raise ValueError(f"expectations: column {one.column} exists for {' and '.join(of)} rows, but these are of type {record}")


def facts_named(expectations: Iterable[Expectation]) -> tuple[str, ...]:
    """Facts that must be computed for every row, besides ids and sources, which are always known."""
    named = {one.column for one in expectations} - {"id", "source"}
    return tuple(name for name in FACTS if name in named)


def texts_named(expectations: Iterable[Expectation]) -> tuple[str, ...]:
    """Texts that must be re-read."""
    named = {one.column for one in expectations}
    return tuple(name for name in TEXTS if name in named)


def _ordered(least: float | None, most: float | None) -> None:
    if least is not None and most is not None and least > most:
        raise ValueError(f"minimum {least} exceeds maximum {most}: swap them")


def _kind_of(value: Scalar) -> Kind:
    if isinstance(value, bool):
        return "truth"
    return "text" if isinstance(value, str) else "number"


def _plain(value: Any) -> Any:
    if isinstance(value, Frozen):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value
