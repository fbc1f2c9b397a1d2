"""SVG charts for reports: recipe graphs, curves, intervals. Pure functions; colors are CSS classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, isfinite, log10

from pedigree.configs.language.kinds import recorded_kind
from pedigree.pipelines.quantities import number

NODE_WIDTH, NODE_HEIGHT = 196.0, 34.0
LANE_WIDTH = 10.0
"""Width reserved for an edge that crosses a layer."""
GAP_X, GAP_Y = 22.0, 24.0
MARGIN = 6.0
SWEEPS = 121
"""Placement passes, alternating down and up; odd, so that the last goes down."""
MOST_POINTS = 240
"""Maximum points of one curve; longer curves are shown as means over equal spans."""


@dataclass(frozen=True)
class Box:
    """One stage in a recipe graph."""

    id: str
    name: str
    kind: str
    parents: tuple[str, ...]
    note: str = ""
    """Short text on the right, e.g. the wall time."""
    hover: str = ""
    missing: bool = False
    """Not built; drawn as an outline."""


def layers_of(boxes: Sequence[Box]) -> dict[str, int]:
    """Layer of every box: one below its lowest parent; boxes without parents go directly above their highest child."""
    layer: dict[str, int] = {}
    for box in boxes:  # parents come first
        layer[box.id] = 1 + max((layer[parent] for parent in box.parents), default=-1)
    children: dict[str, list[str]] = {box.id: [] for box in boxes}
    for box in boxes:
        for parent in box.parents:
            children[parent].append(box.id)
    for box in boxes:
        if not box.parents and children[box.id]:
            layer[box.id] = min(layer[child] for child in children[box.id]) - 1
    return layer


@dataclass
class _Cell:
    """A box, or the lane of an edge that crosses a layer."""

    id: str
    layer: int
    width: float
    box: Box | None
    up: list[str]
    down: list[str]
    x: float = 0.0
    """Center."""


def graph_svg(boxes: Sequence[Box], label: str) -> str:
    """Layered graph drawing (Sugiyama et al. 1981): parents above children, edge crossings reduced by sweeps."""
    if not boxes:
        return ""
    cells = _cells(boxes)
    rows: list[list[_Cell]] = [[] for _ in range(1 + max(cell.layer for cell in cells.values()))]
    for cell in cells.values():
        rows[cell.layer].append(cell)
    _order(rows)
    _place(rows, cells)
    left = min(cell.x - cell.width / 2 for cell in cells.values())
    for cell in cells.values():
        cell.x += MARGIN - left
    width = max(cell.x + cell.width / 2 for cell in cells.values()) + MARGIN
    height = len(rows) * (NODE_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    lines = "".join(_line(cell, cells[name]) for cell in cells.values() for name in cell.down)
    nodes = "".join(_node(cell, cell.box) for cell in cells.values() if cell.box)
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
    return f'<svg class="graph" {box} role="img" aria-label="{escape(label)}"><path class="edge" d="{lines}"/>{nodes}</svg>'


def _cells(boxes: Sequence[Box]) -> dict[str, _Cell]:
    layer = layers_of(boxes)
    cells = {box.id: _Cell(box.id, layer[box.id], NODE_WIDTH, box, [], []) for box in boxes}
    lanes: dict[tuple[str, int], str] = {}
    chains = []
    for box in boxes:
        for parent in box.parents:
            chain = [parent]
            for between in range(layer[parent] + 1, layer[box.id]):
                # edges from one stage share a lane, so five readers of `base` appear as one branching line
                name = lanes.setdefault((parent, between), f"{parent}|{between}")
                cells.setdefault(name, _Cell(name, between, LANE_WIDTH, None, [], []))
                chain.append(name)
            chain.append(box.id)
            chains.append(chain)
    for chain in chains:
        for above, below in pairwise(chain):
            if below not in cells[above].down:
                cells[above].down.append(below)
                cells[below].up.append(above)
    return cells


def _order(rows: list[list[_Cell]]) -> None:
    """Barycenter sweeps, down and up."""
    for sweep in range(12):
        down = sweep % 2 == 0
        for index in range(len(rows)) if down else range(len(rows) - 1, -1, -1):
            other = index - 1 if down else index + 1
            if not 0 <= other < len(rows):
                continue
            rank = {cell.id: place for place, cell in enumerate(rows[other])}
            here = {cell.id: float(place) for place, cell in enumerate(rows[index])}
            for cell in rows[index]:
                near = [rank[name] for name in (cell.up if down else cell.down)]
                if near:
                    here[cell.id] = sum(near) / len(near) * max(len(rows[index]), 1) / max(len(rows[other]), 1)
            rows[index].sort(key=lambda cell: here[cell.id])


def _place(rows: list[list[_Cell]], cells: Mapping[str, _Cell]) -> None:
    """Pull every cell toward its neighbors, preserving the order and gaps of its row."""
    for row in rows:
        x = 0.0
        for cell in row:
            cell.x = x + cell.width / 2
            x += cell.width + GAP_X
        for cell in row:
            cell.x -= x / 2
    for sweep in range(SWEEPS):
        down, last = sweep % 2 == 0, sweep == SWEEPS - 1  # the last pass aligns cells below their parents
        for row in rows if down else reversed(rows):
            wanted, weights = [], []
            for cell in row:
                names = (cell.up or cell.down) if last else (*cell.up, *cell.down)
                near = [(cells[name].x, _stiffness(cell, cells[name])) for name in names]
                weight = sum(part for _, part in near)
                wanted.append(sum(x * part for x, part in near) / weight if weight else cell.x)
                weights.append(weight or 1.0)
            _spread(row, wanted, weights)


def _stiffness(one: _Cell, other: _Cell) -> float:
    """Weight of an edge's straightness, highest for long edges (Gansner et al. 1993, §4)."""
    if one.box and other.box:
        return 4.0 if len(one.down) == 1 or len(other.up) == 1 else 1.0  # keep chains of stages in one column
    return 2.0 if one.box or other.box else 8.0


