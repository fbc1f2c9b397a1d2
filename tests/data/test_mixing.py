"""The arithmetic of mixtures, by hand."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.mixing import apportioned
from pedigree.data.sources import shares
from pedigree.data.sources.shares import Portion


@pytest.mark.parametrize(
    ("rows", "weights", "expected"),
    [
        (10, [1, 1, 1], [4, 3, 3]),  # remainders are equal: the first
        (100, [1, 2, 4], [14, 29, 57]),  # 14.286, 28.571, 57.143: one is left, for .571
        (7, [1, 1, 1, 1], [2, 2, 2, 1]),
        (1, [1, 99], [0, 1]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_rows_are_divided_by_largest_remainders(rows, weights, expected):
    assert apportioned(rows, [Fraction(weight) for weight in weights]) == expected


def test_a_share_that_no_binary_number_holds_is_what_is_written():
    sources = [{"type": "files", "path": "a", "share": 0.7}, {"type": "files", "path": "b", "share": 0.3}]
    config = PrepareData.model_validate({"record": "conversation", "sources": sources, "total": 5})
    assert config.amounts == [4, 1]  # 3.5 and 1.5: the first; of binary 0.7 it would be less than 3.5


def ranked(count: int, portion: Portion, sources: list[str] | None = None) -> list[int]:
    column = pa.chunked_array([pa.array(sources or ["s"] * count)])
    return shares.drawn("it", portion, np.arange(count), column, "rows").tolist()


def test_rows_that_are_taken_again_stand_there_floor_or_ceil_times():
    assert Counter(ranked(4, Portion(rows=10, repeat=True))) == {0: 3, 1: 3, 2: 2, 3: 2}
    assert Counter(ranked(5, Portion(epochs=Fraction(5, 2)))) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}  # 12.5 rows, rounded down
    assert ranked(4, Portion(rows=4, repeat=True)) == [0, 1, 2, 3]


def test_caps_and_weights_go_by_the_sources_of_the_rows():
    sources = ["a", "b", "a", "b", "a", "a"]
    assert ranked(6, Portion(most_per_source=2), sources) == [0, 1, 2, 3]
    assert ranked(6, Portion(rows=3, most_per_source=2), sources) == [0, 1, 2]
    assert ranked(6, Portion(rows=3, weights={"b": 1.0, "a": 2.0}), sources) == [0, 2, 1]
    assert Counter(ranked(6, Portion(rows=6, weights={"b": 1.0, "a": 1.0}, repeat=True), sources)) == {0: 1, 2: 1, 4: 1, 1: 2, 3: 1}
    with pytest.raises(PedigreeError, match="3 of source b > 2 such rows"):
        ranked(6, Portion(rows=6, weights={"b": 1.0, "a": 1.0}, wording="count 6"), sources)
    with pytest.raises(PedigreeError, match="there are no rows of source c; available: a, b"):
        ranked(6, Portion(rows=6, weights={"b": 1.0, "c": 1.0}), sources)


def test_who_may_not_repeat_is_not_told_to():
    made = Portion.of(object(), 3, 5)  # a source that makes its rows has no field for it
    with pytest.raises(PedigreeError, match=r"it: count 3 > 2 rows: lower its count, and `total` with it$"):
        ranked(2, made)


def test_rows_of_each_source_are_spread_evenly():
    # of 2 rows at 1/4 and 3/4, of 3 at 1/6, 1/2 and 5/6
    positions = shares.positions(np.array([0, 0, 1, 1, 1]))
    assert positions.tolist() == pytest.approx([1 / 4, 3 / 4, 1 / 6, 1 / 2, 5 / 6])
