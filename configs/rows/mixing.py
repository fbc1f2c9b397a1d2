"""How many rows of each source a set takes, by number, by share or by passes, and in which order they stand.

All is said in the recipe and can be checked there; what it means for given rows is in `data/sources/shares.py`.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from configs.base.frozen import Frozen

AMOUNTS = ("count", "share", "epochs")
"""Fields of a source that say how many of its rows are taken; one of them at most."""
DRAWING = (*AMOUNTS, "repeat", "most_per_source", "weights")
"""All fields of a source that say which of its rows are taken, its seed apart."""

When = Literal["before_filters", "after_filters"]


class By(Frozen):
    """In the order of what is known of each row; equal ones shuffled."""

    by: Literal["length", "turns"]
    """Characters of all its texts, or its turns of user and assistant; the answers of a preference are one more."""
    direction: Literal["ascending", "descending"] = "ascending"
    """Whether the shortest come first, or the longest."""


Order = Annotated[
    Annotated[Literal["shuffled", "by_source", "interleaved"], Tag("name")] | Annotated[By, Tag("fact")],
    Discriminator(lambda value: "fact" if isinstance(value, (dict, By)) else "name"),
]


class Drawn(Frozen):
    """Of which rows some may be taken, or some several times."""

    count: int | None = Field(default=None, ge=1)
    """Rows to take, drawn by hash of (seed, id): a whole number. All are taken where neither this nor `share` nor `epochs` is said."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Rows to take, as a part of the stage's `total`, e.g. 0.25."""
    epochs: float | None = Field(default=None, gt=0)
    """Rows to take, as passes over all of them: of 2.5 each row stands there twice, and half of them, rounded down, a third time."""
    repeat: bool = False
    """Whether `count` and `share` may be more than there is: every row is then taken equally often, and some, drawn by hash, once more."""
    most_per_source: int | None = Field(default=None, ge=1)
    """Where a data set has rows of many `source`s: rows of each that are considered at most, drawn by hash."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Where a data set has rows of many `source`s: name of one → its weight. `count` or `share` is divided among them in proportion, and no
    other is taken."""
    seed: int = Field(default=0, ge=0)

    @field_validator("count", mode="before")
    @classmethod
    def rows_are_whole(cls, value: Any) -> Any:
        if isinstance(value, float):
            instead = f"share: {value}, a part of the stage's `total`" if 0 < value <= 1 else f"a whole number, e.g. {max(1, round(value))}"
            raise ValueError(f"count is {value}, and counts rows: write {instead}")
        return value

    @field_validator("share", mode="before")
    @classmethod
    def shares_are_parts(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            whole = "1.0 for all of them, or " if value == 1 else ""
            raise ValueError(f"share is {value}, and says a part of `total`: write {whole}count: {value} for so many rows")
        return value

    @field_validator("weights")
    @classmethod
    def weights_are_positive(cls, value: dict[str, float]) -> dict[str, float]:
        for name, weight in value.items():
            if weight <= 0:
                raise ValueError(f"the weight of {name} is {weight}, and must be above 0: leave {name} out to take none of it")
        return value

    @model_validator(mode="after")
    def amount_is_said_once(self) -> "Drawn":
        said = [name for name in AMOUNTS if getattr(self, name) is not None]
        if len(said) > 1:
            raise ValueError(f"{' and '.join(said)} say how many rows are taken in {len(said)} ways: leave one")
        if self.repeat and self.count is None and self.share is None:
            raise ValueError("repeat is said of `count` or `share`: set one of them, or take whole passes by epochs")
        if self.weights and self.count is None and self.share is None:
            raise ValueError("weights divide `count` or `share`: set one of them")
        if self.weights and self.most_per_source is not None:
            raise ValueError("weights say how many rows of each source are taken, and so does most_per_source: leave one of them out")
        return self

    @property
    def repeats(self) -> bool:
        """Whether a row may be taken twice."""
        return self.repeat or (self.epochs or 0) > 1


def refuse_amounts(total: int | None, draw: When, record: str, sources: Sequence[Any]) -> None:
    """Raises ValueError for amounts of sources that do not go together, or not with what the stage says."""
    drawn = {place: source for place, source in enumerate(sources) if isinstance(source, Drawn)}
    for place, source in drawn.items():
        if not source.repeats:
            continue
        if record == "item":
            raise ValueError(f"source {place} repeats rows, and every item of a suite is asked once: leave repeat out, and epochs above 1")
        if draw == "before_filters":
            raise ValueError(f"source {place} repeats rows, which filters would take for duplicates: set `draw: after_filters` beside it")
    shares = [place for place, source in drawn.items() if source.share is not None]
    if total is None:
        if shares:
            raise ValueError(f"source {shares[0]} takes a share, and nothing says of how many rows: set `total`, or write a count")
        return
    open_ended = [place for place, source in enumerate(sources) if source.count is None and getattr(source, "share", None) is None]
    if open_ended:
        raise ValueError(f"total is {total}, and source {open_ended[0]} does not say how much of it is its own: write a share or a count")
    _refuse_sum(total, sources)
    for place, rows in enumerate(amounts(total, sources)):
        if rows == 0:
            raise ValueError(f"share {sources[place].share} of total {total} is no row: raise it, or leave source {place} out")


def _refuse_sum(total: int, sources: Sequence[Any]) -> None:
    """Counts and shares make up the total, to within the one row by which shares may be rounded."""
    counted = sum(source.count for source in sources if source.count is not None)
    shares = [_exact(source.share) for source in sources if source.count is None]
    left = total - counted
    if not shares and left:
        raise ValueError(f"the counts of all sources are {counted} rows, and total is {total}: make them equal, or leave total out")
    if shares and left <= 0:
        raise ValueError(f"the counts of some sources are {counted} rows, and leave none of total {total} to shares: raise total")
    if shares and abs(sum(shares) * total - left) >= 1:
        due = f"{left / total:.6g}"
        what = f"counts leave {left} rows of it, which are {due}" if counted else "no source has a count"
        raise ValueError(f"the shares make {float(sum(shares)):.6g} of total {total}, and {what}: let them add up to {due}")


def amounts(total: int | None, sources: Sequence[Any]) -> list[int | None]:
    """By source, the rows that it is to give; None where that follows from how many there are."""
    found: list[int | None] = [source.count for source in sources]
    shares = [place for place, source in enumerate(sources) if getattr(source, "share", None) is not None]
    if total is None or not shares:
        return found
    left = total - sum(count for count in found if count is not None)
    for place, rows in zip(shares, apportioned(left, [_exact(sources[place].share) for place in shares]), strict=True):
        found[place] = rows
    return found


def apportioned(rows: int, weights: Sequence[Fraction]) -> list[int]:
    """Rows in proportion to weights, by the method of largest remainders: the earlier one where remainders are equal.

    Example: 10 rows by 1 : 1 : 1 → 4, 3, 3.
    """
    whole = sum(weights)
    exact = [rows * weight / whole for weight in weights]
    found = [int(one) for one in exact]
    rest = sorted(range(len(weights)), key=lambda place: (found[place] - exact[place], place))
    for place in rest[: rows - sum(found)]:
        found[place] += 1
    return found


def _exact(number: float) -> Fraction:
    """As it is written: 0.1 is a tenth."""
    return Fraction(str(number))