def _spread(row: list[_Cell], wanted: Sequence[float], weights: Sequence[float]) -> None:
    """Move cells as close to `wanted` as gaps allow, by weighted least squares (pool adjacent violators)."""
    offsets, total = [], 0.0
    for before, cell in zip([None, *row], row, strict=False):
        total += (before.width + cell.width) / 2 + GAP_X if before else 0.0
        offsets.append(total)
    pools: list[tuple[float, float, int]] = []
    for want, weight, offset in zip(wanted, weights, offsets, strict=True):
        pools.append((want - offset, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m, count), (b, n, more) = pools[-2], pools[-1]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n, count + more)]
    flat = [value for value, _, count in pools for _ in range(count)]
    for cell, value, offset in zip(row, flat, offsets, strict=True):
        cell.x = value + offset


def _top(cell: _Cell) -> float:
    return MARGIN + cell.layer * (NODE_HEIGHT + GAP_Y)


def _line(above: _Cell, below: _Cell) -> str:
    """Path from the bottom of one cell to the top of the next; lanes run straight down."""
    start, end = _top(above) + NODE_HEIGHT, _top(below)
    bend = (end - start) / 2
    curve = f"C{above.x:.1f} {start + bend:.1f} {below.x:.1f} {end - bend:.1f} {below.x:.1f} {end:.1f}"
    return f"M{above.x:.1f} {start:.1f}{curve}{'' if below.box else f'V{end + NODE_HEIGHT:.1f}'}"


