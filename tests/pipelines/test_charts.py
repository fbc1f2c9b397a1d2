"""Drawings of the report: what must hold whatever is drawn."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from pedigree.pipelines.publish.charts import (
    MOST_POINTS,
    NODE_WIDTH,
    Box,
    Estimate,
    _ticks,
    curve_svg,
    graph_svg,
    intervals_svg,
    layers_of,
    thinned,
)


def box(name, *parents, kind="sft"):
    return Box(name, name, kind, parents)


DIAMOND = [box("late"), box("a"), box("b", "a"), box("c", "a"), box("d", "b", "c"), box("e", "d", "a", "late")]


def test_a_box_stands_below_its_lowest_parent_and_a_source_just_above_its_first_child():
    assert layers_of(DIAMOND) == {"a": 0, "b": 1, "c": 1, "d": 2, "e": 3, "late": 2}


def test_boxes_of_one_layer_do_not_touch():
    many = [box("root"), *(box(f"n{i}", "root") for i in range(6)), box("end", *(f"n{i}" for i in range(6)))]
    rects = re.findall(r'<rect x="([\d.-]+)" y="([\d.]+)" width="196"', graph_svg(many, "g"))
    rows: dict[str, list[float]] = {}
    for x, y in rects:
        rows.setdefault(y, []).append(float(x))
    assert sorted(len(row) for row in rows.values()) == [1, 1, 6]
    for row in rows.values():
        assert all(right - left >= NODE_WIDTH for left, right in pairwise(sorted(row)))


def test_everything_lies_inside_the_drawing():
    svg = graph_svg(DIAMOND, "g")
    width, height = (float(part) for part in re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # pyright: ignore[reportOptionalMemberAccess]
    for x, y in re.findall(r'<rect x="([\d.-]+)" y="([\d.-]+)" width="196"', svg):
        assert 0 <= float(x) <= width - NODE_WIDTH and 0 <= float(y) <= height - 30
    path = re.search(r'<path class="edge" d="([^"]+)"', svg)
    assert path and all(-1 <= float(x) <= width + 1 for x in re.findall(r"M([\d.-]+) ", path[1]))


def test_a_line_is_drawn_once_however_many_stages_read_from_it():
    # a feeds c and d two and three layers down: one lane that branches
    svg = graph_svg([box("a"), box("b", "a"), box("c", "b", "a"), box("d", "c", "a")], "g")
    path = re.search(r'<path class="edge" d="([^"]+)"', svg)
    assert path and path[1].count("M") == 7  # a-b, b-c, c-d, a-lane1, lane1-c, lane1-lane2, lane2-d


@pytest.mark.parametrize(
    "svg",
    [
        graph_svg([Box("x", "<b>&\"'", "<kind>", (), hover="<script>")], "<label>"),
        curve_svg([(1, 1.0), (2, 2.0)], "<loss>"),
        intervals_svg([Estimate("<policy>", 0.5, 0.4, 0.6)], "<scores>"),
    ],
)
def test_text_is_escaped_and_the_drawing_is_well_formed(svg):
    ElementTree.fromstring(svg)
    assert "<script>" not in svg and "<b>" not in svg and "<policy>" not in svg


def test_long_curves_are_thinned_to_means_and_keep_their_last_point():
    points = [(float(x), 0.0 if x % 2 else 2.0) for x in range(20 * (MOST_POINTS - 1) + 1)]
    short = thinned(points)
    assert len(short) == MOST_POINTS and short[-1] == points[-1]
    assert all(y == pytest.approx(1.0) for _, y in short[:-1])  # 20 points each: ten of 0 and ten of 2


def test_a_curve_skips_what_is_not_finite_and_says_when_nothing_is():
    assert "nan" not in curve_svg([(1, float("nan")), (2, 1.0), (3, 2.0)], "loss")
    assert "no finite values" in curve_svg([(1, float("inf"))], "loss")
    assert curve_svg([(1, 5.0)], "loss").count("<circle") == 1  # one point has no range to divide by


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.02, 0.3), (0, 0.001), (-40, 60), (3, 3.5)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = _ticks(low, high)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert all(len(f"{tick:g}") <= 6 for tick in ticks)


def test_differences_whose_interval_excludes_zero_are_marked():
    svg = intervals_svg([Estimate("up", 0.1, 0.05, 0.2), Estimate("unclear", 0.1, -0.01, 0.2)], "d", zero_line=True)
    assert svg.count('class="estimate clear"') == 1 and "+0.100" in svg
