"""Numbers as they were written, of columns that store them in binary."""

from decimal import Decimal
from typing import Any

import numpy as np


def as_written(value: Any) -> Decimal:
    """The shortest decimal that a finite real number was read from, also if a column stored it in 32 bits: 0.1 for 0.10000000149011612."""
    exact = Decimal(str(value))
    if isinstance(value, float) and len(exact.as_tuple().digits) > 12:  # 2^-13, which 32 bits hold too, has 10
        with np.errstate(over="ignore"):
            stored = np.float32(value)
        return Decimal(str(stored)) if float(stored) == value else exact
    return exact
