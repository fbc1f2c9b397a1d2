"""Decide which rows that overlap with benchmark items are removed or waived, and report them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pedigree.configs.rows.overlap_criteria import Waiver
from pedigree.data.contamination.coverage import Benchmarks, Overlap
from pedigree.data.records.scattered import Numbers
from pedigree.data.sources.leaks import PLANTED
from pedigree.stages.job.failures import StageError

REMOVED, WAIVED = "removed", "waived"
"""Verdicts on an overlap without doubts."""
TOLD = "only told"
"""Verdict on an overlap that the recipe only reports."""


class Hit(NamedTuple):
    """A row that overlaps."""

    place: int
    id: str
    source: str
    overlaps: list[Overlap]
    verdicts: list[str]
    """Verdict on each overlap."""

    @property
    def removed(self) -> bool:
        return REMOVED in self.verdicts

    @property
    def waived(self) -> bool:
        return not self.removed and WAIVED in self.verdicts

    def with_ids(self) -> "Hit":
        """Reduce items to their ids, for sending to another process."""
        return self._replace(overlaps=[replace(one, item={"id": one.item["id"]}) for one in self.overlaps])

    def with_items(self, items: Mapping[tuple[str, str], dict[str, Any]]) -> "Hit":
        """Restore the items, by (label, id)."""
        return self._replace(overlaps=[replace(one, item=items[one.benchmark, one.item["id"]]) for one in self.overlaps])

    def of(self, label: str, *verdicts: str, embedded: bool = False) -> list[Overlap]:
        """The overlaps with a benchmark that have one of these verdicts, found by embedding or otherwise."""
        found = zip(self.overlaps, self.verdicts, strict=True)
        return [one for one, verdict in found if one.benchmark == label and verdict in verdicts and (one.way == "embedded") == embedded]


def hit_of(place: int, row: Mapping[str, Any], overlaps: list[Overlap], waivers: Sequence[Waiver]) -> Hit:
    """Decide on each overlap of a row. Planted rows are never waived, because they must be removed."""
    waivers = () if row["source"] in PLANTED else waivers

    def verdict(one: Overlap) -> str:
        return WAIVED if any(waiver.covers(one.benchmark, one.item["id"]) for waiver in waivers) else REMOVED

    verdicts = [one.doubt or verdict(one) for one in overlaps]
    return Hit(place, row["id"], row["source"], overlaps, verdicts)


def staying(rows: int, hits: Sequence[Hit]) -> Numbers:
    """Places of the remaining rows, out of `rows`."""
    stays = np.ones(rows, bool)
    stays[[hit.place for hit in hits if hit.removed]] = False
    return np.flatnonzero(stays)


def summary(label: str, items: Sequence[dict[str, Any]], hits: Sequence[Hit]) -> dict[str, Any]:
    """Counts of one benchmark. The overlapping items are its contaminated share (counted by Tülu 3's 2 % rule)."""
    overlapped = {one.item["id"] for hit in hits for one in hit.of(label, REMOVED, WAIVED, TOLD)}
    waived = {one.item["id"] for hit in hits for one in hit.of(label, WAIVED)}
    return {
        "items": len(items),
        "items_overlapped": len(overlapped),
        "share_overlapped": len(overlapped) / len(items),
        "rows_removed": sum(bool(hit.of(label, REMOVED)) for hit in hits),
        **({"items_waived": len(waived)} if waived else {}),
    }


def waiver_summary(waiver: Waiver, hits: Sequence[Hit]) -> dict[str, Any]:
    """Effect of a waiver: the number of kept rows, and the items that they overlap with, by task."""
    of_rows = ([*hit.of(waiver.benchmark, WAIVED), *hit.of(waiver.benchmark, WAIVED, embedded=True)] for hit in hits if hit.waived)
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
    """Lines of the manifest for a row."""
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
    """Raise StageError for a waiver of an unknown benchmark or item."""
    for waiver in waivers:
        if waiver.benchmark not in benchmarks:
            raise StageError(f"waivers: {waiver.benchmark!r} is not one of the benchmarks {sorted(benchmarks)}")
        known = {item["id"] for item in benchmarks[waiver.benchmark]}
        unknown = [] if waiver.items == "all" else [name for name in waiver.items if name not in known]
        if unknown:
            raise StageError(f"waivers: {waiver.benchmark} has no item {unknown[0]!r}; see evidence/manifest.jsonl for the ids")


def refuse_contaminated(report: Mapping[str, Mapping[str, Any]], bound: float) -> None:
    """Raise StageError if more than `bound` of a benchmark's items (label → `summary`) overlap, not counting waived ones."""
    for label, one in report.items():
        overlapped = one["items_overlapped"] - one.get("items_waived", 0)
        if overlapped / one["items"] > bound:
            raise StageError(
                f"{overlapped} of {one['items']} items of {label} ({overlapped / one['items']:.1%}) are in this data, "
                f"more than max_contaminated_share {bound:.1%}: remove the contaminated source "
                "(evidence/manifest.jsonl lists the rows) or raise the bound"
            )
