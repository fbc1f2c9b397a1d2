"""Filters on further columns of a dataset, which do not become part of a record.

Numbers may be texts: `0.75`, `-1.5e-3`, or `3/8`, as in pass rates. `75%` and `1,000` are not numbers, because their scale is ambiguous.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pedigree.configs.base.licenses import licence
from pedigree.configs.rows.filters import DATE, Licences, Values
from pedigree.data.records.decimals import as_written

ColumnValues = Mapping[str, Any]
"""Column or dotted path → value, for columns that filters name and the row has."""
NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?|[+-]?\d{1,40}/0*[1-9]\d{0,39}", re.ASCII)
GOES_ON = re.compile(r"[\d/.-]")
"""Characters after which a date prefix is not a date: `20230105` and `2023/01/05` are other forms, `1696118400` is a number."""
SHOWN = 100
"""Maximum characters of a value in evidence."""


def against(one: Values, row: ColumnValues) -> str | None:
    """Evidence against a row with these column values; None to keep it."""
    column, value = _found(one.columns, row)
    shown = f"{column} {value!r:.{SHOWN}}"
    if value is None:
        return _missing(one, f"{column} says nothing")
    return _outside(one, value, shown) if one.has_bounds else _unlisted(one, value, shown)


def _unlisted(one: Values, value: Any, shown: str) -> str | None:
    if not isinstance(value, bool | int | float | str | Decimal):
        return _missing(one, f"{shown} is no single value")
    is_named = any(_equal(value, named) for named in one.one_of or one.none_of or ())
    return None if is_named == (one.one_of is not None) else shown


def _outside(one: Values, value: Any, shown: str) -> str | None:
    dated = isinstance(one.min if one.min is not None else one.max, str)
    read = _dated(value) if dated else number(value)
    if read is None:
        return _missing(one, f"{shown} is no {'date' if dated else 'number'}")
    if one.min is not None and _cut(read, one.min) < _bound(one.min):
        return f"{shown} < {one.min}"
    return f"{shown} > {one.max}" if one.max is not None and _cut(read, one.max) > _bound(one.max) else None


def unlicensed(one: Licences, row: ColumnValues, stated: str | None) -> str | None:
    """The first license of a row that is not allowed, and where it is stated; None if all are allowed. `stated` is the license of its
    source, None for generated rows."""
    if stated is None:
        return None
    column, values = next(((name, texts) for name in one.columns if (texts := _texts(row.get(name)))), ("", [stated]))
    allowed = {name.lower() for name in one.allow}
    found = next((name for name in map(_licence, values) if name.lower() not in allowed), None)
    if found is None:
        return None
    shown = f"{found:.{SHOWN}}".encode(errors="backslashreplace").decode()  # a lone surrogate cannot be encoded
    return f"{shown} ({column or 'as the source states'})"


def _texts(value: Any) -> list[str]:
    """A text, or the texts of a list, that are not blank."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text.strip()]


def number(value: Any) -> Fraction | None:
    """The exact decimal number, 0.1 being a tenth; None if it is not a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float | Decimal):
        return Fraction(as_written(value)) if math.isfinite(value) else None
    text = value.strip() if isinstance(value, str) else ""
    return Fraction(text) if NUMBER.fullmatch(text) else None


def _found(columns: Sequence[str], row: ColumnValues) -> tuple[str, Any]:
    """(first column with a value, the value); unwraps lists of one element, and converts dates to text."""
    column = next((name for name in columns if row.get(name) is not None), columns[0])
    value = row.get(column)
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return column, value.isoformat() if isinstance(value, date) else value


def _missing(one: Values, why: str) -> str | None:
    return why if one.missing == "drop" else None


def _equal(value: Any, named: bool | int | float | str) -> bool:
    if isinstance(named, bool | str) or isinstance(value, bool):
        return type(value) is type(named) and value == named
    return number(value) == number(named)


def _dated(value: Any) -> str | None:
    """An ISO 8601 date with T before the time; anything after the seconds is unchanged."""
    text = value.strip() if isinstance(value, str) else ""
    found = DATE.match(text)
    if found is None or (found.end() <= len("2023-10-05") and GOES_ON.match(text, found.end())):
        return None
    return text.replace(" ", "T", 1)


def _cut(read: Any, bound: int | float | str) -> Any:
    """A date truncated to the bound's precision."""
    return read[: len(bound)] if isinstance(bound, str) else read


def _bound(bound: int | float | str) -> Any:
    return bound.replace(" ", "T", 1) if isinstance(bound, str) else number(bound)


@lru_cache(maxsize=1024)
def _licence(name: str) -> str:
    """The canonical license name, or the stripped text if it is not a license."""
    try:
        return licence(name.strip())
    except ValueError:
        return name.strip()