def _node(cell: _Cell, box: Box) -> str:
    left, top = cell.x - NODE_WIDTH / 2, _top(cell)
    family = recorded_kind(box.kind).family
    name = _short(box.name, 18)
    return (
        f'<g class="node {family}{" missing" if box.missing else ""}"><title>{escape(box.hover or box.name)}</title>'
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{NODE_WIDTH:.0f}" height="{NODE_HEIGHT:.0f}" rx="7"/>'
        f'<rect class="bar" x="{left:.1f}" y="{top + 7:.1f}" width="3" height="{NODE_HEIGHT - 14:.0f}" rx="1.5"/>'
        f'<text class="name" x="{left + 11:.1f}" y="{top + 21.5:.1f}">{escape(name)}</text>'
        f'<text class="note" x="{left + NODE_WIDTH - 9:.1f}" y="{top + 21.5:.1f}">{escape(box.note)}</text></g>'
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce to at most `MOST_POINTS` points by averaging equal spans; the last point is retained."""
    if len(points) <= MOST_POINTS:
        return list(points)
    spans = MOST_POINTS - 1
    body = points[:-1]
    out = []
    for index in range(spans):
        part = body[index * len(body) // spans : (index + 1) * len(body) // spans]
        out.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return [*out, points[-1]]


def curve_svg(points: Sequence[tuple[float, float]], label: str) -> str:
    """Small line chart: range on the left, steps below, last value on the right."""
    width, height, left, right, top, bottom = 260.0, 104.0, 40.0, 48.0, 8.0, 18.0
    shown = thinned([(x, y) for x, y in points if isfinite(x) and isfinite(y)])
    if not shown:
        return '<p class="none">no finite values</p>'
    xs, ys = [x for x, _ in shown], [y for _, y in shown]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    if high_y == low_y:
        low_y, high_y = low_y - (abs(low_y) or 1) / 2, high_y + (abs(high_y) or 1) / 2

    def at_x(x: float) -> float:
        return left + (x - low_x) / ((high_x - low_x) or 1) * (width - left - right)

    def at_y(y: float) -> float:
        return top + (high_y - y) / (high_y - low_y) * (height - top - bottom)

    line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in shown)
    end_x, end_y = at_x(xs[-1]), at_y(ys[-1])
    last = number(ys[-1])
    return (
        f'<svg class="curve" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}: {escape(last)} at the end">'
        f'<path class="grid" d="M{left} {top}H{width - right}M{left} {height - bottom}H{width - right}"/>'
        f'<text class="tick end" x="{left - 5}" y="{top + 4}">{number(high_y)}</text>'
        f'<text class="tick end" x="{left - 5}" y="{height - bottom + 3}">{number(low_y)}</text>'
        f'<text class="tick" x="{left}" y="{height - 4}">{number(low_x)}</text>'
        f'<text class="tick end" x="{width - right}" y="{height - 4}">{number(high_x)}</text>'
        f'<polyline class="line" points="{line}"/><circle class="dot" cx="{end_x:.1f}" cy="{end_y:.1f}" r="2.6"/>'
        f'<text class="last" x="{end_x + 7:.1f}" y="{end_y + 4:.1f}">{last}</text></svg>'
    )


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval."""

    label: str
    mean: float
    low: float
    high: float


def intervals_svg(estimates: Sequence[Estimate], label: str, zero_line: bool = False) -> str:
    """Means as dots on their intervals, one per row, on a common scale, which is 0 to 1 if all values fall in it."""
    if not estimates:
        return ""
    values = [value for estimate in estimates for value in (estimate.low, estimate.high)]
    low, high = (min(0.0, *values), max(0.0, *values)) if zero_line else (0.0, 1.0)
    if not zero_line and not all(0 <= value <= 1 for value in values):
        low, high = min(values), max(values)
    if high == low:
        low, high = low - 0.5, high + 0.5
    pad = (high - low) * 0.04 if zero_line else 0.0
    low, high = low - pad, high + pad
    width, name_width, value_width, row = 520.0, 128.0, 52.0, 24.0
    plot = width - name_width - value_width
    height = row * len(estimates) + 20

    def at(value: float) -> float:
        return name_width + (value - low) / (high - low) * plot

    ticks = _ticks(low, high)
    parts = [f'<path class="grid" d="{"".join(f"M{at(tick):.1f} 2V{height - 18:.1f}" for tick in ticks)}"/>']
    parts += [f'<text class="tick mid" x="{at(tick):.1f}" y="{height - 5:.1f}">{tick:g}</text>' for tick in ticks]
    if zero_line:
        parts.append(f'<path class="zero" d="M{at(0):.1f} 2V{height - 18:.1f}"/>')
    for index, estimate in enumerate(estimates):
        y = row * index + row / 2
        clear = zero_line and (estimate.low > 0 or estimate.high < 0)
        parts.append(
            f'<g class="estimate{" clear" if clear else ""}"><title>{escape(estimate.label)}: {estimate.mean:.3f} '
            f"[{estimate.low:.3f}, {estimate.high:.3f}]</title>"
            f'<text class="row" x="0" y="{y + 4:.1f}">{escape(_short(estimate.label, 20))}</text>'
            f'<path class="whisker" d="M{at(estimate.low):.1f} {y:.1f}H{at(estimate.high):.1f}"/>'
            f'<circle class="dot" cx="{at(estimate.mean):.1f}" cy="{y:.1f}" r="4"/>'
            f'<text class="value" x="{width}" y="{y + 4:.1f}">{estimate.mean:{"+.3f" if zero_line else ".3f"}}</text></g>'
        )
    return f'<svg class="intervals" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Two to six round values in [low, high]: multiples of 1, 2, or 5 times a power of ten."""
    base = 10.0 ** floor(log10((high - low) / 5))
    step = next(factor * base for factor in (1, 2, 5, 10) if (high - low) / (factor * base) <= 5.000001)
    return [round(tick * step, 10) for tick in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
