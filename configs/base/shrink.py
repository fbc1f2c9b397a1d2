"""How a kind of stage makes its config small enough for a rehearsal: few rows, few steps, short answers, tiny models.

Each kind has its own `shrink(cut)` next to its ports (`stages/NAME/kind.py`), and the values beside it. Every change is recorded with what
it leaves unproved; all other fields stay as the recipe has them.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pedigree.configs.base.frozen import Frozen

Reason = Literal["weights", "data", "batches", "lengths", "samples", "thresholds", "judges", "machine"]
"""What of the real run a change leaves unproved."""
INPUT = "in."
"""Prefix of a setting that is an input, which a rehearsal leaves out."""
TOKENS = 24
"""Of any generated answer."""
LEARNING_RATE = 1e-5
"""In a few steps a smaller rate changes less than bf16 can hold; with a larger one a tiny model becomes so sure of its answers that all
rewards are equal."""
RULE_ROWS = 48
"""Rows that a rule or a program makes."""
RESAMPLES = 200
"""Of a bootstrap."""
MAX_UNKNOWN = 0.5
"""Share of answers without a score that a rehearsal accepts."""
LOWEST, HIGHEST = -1e6, 1e6
"""Instead of bounds of scores, which a tiny model does not meet."""


class Reduced(NamedTuple):
    """One setting that differs between a rehearsal and the recipe or the profile."""

    where: str
    """Address of the stage, or name of the profile."""
    setting: str
    """Path of the field, with dots."""
    real: Any
    rehearsed: Any
    reason: Reason


@dataclass(frozen=True)
class StandIns:
    """What replaces the outside world in a rehearsal."""

    commits: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(`dataset` or `model`, repository) → commit of the generated one."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a stored source → sha256 of the generated file."""
    judge_url: str = ""
    """Where the rehearsal's own judge answers, in place of any endpoint."""


class Cut:
    """The values of one config while they are reduced, and the changes so far."""

    def __init__(self, address: str, config: Frozen, inputs: Mapping[str, Mapping[str, Frozen]], stand_ins: StandIns) -> None:
        """`inputs` are port → address → config of the stage there."""
        self.address, self.config, self.inputs, self.stand_ins = address, config, inputs, stand_ins
        self.full: dict[str, Any] = config.model_dump(mode="json", exclude_computed_fields=True)
        self.written: dict[str, Any] = config.model_dump(mode="json", exclude_computed_fields=True, exclude_unset=True)
        self.changes: list[Reduced] = []

    def get(self, place: str) -> Any:
        if place not in self.full and place in type(self.config).model_fields:  # left out of dumps at its default
            return getattr(self.config, place)
        value: Any = self.full
        for part in place.split("."):
            value = value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
        return value

    def set(self, place: str, value: Any, reason: Reason) -> None:
        real = self.get(place)
        if real == value:
            return
        self.changes.append(Reduced(self.address, place, real, value, reason))
        parts: list[Any] = [int(part) if part.isdigit() else part for part in place.split(".")]
        full: Any = self.full
        written: Any = self.written
        for part in parts[:-1]:
            full = full[part]
            if isinstance(written, dict):  # what is not written is a default as a whole, which its parts may not have
                written.setdefault(part, copy.deepcopy(full))
            written = written[part]
        full[parts[-1]] = written[parts[-1]] = value

    def most(self, place: str, bound: float, reason: Reason) -> None:
        """Lowers a value to `bound`; a value that the recipe leaves open stays open."""
        value = self.get(place)
        if value is not None and value > bound:
            self.set(place, bound, reason)

    def optimizer(self, place: str) -> None:
        """Raises a rate at which a few steps would change less than bf16 can hold, and omits warm-up, whose first step has rate 0."""
        if self.get(place)["learning_rate"] < LEARNING_RATE:
            self.set(f"{place}.learning_rate", LEARNING_RATE, "batches")
        self.most(f"{place}.warmup_ratio", 0.0, "batches")
        self.most(f"{place}.warmup_steps", 0, "batches")

    def leave_out(self, port: str) -> None:
        """Removes an input."""
        (source,) = self.inputs[port]
        self.changes.append(Reduced(self.address, f"{INPUT}{port}", source, None, "judges"))


Shrink = Callable[[Cut], None]


def unchanged(cut: Cut) -> None:
    """Nothing in the config takes time."""


def even(number: int) -> int:
    """The next number that two ranks can share."""
    return number + number % 2


def rehearsed_name(recipe: str) -> str:
    """Name of the recipe's file in a rehearsal, where a variant is a recipe by itself."""
    return recipe.replace("+", "-")


def model_repo(address: str, source: Any) -> str:
    """The repository that replaces a model's source: its own name on the hub, else a name after the stage."""
    return source.repo if source.type == "hub" else f"rehearsal/{rehearsed_name(address).replace('/', '-')}"
