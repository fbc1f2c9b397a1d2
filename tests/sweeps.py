"""Sweeps over many cases: a few of them in `make test`, all in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly_after(count: int, values: Iterable[Any]) -> list[Any]:
    """The values for `parametrize`, of which all but the first `count` are nightly."""
    return [value if place < count else pytest.param(value, marks=pytest.mark.nightly) for place, value in enumerate(values)]
