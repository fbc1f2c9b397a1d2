"""What data sets say of their rows in columns that become no part of a record: filters go by it, and nothing of it is kept.

A number may stand in a text: `0.75`, `-1.5e-3`, or `3/8`, as pass rates are written. `75%` and `1,000` are none: what they would be held
against cannot be told.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from configs.base.licenses import licence
from configs.rows.filters import DATE, Licences, Values

Said = Mapping[str, Any]
"""Column, or way through dots → value, of those that filters name and the row has."""
NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?|[+-]?\d{1,40}/0*[1-9]\d{0,39}", re.ASCII)
GOES_ON = re.compile(r"[\d/.-]")
"""What follows a year, a month or a day where they are none: `20230105` and `2023/01/05` are other forms, `1696118400` is a number."""
SHOWN = 100
"""Characters of a value in evidence."""


def against(one: Values, said: Said) -> str | None:
    """What speaks against a row of which this is said; None where nothing does."""
    column, value = _found(one.columns, said)
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


def unlicensed(one: Licences, said: Said, stated: str | None) -> str | None:
    """The licence that a row may not have, the first of several, and who says it; None where all are allowed.

    Args:
        one: what is allowed.
        said: of the row.
        stated: of its source; None: the row is made here.
    """
    if stated is None:
        return None
    column, values = next(((name, told) for name in one.columns if (told := _texts(said.get(name)))), ("", [stated]))
    allowed = {name.lower() for name in one.allow}
    found = next((name for name in map(_licence, values) if name.lower() not in allowed), None)
    if found is None:
        return None
    shown = f"{found:.{SHOWN}}".encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be written
    return f"{shown} ({column or 'as the source states'})"


def _texts(value: Any) -> list[str]:
    """A text, or those of a list, that say something."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text.strip()]


def number(value: Any) -> Fraction | None:
    """A number as it is written, 0.1 a tenth; None of what is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float | Decimal):
        return Fraction(str(value)) if math.isfinite(value) else None
    text = value.strip() if isinstance(value, str) else ""
    return Fraction(text) if NUMBER.fullmatch(text) else None


def _found(columns: Sequence[str], said: Said) -> tuple[str, Any]:
    """(the first column in which there is a value, the value): of a list of one the one, a date as a text."""
    column = next((name for name in columns if said.get(name) is not None), columns[0])
    value = said.get(column)
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return column, value.isoformat() if isinstance(value, date) else value


def _missing(one: Values, why: str) -> str | None:
    return why if one.missing == "drop" else None


def _equal(value: Any, named: bool | int | float | str) -> bool:
    if isinstance(named, bool | str) or isinstance(value, bool):
        return type(value) is type(named) and value == named
    return number(value) == number(named)


def _dated(value: Any) -> str | None:
    """A date as ISO 8601 writes it, with a T before the time; what comes after the seconds is left as it is."""
    text = value.strip() if isinstance(value, str) else ""
    found = DATE.match(text)
    if found is None or (found.end() <= len("2023-10-05") and GOES_ON.match(text, found.end())):
        return None
    return text.replace(" ", "T", 1)


def _cut(read: Any, bound: int | float | str) -> Any:
    """A date as far as the bound is written."""
    return read[: len(bound)] if isinstance(bound, str) else read


def _bound(bound: int | float | str) -> Any:
    return bound.replace(" ", "T", 1) if isinstance(bound, str) else number(bound)


@lru_cache(maxsize=1024)
def _licence(name: str) -> str:
    """As we write it; what cannot be one is left as it is."""
    try:
        return licence(name.strip())
    except ValueError:
        return name.strip()
