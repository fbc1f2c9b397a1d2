"""Mixtures: the number of rows from each source, by count, share or epochs, and the row order.

Everything here can be validated from the recipe alone; `data/sources/shares.py` applies it to actual rows.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from pedigree.configs.base.frozen import Frozen

AMOUNTS = ("count", "share", "epochs")
"""Fields of a source that set the number of rows; at most one may be given."""
DRAWING = (*AMOUNTS, "repeat", "most_per_source", "weights")
"""All fields of a source that determine which rows are drawn, except its seed."""

When = Literal["before_filters", "after_filters"]


class By(Frozen):
    """Sort rows by a property; ties are shuffled."""

    by: Literal["length", "turns"]
    """`length`: characters of all texts. `turns`: user and assistant turns, with the answers of a preference counting as one."""
    direction: Literal["ascending", "descending"] = "ascending"
    """Shortest first, or longest first."""


Order = Annotated[
    Annotated[Literal["shuffled", "by_source", "interleaved"], Tag("name")] | Annotated[By, Tag("fact")],
    Discriminator(lambda value: "fact" if isinstance(value, (dict, By)) else "name"),
]


class Drawn(Frozen):
    """A source whose rows can be subsampled or repeated."""

    count: int | None = Field(default=None, ge=1)
    """Number of rows to take, drawn by hash of (seed, id). By default (without `count`, `share` and `epochs`) all rows are taken."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Rows to take, as a fraction of the stage's `total`, e.g. 0.25."""
    epochs: float | None = Field(default=None, gt=0)
    """Rows to take, as passes over all of them: with 2.5, each row occurs twice and half of the rows, rounded down, a third time."""
    repeat: bool = False
    """Allow `count` and `share` to exceed the available rows: every row is then repeated equally often, and some, drawn by hash, once
    more."""
    most_per_source: int | None = Field(default=None, ge=1)
    """For datasets with several `source`s: maximum rows to consider from each, drawn by hash."""
    weights: dict[str, float] = Field(default_factory=dict)
    """For datasets with several `source`s: name of a source → weight. `count` or `share` is divided among them in proportion; other sources
    are not used."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draw."""

    @field_validator("count", mode="before")
    @classmethod
    def _check_count(cls, value: Any) -> Any:
        if isinstance(value, float):
            instead = f"share: {value}, a part of the stage's `total`" if 0 < value <= 1 else f"a whole number, e.g. {max(1, round(value))}"
            raise ValueError(f"count is {value}, but must be a number of rows: write {instead}")
        return value

    @field_validator("share", mode="before")
    @classmethod
    def _check_share(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            whole = "1.0 for all rows, or " if value == 1 else ""
            raise ValueError(f"share is {value}, but must be a fraction of `total`: write {whole}count: {value} for that number of rows")
        return value

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: dict[str, float]) -> dict[str, float]:
        for name, weight in value.items():
            if weight <= 0:
                raise ValueError(f"the weight of {name} is {weight}, but must be above 0: remove {name} to take none of its rows")
        return value

    @model_validator(mode="after")
    def _check_amount(self) -> "Drawn":
        given = [name for name in AMOUNTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} all set the number of rows: keep one")
        if self.repeat and self.count is None and self.share is None:
            raise ValueError("repeat requires `count` or `share`: set one of them, or use epochs for whole passes")
        if self.weights and self.count is None and self.share is None:
            raise ValueError("weights divide `count` or `share`: set one of them")
        if self.weights and self.most_per_source is not None:
            raise ValueError("weights and most_per_source both set the rows of each source: remove one of them")
        return self

    @property
    def repeats(self) -> bool:
        """Whether a row may be taken more than once."""
        return self.repeat or (self.epochs or 0) > 1


def refuse_amounts(total: int | None, draw: When, record: str, sources: Sequence[Any]) -> None:
    """Raise ValueError if the sources' amounts contradict each other or the stage."""
    drawn = {place: source for place, source in enumerate(sources) if isinstance(source, Drawn)}
    for place, source in drawn.items():
        if not source.repeats:
            continue
        if record == "item":
            raise ValueError(f"source {place} repeats rows, but each item of a suite must be unique: remove repeat, and epochs above 1")
        if draw == "before_filters":
            raise ValueError(f"source {place} repeats rows, which filters would drop as duplicates: set `draw: after_filters` in the stage")
    shares = [place for place, source in drawn.items() if source.share is not None]
    if total is None:
        if shares:
            raise ValueError(f"source {shares[0]} has a share, but `total` is not set: set it, or use count instead")
        return
    open_ended = [place for place, source in enumerate(sources) if source.count is None and getattr(source, "share", None) is None]
    if open_ended:
        raise ValueError(f"total is {total}, but source {open_ended[0]} has no share or count: set one")
    _refuse_sum(total, sources)
    for place, rows in enumerate(amounts(total, sources)):
        if rows == 0:
            raise ValueError(f"share {sources[place].share} of total {total} rounds to 0 rows: raise it, or remove source {place}")


def _refuse_sum(total: int, sources: Sequence[Any]) -> None:
    """Counts and shares must add up to the total, within the one row of rounding."""
    counted = sum(source.count for source in sources if source.count is not None)
    shares = [_exact(source.share) for source in sources if source.count is None]
    left = total - counted
    if not shares and left:
        raise ValueError(f"the counts of all sources add up to {counted} rows, but total is {total}: make them equal, or remove total")
    if shares and left <= 0:
        raise ValueError(f"the counts of some sources add up to {counted} rows, which leaves none of total {total} for shares: raise total")
    if shares and abs(sum(shares) * total - left) >= 1:
        due = f"{left / total:.6g}"
        what = f"counts leave {left} rows, or {due}" if counted else "no source has a count"
        raise ValueError(f"the shares add up to {float(sum(shares)):.6g} of total {total}, but {what}: make them add up to {due}")


def amounts(total: int | None, sources: Sequence[Any]) -> list[int | None]:
    """Rows to take from each source; None where it depends on the size of the source."""
    found: list[int | None] = [source.count for source in sources]
    shares = [place for place, source in enumerate(sources) if getattr(source, "share", None) is not None]
    if total is None or not shares:
        return found
    left = total - sum(count for count in found if count is not None)
    for place, rows in zip(shares, apportioned(left, [_exact(sources[place].share) for place in shares]), strict=True):
        found[place] = rows
    return found


def apportioned(rows: int, weights: Sequence[Fraction]) -> list[int]:
    """Apportion rows by weight with the largest-remainder method; ties go to the earlier one.

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
    """The number as written: 0.1 is exactly a tenth."""
    return Fraction(str(number))
