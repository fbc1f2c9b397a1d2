"""Which rows of a source are taken, and how often: decided by hash, whatever other sources there are.

Rows are known by their places, and arrive ranked: in the order of hashes of (seed, id).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.rows.mixing import Drawn, apportioned
from data.records.scattered import Numbers
from data.sources.procedural import SourceError


@dataclass(frozen=True)
class Portion:
    """How many rows of a source are taken; all of them when nothing is said."""

    seed: int = 0
    rows: int | None = None
    epochs: Fraction | None = None
    """Passes over the rows, where `rows` is None."""
    repeat: bool = False
    """Whether `rows` may be more than there are."""
    most_per_source: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    """By these, `rows` are divided among rows of several names."""
    said: str = ""
    """How the recipe says how many rows are taken."""
    remedy: str = "take fewer, or some more than once by `repeat: true` and the stage's `draw: after_filters`"
    """Against fewer rows than are taken."""

    @classmethod
    def of(cls, source: object, rows: int | None, total: int | None) -> "Portion":
        """What a source's config says.

        Args:
            source: whatever its type; of what is made here, all is taken, or `rows` where there is a total.
            rows: that the mixture takes of it.
            total: of the mixture, where the recipe has one.
        """
        if not isinstance(source, Drawn):
            return ALL if total is None else cls(rows=rows, said=f"count {rows}", remedy="lower its count, and `total` with it")
        epochs = None if source.epochs is None else Fraction(str(source.epochs))
        said = f"epochs {source.epochs}" if epochs is not None else f"count {rows}"
        if source.share is not None:
            said = f"share {source.share} of total {total}, {rows} rows,"
        return cls(source.seed, rows, epochs, source.repeat, source.most_per_source, source.weights, said)

    @property
    def repeats(self) -> bool:
        """Whether a row may be taken twice."""
        return self.repeat or self.epochs is not None

    @property
    def takes_all(self) -> bool:
        """Whether it takes every row once."""
        return self.rows is None and self.epochs is None and self.most_per_source is None

    def refuse(self, name: str, there: int, what: str) -> None:
        """Raises SourceError where there are fewer rows than are taken, and none may be taken twice; or where none is taken."""
        _refuse(self, f"{name}: {self.said}", self.rows, there, what)


ALL = Portion()


def drawn(name: str, portion: Portion, ranked: Numbers, sources: pa.ChunkedArray, what: str) -> Numbers:
    """The places that are taken, some of them several times: what comes first in rank is taken more often.

    Args:
        name: of the source, for errors.
        portion: how many.
        ranked: places of the rows that there are.
        sources: what each of them says that it comes from, in the same order.
        what: what these rows are called in errors, e.g. `usable rows`.

    Raises:
        SourceError: there are fewer rows than are taken, and none may be taken twice; or none is taken.
    """
    if portion.takes_all:
        return ranked
    said = f"{name}: {portion.said}"
    if portion.weights:
        return _weighted(said, portion, ranked, sources, what)
    if portion.most_per_source is not None:
        ranked = ranked[ranks(_coded(sources)[0]) < portion.most_per_source]
        what = f"{what} under most_per_source {portion.most_per_source}"
    if portion.epochs is not None:
        return _taken(portion, said, int(portion.epochs * len(ranked)), ranked, what)
    return _taken(portion, said, len(ranked) if portion.rows is None else portion.rows, ranked, what)


def drawn_rows(name: str, portion: Portion, ranked: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """The same of rows in memory."""
    sources = pa.chunked_array([pa.array([row["source"] for row in ranked], pa.string())])
    return [ranked[place] for place in drawn(name, portion, np.arange(len(ranked)), sources, what).tolist()]


def _weighted(said: str, portion: Portion, ranked: Numbers, sources: pa.ChunkedArray, what: str) -> Numbers:
    assert portion.rows is not None
    weights = sorted(portion.weights.items())  # a recipe's mappings have no order
    parts = apportioned(portion.rows, [Fraction(str(weight)) for _, weight in weights])
    codes, names = _coded(sources)
    unknown = [name for name, _ in weights if name not in names]
    if unknown:
        raise SourceError(f"{said} by weights: there are no {what} of source {unknown[0]}: there are those of {', '.join(sorted(names))}")
    return np.concatenate(
        [
            _taken(portion, f"{said} by weights, {rows} of source {name}", rows, ranked[codes == names[name]], f"such {what}")
            for (name, _), rows in zip(weights, parts, strict=True)
        ]
    )


def _taken(portion: Portion, said: str, rows: int, ranked: Numbers, what: str) -> Numbers:
    """So many places: whole passes over all of them, and the first ones once more."""
    _refuse(portion, said, rows, len(ranked), what)
    passes, rest = divmod(rows, max(1, len(ranked)))
    return np.concatenate([np.tile(ranked, passes), ranked[:rest]])


def _refuse(portion: Portion, said: str, rows: int | None, there: int, what: str) -> None:
    if rows is not None and rows > there and not (portion.repeats and there):
        raise SourceError(f"{said} > {there} {what}: {portion.remedy if there else 'leave the source out'}")
    if rows == 0 and there:
        raise SourceError(f"{said} takes none of {there} {what}: raise it, or leave the source out")


def _coded(names: pa.ChunkedArray) -> tuple[Numbers, dict[str, int]]:
    """(number of each name, name → its number)."""
    coded = names.combine_chunks().dictionary_encode()
    return np.asarray(coded.indices), {name: number for number, name in enumerate(coded.dictionary.to_pylist())}


def ranks(codes: Numbers) -> Numbers:
    """How many equal ones stand before each."""
    order = np.argsort(codes, kind="stable")
    ranked = codes[order]
    found = np.empty(len(codes), np.int64)
    found[order] = np.arange(len(codes)) - np.searchsorted(ranked, ranked)
    return found


def positions(sources: Numbers) -> NDArray[np.float64]:
    """Where each row stands when the rows of every source are spread evenly over the whole: the k-th of n at (k + 1/2) / n.

    Args:
        sources: number of each row's source.
    """
    return (ranks(sources) + 0.5) / np.bincount(sources)[sources]
