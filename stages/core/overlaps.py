"""What follows from rows that have something of benchmark items: which are removed, which stay by a waiver, and how that is told."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from configs.rows.decontamination import Waiver
from data.contamination.coverage import Benchmarks, Overlap
from data.records.scattered import Numbers
from data.sources.sources import LEAK
from stages.job.job import StageError

REMOVED, WAIVED = "removed", "waived"
"""What follows from an overlap, where there is no doubt of it."""
TOLD = "only told"
"""What follows from one of which the recipe says that it removes nothing."""


class Hit(NamedTuple):
    """A row that overlaps."""

    place: int
    id: str
    source: str
    overlaps: list[Overlap]
    verdicts: list[str]
    """Of each overlap."""

    @property
    def removed(self) -> bool:
        return REMOVED in self.verdicts

    @property
    def kept_by_waiver(self) -> bool:
        return not self.removed and WAIVED in self.verdicts

    def with_ids(self) -> "Hit":
        """The same with nothing but the id of each item, to be sent to another process."""
        return self._replace(overlaps=[replace(one, item={"id": one.item["id"]}) for one in self.overlaps])

    def with_items(self, items: Mapping[tuple[str, str], dict[str, Any]]) -> "Hit":
        """The same with the items again, by (label, id)."""
        return self._replace(overlaps=[replace(one, item=items[one.benchmark, one.item["id"]]) for one in self.overlaps])

    def of(self, label: str, *verdicts: str, embedded: bool = False) -> list[Overlap]:
        """The overlaps with a benchmark from which one of these followed: those by vectors, or the others."""
        found = zip(self.overlaps, self.verdicts, strict=True)
        return [one for one, verdict in found if one.benchmark == label and verdict in verdicts and (one.way == "embedded") == embedded]


def hit_of(place: int, row: Mapping[str, Any], overlaps: list[Overlap], waivers: Sequence[Waiver]) -> Hit:
    """What follows from each overlap of a row. Of planted rows none is waived: they are there to be removed.

    Args:
        place: of the row.
        row: its `id` and `source`.
        overlaps: of it.
        waivers: of the recipe.
    """
    waivers = () if row["source"].startswith(LEAK) else waivers

    def verdict(one: Overlap) -> str:
        return WAIVED if any(waiver.covers(one.benchmark, one.item["id"]) for waiver in waivers) else REMOVED

    verdicts = [one.doubt or verdict(one) for one in overlaps]
    return Hit(place, row["id"], row["source"], overlaps, verdicts)


def staying(rows: int, hits: Sequence[Hit]) -> Numbers:
    """Places of the rows that stay, of so many."""
    stays = np.ones(rows, bool)
    stays[[hit.place for hit in hits if hit.removed]] = False
    return np.flatnonzero(stays)


def summary(label: str, items: Sequence[dict[str, Any]], hits: Sequence[Hit]) -> dict[str, Any]:
    """Counts of one benchmark. Items that overlap are the benchmark's contaminated share (Tülu 3's 2 % rule counts them)."""
    overlapped = {one.item["id"] for hit in hits for one in hit.of(label, REMOVED, WAIVED, TOLD)}
    waived = {one.item["id"] for hit in hits for one in hit.of(label, WAIVED)}
    return {
        "items": len(items),
        "items_overlapped": len(overlapped),
        "share_overlapped": len(overlapped) / len(items),
        "rows_removed": sum(bool(hit.of(label, REMOVED)) for hit in hits),
        **({"items_waived": len(waived)} if waived else {}),
    }


def kept_by(waiver: Waiver, hits: Sequence[Hit]) -> dict[str, Any]:
    """What a waiver has kept: how many rows, and which items they overlap with, by task."""
    of_rows = ([*hit.of(waiver.benchmark, WAIVED), *hit.of(waiver.benchmark, WAIVED, embedded=True)] for hit in hits if hit.kept_by_waiver)
    kept = [[one for one in some if waiver.covers(one.benchmark, one.item["id"])] for some in of_rows]
    items: dict[str, set[str]] = {}
    for overlap in (one for overlaps in kept for one in overlaps):
        items.setdefault(overlap.item["task"], set()).add(overlap.item["id"])
    return {
        "benchmark": waiver.benchmark,
        "because": waiver.because,
        "rows": sum(map(bool, kept)),
        "items": {task: sorted(names) for task, names in sorted(items.items())},
    }


def lines(hit: Hit) -> list[dict[str, Any]]:
    """Of the manifest."""
    return [
        {
            "id": hit.id,
            "source": hit.source,
            "benchmark": overlap.benchmark,
            "task": overlap.item["task"],
            "item": overlap.item["id"],
            "score": round(overlap.score, 4),
            "matched": overlap.matched,
            "pass": overlap.way,
            "verdict": verdict,
        }
        for overlap, verdict in zip(hit.overlaps, hit.verdicts, strict=True)
    ]


def refuse_unknown(waivers: Sequence[Waiver], benchmarks: Benchmarks) -> None:
    """Raises StageError for a waiver of a benchmark or an item that is none."""
    for waiver in waivers:
        if waiver.benchmark not in benchmarks:
            raise StageError(f"waivers: {waiver.benchmark!r} is none of the benchmarks {sorted(benchmarks)}")
        known = {item["id"] for item in benchmarks[waiver.benchmark]}
        unknown = [] if waiver.items == "all" else [name for name in waiver.items if name not in known]
        if unknown:
            raise StageError(f"waivers: {unknown[0]!r} is the id of no item of {waiver.benchmark}; evidence/manifest.jsonl names them")


def refuse_contaminated(report: Mapping[str, Mapping[str, Any]], bound: float) -> None:
    """Raises StageError where more than this share of a benchmark's items (label → `summary`) overlaps, waived ones aside."""
    for label, one in report.items():
        overlapped = one["items_overlapped"] - one.get("items_waived", 0)
        if overlapped / one["items"] > bound:
            raise StageError(
                f"{overlapped} of {one['items']} items of {label} ({overlapped / one['items']:.1%}) are in this data, "
                f"more than max_contaminated_share {bound:.1%}: leave the contaminated source out "
                "(evidence/manifest.jsonl names the rows) or raise the bound"
            )
