"""Row sampling per source, by hash and independent of other sources.

Rows are represented by their positions and arrive ranked by hash of (seed, id).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.mixing import Drawn, apportioned
from pedigree.data.records.scattered import Numbers


@dataclass(frozen=True)
class Portion:
    """How many rows to take from a source; all by default."""

    seed: int = 0
    rows: int | None = None
    epochs: Fraction | None = None
    """Passes over the rows, if `rows` is None."""
    repeat: bool = False
    """Whether `rows` may exceed the number of available rows."""
    most_per_source: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    """Row source name → weight by which `rows` are divided."""
    wording: str = ""
    """The recipe's wording of the number of rows, for errors."""
    remedy: str = "take fewer, or repeat rows with `repeat: true` and the stage's `draw: after_filters`"
    """Remedy for too few rows, for errors."""

    @classmethod
    def of(cls, source: object, rows: int | None, total: int | None) -> "Portion":
        """The portion that a source's config specifies.

        Args:
            source: config of any type; generated sources contribute all rows, or `rows` if there is a total.
            rows: number of rows that the mixture takes from it.
            total: total of the mixture, if the recipe has one.
        """
        if not isinstance(source, Drawn):
            return ALL if total is None else cls(rows=rows, wording=f"count {rows}", remedy="lower its count, and `total` with it")
        epochs = None if source.epochs is None else Fraction(str(source.epochs))
        wording = f"epochs {source.epochs}" if epochs is not None else f"count {rows}"
        if source.share is not None:
            wording = f"share {source.share} of total {total}, {rows} rows,"
        return cls(source.seed, rows, epochs, source.repeat, source.most_per_source, source.weights, wording)

    @property
    def repeats(self) -> bool:
        """Whether a row may be taken twice."""
        return self.repeat or self.epochs is not None

    @property
    def takes_all(self) -> bool:
        """Whether every row is taken once."""
        return self.rows is None and self.epochs is None and self.most_per_source is None

    def refuse(self, wording: str, rows: int | None, there: int, what: str) -> None:
        """Raise PedigreeError if `rows` exceed those that are there and repeats are not allowed, or if none would be taken."""
        if rows is not None and rows > there and not (self.repeats and there):
            raise PedigreeError(f"{wording} > {there} {what}: {self.remedy if there else 'leave the source out'}")
        if rows == 0 and there:
            raise PedigreeError(f"{wording} takes none of {there} {what}: raise it, or leave the source out")


ALL = Portion()


def drawn(name: str, portion: Portion, ranked: Numbers, sources: pa.ChunkedArray, what: str) -> Numbers:
    """The positions drawn, possibly with repeats; higher-ranked rows repeat first. Raises PedigreeError as `Portion.refuse`.

    Args:
        name: source name, for errors.
        portion: how many to draw.
        ranked: positions of the available rows.
        sources: `source` of each, in the same order.
        what: name for these rows in errors, e.g. `usable rows`.
    """
    if portion.takes_all:
        return ranked
    wording = f"{name}: {portion.wording}"
    if portion.weights:
        return _weighted(wording, portion, ranked, sources, what)
    if portion.most_per_source is not None:
        ranked = ranked[ranks(_coded(sources)[0]) < portion.most_per_source]
        what = f"{what} under most_per_source {portion.most_per_source}"
    rows = len(ranked) if portion.rows is None else portion.rows
    return _taken(portion, wording, rows if portion.epochs is None else int(portion.epochs * len(ranked)), ranked, what)


def _weighted(wording: str, portion: Portion, ranked: Numbers, sources: pa.ChunkedArray, what: str) -> Numbers:
    assert portion.rows is not None
    weights = sorted(portion.weights.items())  # a recipe's mappings have no order
    parts = apportioned(portion.rows, [Fraction(str(weight)) for _, weight in weights])
    codes, names = _coded(sources)
    unknown = [name for name, _ in weights if name not in names]
    if unknown:
        raise PedigreeError(f"{wording} by weights: there are no {what} of source {unknown[0]}; available: {', '.join(sorted(names))}")
    return np.concatenate(
        [
            _taken(portion, f"{wording} by weights, {rows} of source {name}", rows, ranked[codes == names[name]], f"such {what}")
            for (name, _), rows in zip(weights, parts, strict=True)
        ]
    )


def _taken(portion: Portion, wording: str, rows: int, ranked: Numbers, what: str) -> Numbers:
    """The positions of `rows` rows: whole passes, then the first ones again."""
    portion.refuse(wording, rows, len(ranked), what)
    passes, rest = divmod(rows, max(1, len(ranked)))
    return np.concatenate([np.tile(ranked, passes), ranked[:rest]])


def _coded(names: pa.ChunkedArray) -> tuple[Numbers, dict[str, int]]:
    """(code of each name, name → code)."""
    coded = names.combine_chunks().dictionary_encode()
    return np.asarray(coded.indices), {name: number for number, name in enumerate(coded.dictionary.to_pylist())}


def ranks(codes: Numbers) -> Numbers:
    """The number of equal codes before each."""
    order = np.argsort(codes, kind="stable")
    ranked = codes[order]
    found = np.empty(len(codes), np.int64)
    found[order] = np.arange(len(codes)) - np.searchsorted(ranked, ranked)
    return found


def positions(sources: Numbers) -> NDArray[np.float64]:
    """Positions that spread the rows of each source (by its number) evenly over the whole: the k-th of n is at (k + 1/2) / n."""
    return (ranks(sources) + 0.5) / np.bincount(sources)[sources]
