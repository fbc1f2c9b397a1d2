"""Base class of all configs, canonical JSON, and hashes of it."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

Dtype = Literal["bf16", "fp32"]
HeadPrecision = Literal["fp32", "model"]


class Frozen(BaseModel):
    """Immutable and strict config: unknown keys, type coercion, NaN and infinities are errors."""

    # Build validators on first use: a job uses few of the imported classes, and building all of them would take a fifth of its startup.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _check_computed_fields(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Compute the computed fields (hashes of referenced files), so that edits during a run have no effect on cached ones, and check
        those of a dump against them.
        """
        computed = cls.model_computed_fields
        if not computed:
            return handler(value)
        given = {}
        if isinstance(value, dict):
            given = {name: value[name] for name in computed if name in value}
            value = {name: inner for name, inner in value.items() if name not in given}
        made = handler(value)
        for name in computed:
            now = getattr(made, name)
            if now != given.get(name, now):
                raise ValueError(f"{name} is now {now}, not {given[name]}: the underlying file has changed")
        return made


def added(default: Any, **bounds: Any) -> Any:
    """A field that earlier versions of its config lacked. Dumps omit it at its default, so that what was made before keeps its key."""
    return Field(default=default, exclude_if=lambda value: value == default, **bounds)


@dataclass(frozen=True)
class PortInput:
    """One artifact that arrives at a port of a stage."""

    type: str
    """Type of the artifact."""
    config: Frozen
    """Config of the stage that makes it."""


Arrived = Mapping[str, Mapping[str, PortInput]]
"""Port → label → artifact."""

T = TypeVar("T")

Many = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A YAML list as an immutable tuple (strict mode alone would reject the list)."""


def named_once(value: str | tuple[str, ...], field: str, what: str, example: str) -> str | tuple[str, ...]:
    """Validate a field that takes one name or several distinct names.

    Raises:
        ValueError: empty, or a name occurs twice.
    """
    names = (value,) if isinstance(value, str) else value
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{field} {value!r} must name one {what} or several distinct ones: {example}")
    return value


def canonical_json(value: Any) -> str:
    """Compact JSON with sorted keys; rejects NaN and values without a stable form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, by None."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path such as `a.b[0]`, scalar) of all nested values."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list | tuple) and value:
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{place}[{number}]")
    else:
        yield place, value


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
