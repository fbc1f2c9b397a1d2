"""What a recipe says of the work that it follows: where that is published, what came out there, what it took, and what differs here.

It is no part of any stage's identity: nothing runs otherwise because of it.
"""

import math
from typing import Annotated

from pydantic import Field, computed_field

from configs.base.frozen import Frozen, Many

Score = Annotated[float, Field(ge=0, le=100)]
"""In percent."""


class Origin(Frozen):
    """A paper or a public configuration."""

    title: str = Field(min_length=1)
    """As people call it."""
    url: str = Field(pattern=r"^https://\S+$")
    """Where it is read."""
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{7,40}$")
    """Of a repository: which state of it the recipe's lines refer to."""


class Expected(Frozen):
    """Published scores of one task, in percent."""

    metric: str = Field(min_length=1)
    """As the form of the task calls it."""
    items: int = Field(ge=1)
    """Questions that the score goes over."""
    samples: int = Field(default=1, ge=1)
    """Answers to each question."""
    of: dict[str, Score] = Field(min_length=1)
    """Stage that makes the model → score."""

    @computed_field
    @property
    def tolerance(self) -> float:
        """Points by which a good reproduction may be off: two standard errors of a difference, 2 √(2 p (1 - p) / n) for n items, of the
        stage where they are largest, since published scores come without an interval."""
        shares = [score / 100 for score in self.of.values()]
        return round(max(200 * math.sqrt(2 * share * (1 - share) / self.items) for share in shares), 1)


class Compute(Frozen):
    """What a stage took where it was published."""

    gpus: int = Field(ge=1)
    """How many, engines included."""
    gpu: str = Field(min_length=1)
    """Which, e.g. `H100`."""
    hours: float = Field(gt=0)
    """On the clock."""

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.hours


class Published(Frozen):
    """The block `published` of a recipe; one that extends another inherits the fields that it does not give itself."""

    sources: Many[Origin] = ()
    harness: str = ""
    """By which the published scores were measured, and the table that has them."""
    scores: dict[str, Expected] = Field(default_factory=dict)
    """Task → its scores."""
    hardware: dict[str, Compute] = Field(default_factory=dict)
    """Stage → what it took."""
    differs: Many[str] = ()
    """What is not as in the original, each a sentence."""
    lacks: Many[str] = ()
    """What of the original no field can say yet, each a sentence."""

    def over(self, inherited: "Published | None") -> "Published":
        """This block with the fields of another one that it does not give itself."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return inherited.model_copy(update=given) if inherited else self
