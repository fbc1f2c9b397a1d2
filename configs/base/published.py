"""The published work that a recipe reproduces: its sources, scores and hardware, and the recipe's deviations.

It is not part of any stage's identity and does not change how anything runs.
"""

import math
from typing import Annotated

from pydantic import Field, computed_field

from pedigree.configs.base.frozen import Frozen, Many

Score = Annotated[float, Field(ge=0, le=100)]
"""In percent."""


class Origin(Frozen):
    """A paper or a public configuration."""

    title: str = Field(min_length=1)
    """Its usual title."""
    url: str = Field(pattern=r"^https://\S+$")
    """Where to read it."""
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{7,40}$")
    """Commit of a repository to which the recipe's comments refer."""


class Expected(Frozen):
    """Published scores of one task, in percent."""

    metric: str = Field(min_length=1)
    """Metric name, as in the task's form."""
    items: int = Field(ge=1)
    """Number of questions in the score."""
    samples: int = Field(default=1, ge=1)
    """Answers per question."""
    of: dict[str, Score] = Field(min_length=1)
    """Stage that makes the model → score."""

    @computed_field
    @property
    def tolerance(self) -> float:
        """Percentage points by which a good reproduction may deviate: two standard errors of a difference, 2 √(2 p (1 - p) / n) for n
        items, taken at the stage where it is largest, because published scores come without an interval."""
        shares = [score / 100 for score in self.of.values()]
        return round(max(200 * math.sqrt(2 * share * (1 - share) / self.items) for share in shares), 1)


class Compute(Frozen):
    """Compute that a stage used in the published work."""

    gpus: int = Field(ge=1)
    """Number of GPUs, including those of inference engines."""
    gpu: str = Field(min_length=1)
    """GPU model, e.g. `H100`."""
    hours: float = Field(gt=0)
    """Wall-clock hours."""

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.hours


class Published(Frozen):
    """The `published` block of a recipe. A recipe that extends another inherits the fields that it does not set."""

    sources: Many[Origin] = ()
    harness: str = ""
    """The evaluation harness behind the published scores, and the table that lists them."""
    scores: dict[str, Expected] = Field(default_factory=dict)
    """Task → its scores."""
    hardware: dict[str, Compute] = Field(default_factory=dict)
    """Stage → compute used."""
    differs: Many[str] = ()
    """Differences from the original, one sentence each."""
    lacks: Many[str] = ()
    """Properties of the original that no recipe field can express yet, one sentence each."""

    def over(self, inherited: "Published | None") -> "Published":
        """This block, with missing fields filled from `inherited`."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return inherited.model_copy(update=given) if inherited else self
