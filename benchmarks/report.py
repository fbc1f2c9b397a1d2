"""What every benchmark writes: one JSON file of readings, each a ratio of two things measured side by side on one machine, several times.

One measurement of a shared machine says little: a peer's rate has been seen to differ by half from one day to the next. So a reading
is never a number but at least three, and what is claimed of it is its worst.
"""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from pedigree.data.artifacts.provenance import hardware

RESULTS = Path(__file__).resolve().parent / "results"
RUNS = 3
"""Minimum number of runs of both sides in a reading."""


class Interval(NamedTuple):
    """Median, lowest and highest value of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Reading:
    """Our measurements and the peer's."""

    name: str
    ours: Sequence[float]
    """One value per run."""
    peer: Sequence[float]
    """The peer's values in the same runs."""
    unit: str
    higher_is_better: bool = True
    goal: float | None = None
    """The intended ratio, if any."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What readers need to judge it: settings, counts, agreement of both sides' work."""

    def __post_init__(self) -> None:
        if len(self.ours) != len(self.peer) or len(self.ours) < RUNS:
            raise ValueError(
                f"{self.name}: {len(self.ours)} runs of ours and {len(self.peer)} of the peer: a reading is {RUNS} of each, or more"
            )

    @property
    def ratio(self) -> Interval:
        """Interval of the ratios of single runs: what slowed the machine in one of them slowed both sides. Above 1 is better."""
        over = zip(self.ours, self.peer, strict=True)
        return Interval.of([mine / theirs if self.higher_is_better else theirs / mine for mine, theirs in over])

    def row(self) -> dict[str, Any]:
        """Its entry in a file of results."""
        return {
            "name": self.name,
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            "goal": self.goal,
            "notes": self.notes,
            "runs": {"ours": [rounded(one) for one in self.ours], "peer": [rounded(one) for one in self.peer]},
            "ours": described(Interval.of(self.ours)),
            "peer": described(Interval.of(self.peer)),
            "ratio": described(self.ratio),
        }


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def described(interval: Interval) -> dict[str, float]:
    return {name: rounded(value) for name, value in interval._asdict().items()}


class Watch:
    """Other activity of the machine between the creation of the watch and its reading."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self._began = cpu_ticks()

    def read(self) -> dict[str, float]:
        """The load at the start, and the share of the cores' time that the host gave to others since."""
        total, stolen = (now - then for now, then in zip(cpu_ticks(), self._began, strict=True))
        return {"load_before": round(self.load, 2), "stolen": round(stolen / max(total, 1), 4)}


def cpu_ticks() -> tuple[int, int]:
    """Total time of the cores since boot, and the part that the host gave to others; `proc(5)`, line `cpu`, its first eight columns."""
    columns = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(columns), columns[7]


def write(name: str, readings: list[Reading], packages: tuple[str, ...], machine: dict[str, Any]) -> Path:
    """Write `results/NAME.json` and print one line per reading. `machine`: its state during the measurements."""
    shared = {
        "versions": {package: version(package) for package in packages},
        "hardware": hardware(),
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps([reading.row() | shared for reading in readings], indent=1, sort_keys=True) + "\n")
    for reading in readings:
        ours, peer, ratio = Interval.of(reading.ours), Interval.of(reading.peer), reading.ratio
        held = f"ratio {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        print(f"{reading.name}: {ours.median:.3g} against {peer.median:.3g} {reading.unit}, {held}")
    return path
