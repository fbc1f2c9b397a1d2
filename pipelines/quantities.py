"""Human-readable sizes, durations and numbers."""

import math

DAY = 86_400
YEAR = 365 * DAY
LONG_UNITS = (("hours", 3600, 3 * DAY), ("days", DAY, 2 * YEAR), ("years", YEAR, math.inf))
"""Unit name, its length in seconds, and the upper bound for using it, in seconds."""


def size(count: int) -> str:
    """Format a byte count: `512 bytes`, `1.4 MB`."""
    from rich import filesize  # not for `pedigree --version`

    return filesize.decimal(count)


def transferred(done: int, total: int) -> str:
    """Format transfer progress: `3.0 MB of 12.5 MB`."""
    return f"{size(done)} of {size(total)}"


def duration(seconds: float) -> str:
    """Format a duration: `8s`, `3m 05s`, `2h 07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def rough(seconds: float) -> str:
    """Format an estimated duration: `less than a minute`, `about 14 minutes`, `about 2.5 hours`, `about 12 days`, `about 3.4 years`."""
    if seconds < 45:
        return "less than a minute"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"about {counted(max(1, minutes), 'minute')}"
    unit, length = next((unit for unit in LONG_UNITS if seconds < unit[2]), LONG_UNITS[-1])[:2]
    count = seconds / length
    return f"about {count:.1f} {unit}" if count < 10 else f"about {count:,.0f} {unit}"


def number(value: float) -> str:
    """Format a number in about six characters or fewer."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k"
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    if abs(value) >= 0.01:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def reported(numbers: object) -> dict[str, float]:
    """Parse a heartbeat's metrics; null becomes NaN."""
    given = numbers.items() if isinstance(numbers, dict) else ()
    return {str(name): math.nan if value is None else float(value) for name, value in given}


def counted(count: int, what: str) -> str:
    """Format a count with its noun: `1 stage`, `2 stages`."""
    return f"{count} {what}{'s' * (count != 1)}"
