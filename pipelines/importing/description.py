"""What a config of another trainer says, under our names."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from pedigree.configs.base.other_names import ELSEWHERE
from pedigree.configs.base.texts import shown

Convert = Callable[[Any], Any]
"""A conversion, which may raise `Unfit`; None is no value."""
LONGEST = 100
"""Characters of a key and its value in a comment."""


class Unfit(Exception):
    """A value without an equivalent. The message says what is done; `instead` is the nearest value, if there is one."""

    def __init__(self, message: str, instead: Any = None) -> None:
        super().__init__(message)
        self.instead = instead


@dataclass
class Description:
    """A config under our names: fields of the stage that trains (`optimizer.epsilon`), fields of its model (`model.template`), and
    quantities from which `imported_recipe.py` derives fields (`batch.device`)."""

    trainer: str
    method: str
    """How it trains, by the names of TRL's trainers."""
    devices: int | None
    """On which it ran, if the file or the user says so."""
    values: dict[str, Any]
    """Name → value; at first, the trainer's defaults where ours differ."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Of the rows, as `prepare_data` takes them."""
    checks: dict[str, list[str]] = field(default_factory=dict)
    """Name, or `rows` or `train` → what the author should look at."""
    notes: dict[str, str] = field(default_factory=dict)
    """Field → how it came about."""
    left_out: list[str] = field(default_factory=list)
    """Keys that do not change the model."""

    def __post_init__(self) -> None:
        self.assumed = set(self.values)

    def check(self, name: str, text: str) -> None:
        self.checks.setdefault(name, []).append(shown(" ".join(text.split())))

    def take(self, name: str, default: Any = None) -> Any:
        """Remove and return a value."""
        return self.values.pop(name, default)

    def read(self, keys: Mapping[str, Any], names: Mapping[str, tuple[str, Convert | None]], left_out: re.Pattern[str]) -> None:
        """Fill in the values of keys.

        Args:
            keys: of the config.
            names: key → our name, and conversion of its values.
            left_out: beginnings of keys that do not change the model.
        """
        for key, value in keys.items():
            if key not in names:
                self._leave(key, value, left_out)
                continue
            name, convert = names[key]
            try:
                found = convert(value) if convert else value
            except Unfit as unfit:
                found = unfit.instead
                self.check(name, f"{written(key, value)}: {unfit}")
            if found is not None:
                self.values[name] = found
                self.assumed.discard(name)

    def _leave(self, key: str, value: Any, left_out: re.Pattern[str]) -> None:
        if left_out.match(key):
            self.left_out.append(shown(key))
        elif key not in ELSEWHERE:
            self.check("train", f"{written(key, value)}: unknown")
        elif on(value):
            self.check("train", f"{written(key, value)} → {ELSEWHERE[key]}")


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


def written(key: str, value: Any) -> str:
    """`key: value` for a comment."""
    text = f"{key}: {' '.join(value.split()) if isinstance(value, str) else flow(value)}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def on(value: Any) -> bool:
    """Whether a value switches something on; in YAML 1.1, which the other trainers read, `no` and `off` are false."""
    return bool(value) and not (isinstance(value, str) and value.lower() in ("no", "off", "false", "none", "null"))


def number(value: Any) -> float:
    """A number, also if it is written as text."""
    try:
        found = value if isinstance(value, (int, float)) else float(value)
    except (TypeError, ValueError):
        raise Unfit("not a number") from None
    if not abs(found) <= sys.float_info.max:
        raise Unfit("not a finite number")
    return found


def count(value: Any) -> int:
    """A whole number above 0; 3.0 is one."""
    if not number(value) == int(number(value)) > 0:
        raise Unfit("not a whole number above 0")
    return int(number(value))


def listed(value: Any) -> list[Any]:
    """A list, also of one value, or of a text with commas."""
    if isinstance(value, str):
        return [one.strip() for one in value.split(",") if one.strip()]
    return list(value) if isinstance(value, (list, tuple)) else [value]
