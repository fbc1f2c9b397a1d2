"""The base of every config class, canonical JSON, and hashes over it."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ModelWrapValidatorHandler, model_validator

Dtype = Literal["bf16", "fp32"]


class Frozen(BaseModel):
    """Immutable, strict, closed: unknown keys, silently coerced types and numbers that are none are errors."""

    # Validators are built at the first use: a job uses few of the classes that it imports, and all of them would be a fifth of its start.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def computed_fields_agree(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """A dump holds computed fields (hashes of what a name stands for); reading it back checks that they still agree."""
        given = {}
        if isinstance(value, dict):
            given = {name: value[name] for name in cls.model_computed_fields if name in value}
            value = {name: inner for name, inner in value.items() if name not in given}
        made = handler(value)
        for name, expected in given.items():
            if getattr(made, name) != expected:
                raise ValueError(f"{name} is {getattr(made, name)} now, not {expected}: the file behind it has changed")
        return made


@dataclass(frozen=True)
class Given:
    """What arrives at a port of a stage."""

    type: str
    """Of the artifact."""
    config: Frozen
    """Of the stage that makes it."""


Arrived = Mapping[str, Mapping[str, Given]]
"""Port → label → what arrives."""

T = TypeVar("T")

Many = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A YAML list as an immutable tuple (strict mode alone would refuse the list)."""


def named_once(value: str | tuple[str, ...], field: str, what: str, example: str) -> str | tuple[str, ...]:
    """The value of a field that names one thing, or several.

    Raises:
        ValueError: it names none, or one twice.
    """
    names = (value,) if isinstance(value, str) else value
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{field} {value!r} must name one {what}, or several different ones: {example}")
    return value


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spare space; refuses NaN and whatever has no stable form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with None in place of NaN and infinities, for which JSON has no number."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
