"""Sweeps over many cases: a few of them in `make test`, all in `make test-all`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def nightly_after(count: int, values: Iterable[Any]) -> list[Any]:
    """The values for `parametrize`, of which all but the first `count` are nightly."""
    return [value if place < count else pytest.param(value, marks=pytest.mark.nightly) for place, value in enumerate(values)]


def nightly_unless(daily: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, of which all but the daily ones are nightly; a case of several arguments is a tuple."""
    return [
        case if case in daily else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
        for case in cases
    ]
