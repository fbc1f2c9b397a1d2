"""Removes training rows that share text with benchmark items, and lists them with the item and the score.

    payload/rows-*.parquet    the rows that stay, unchanged and in order
    evidence/manifest.jsonl   one line per row and item that overlap, with what followed from it: removed, waived, or a doubt
    evidence/report.json      rows read, kept and removed; which turns were searched; per benchmark: items, items overlapped, rows removed

The manifest is outside the payload, so that adding a benchmark that removes nothing changes no content hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.datasets import Decontaminate, Waiver
from data import columns, records
from data.artifacts import write_json, write_rows
from data.coverage import Overlap
from data.decontamination import Comparison
from data.parallel import mapped
from data.scattered import Numbers, Scattered
from data.sources import LEAK
from stages.job import Inputs, Job, StageError, only

MANY = 10_000
"""So many rows are worth further processes."""


REMOVED, WAIVED = "removed", "waived"
"""What follows from an overlap, where there is no doubt of it."""


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

    def of(self, label: str, *verdicts: str) -> list[Overlap]:
        """The overlaps with a benchmark from which one of these followed."""
        found = zip(self.overlaps, self.verdicts, strict=True)
        return [one for one, verdict in found if one.benchmark == label and verdict in verdicts]


class Group(NamedTuple):
    """Rows of a file that were written together."""

    file: int
    """Its number."""
    number: int
    """In the file."""
    place: int
    """Of its first row."""
    line: int
    """Of its first row in the file."""
    rows: int


class Compared(NamedTuple):
    """What is known of a group of rows once it was compared."""

    hits: list[Hit]
    leaks: list[tuple[int, str]]
    """(place, id) of the rows that were planted."""
    sizes: list[int]
    """Characters of each row."""


@dataclass(frozen=True)
class Searched:
    """What was found in all rows."""

    rows: Scattered
    hits: list[Hit]
    leaks: list[tuple[int, str]]

    @property
    def kept(self) -> Numbers:
        """Places of the rows that stay."""
        stays = np.ones(len(self.rows.sizes), bool)
        stays[[hit.place for hit in self.hits if hit.removed]] = False
        return np.flatnonzero(stays)

    @property
    def survivors(self) -> list[str]:
        """Ids of planted rows that stay."""
        gone = {hit.place for hit in self.hits if hit.removed}
        return [name for place, name in self.leaks if place not in gone]


def run(config: Decontaminate, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Removes every row that covers more than `threshold` of an item.

    Raises:
        StageError: a waiver names what is not there, a benchmark overlaps more than `max_contaminated_share`, a planted leak survives, or
            no row does.
    """
    data = only(inputs, "data")
    with job.busy("reading benchmarks"):
        benchmarks = {label: records.load(suite) for label, suite in inputs["benchmarks"].items()}
        refuse_unknown(config.waivers, benchmarks)
        comparison = Comparison(benchmarks, config)
    found = search(comparison, data.payload, records.RECORDS[data.type], config.waivers, job)
    report = {label: summary(label, items, found.hits) for label, items in benchmarks.items()}
    write_rows(job.evidence / "manifest.jsonl", [line for hit in found.hits for line in lines(hit)])
    kept = found.kept
    metrics = {
        "rows": len(kept),
        "removed": sum(hit.removed for hit in found.hits),
        "turns": list(config.turns),
        "benchmarks": report,
        "planted_leaks": len(found.leaks),
        "leaks_found": len(found.leaks) - len(found.survivors),
        **({"waivers": [waived(one, found.hits) for one in config.waivers]} if config.waivers else {}),
    }
    read = len(found.rows.sizes)
    write_json(job.evidence / "report.json", {"read": read, **metrics})
    refuse(config, report, found.survivors, read, len(kept))
    for rows in found.rows.write(job.out / "payload", kept, job.numerics.threads):
        job.doing("writing rows", rows, len(kept), "rows")
    return metrics


def search(comparison: Comparison, payload: Path, record: type, waivers: Sequence[Waiver], job: Job) -> Searched:
    """Compares all rows, a group of them at a time; the same for any number of processes."""
    files = [payload / name for name in records.row_files(path.name for path in payload.iterdir())]
    groups = groups_of(files)
    total = sum(group.rows for group in groups)

    def look(group: Group) -> Compared:
        rows = columns.to_rows(columns.read_group(files[group.file], group.number), record)
        overlaps = zip(rows, comparison.overlaps(rows), strict=True)
        hits = [hit_of(group.place + at, row, some, waivers) for at, (row, some) in enumerate(overlaps) if some]
        leaks = [(group.place + at, row["id"]) for at, row in enumerate(rows) if row["source"].startswith(LEAK)]
        return Compared(hits, leaks, [records.size_of(row) for row in rows])

    workers = job.numerics.threads if total >= MANY else 1
    if workers > 1:
        comparison.compile()  # once for all
    seen = []
    for group, one in zip(groups, mapped(look, groups, workers), strict=True):
        seen.append(one)
        job.progress(group.place + group.rows, total)
    lies = Scattered(
        files=files,
        file=np.repeat([group.file for group in groups], [group.rows for group in groups]),
        line=np.concatenate([np.arange(group.line, group.line + group.rows) for group in groups]),
        sizes=np.array([size for one in seen for size in one.sizes]),
    )
    return Searched(lies, [hit for one in seen for hit in one.hits], [leak for one in seen for leak in one.leaks])


def groups_of(files: Sequence[Path]) -> list[Group]:
    found, place = [], 0
    for number, file in enumerate(files):
        line = 0
        for group, rows in enumerate(columns.groups(file)):
            found.append(Group(number, group, place, line, rows))
            place, line = place + rows, line + rows
    return found


def hit_of(place: int, row: dict[str, Any], overlaps: list[Overlap], waivers: Sequence[Waiver]) -> Hit:
    """What follows from each overlap of a row. Of planted rows none is waived: they are there to be removed."""
    waivers = () if row["source"].startswith(LEAK) else waivers
    verdicts = [one.doubt or (WAIVED if any(covers(waiver, one) for waiver in waivers) else REMOVED) for one in overlaps]
    return Hit(place, row["id"], row["source"], overlaps, verdicts)


def covers(waiver: Waiver, overlap: Overlap) -> bool:
    return waiver.benchmark == overlap.benchmark and (waiver.items == "all" or overlap.item["id"] in waiver.items)


def summary(label: str, items: list[dict[str, Any]], hits: Sequence[Hit]) -> dict[str, Any]:
    """Counts of one benchmark. Items that overlap are the benchmark's contaminated share (Tülu 3's 2 % rule counts them)."""
    overlapped = {one.item["id"] for hit in hits for one in hit.of(label, REMOVED, WAIVED)}
    waived = {one.item["id"] for hit in hits for one in hit.of(label, WAIVED)}
    return {
        "items": len(items),
        "items_overlapped": len(overlapped),
        "share_overlapped": len(overlapped) / len(items),
        "rows_removed": sum(bool(hit.of(label, REMOVED)) for hit in hits),
        **({"items_waived": len(waived)} if waived else {}),
    }


def waived(waiver: Waiver, hits: Sequence[Hit]) -> dict[str, Any]:
    """What a waiver has kept: how many rows, and which items they overlap with, by task."""
    kept = [[one for one in hit.of(waiver.benchmark, WAIVED) if covers(waiver, one)] for hit in hits if hit.kept_by_waiver]
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
            "pass": "abstracted" if overlap.abstracted else "words",
            "verdict": verdict,
        }
        for overlap, verdict in zip(hit.overlaps, hit.verdicts, strict=True)
    ]


def refuse_unknown(waivers: Sequence[Waiver], benchmarks: dict[str, list[dict[str, Any]]]) -> None:
    """Raises StageError for a waiver of a benchmark or an item that is none."""
    for waiver in waivers:
        if waiver.benchmark not in benchmarks:
            raise StageError(f"waivers: {waiver.benchmark!r} is none of the benchmarks {sorted(benchmarks)}")
        known = {item["id"] for item in benchmarks[waiver.benchmark]}
        unknown = [] if waiver.items == "all" else [name for name in waiver.items if name not in known]
        if unknown:
            raise StageError(f"waivers: {unknown[0]!r} is the id of no item of {waiver.benchmark}; evidence/manifest.jsonl names them")


def refuse(config: Decontaminate, report: dict[str, Any], survivors: Sequence[str], read: int, kept: int) -> None:
    for label, one in report.items():
        overlapped = one["items_overlapped"] - one.get("items_waived", 0)
        if overlapped / one["items"] > config.max_contaminated_share:
            raise StageError(
                f"{overlapped} of {one['items']} items of {label} ({overlapped / one['items']:.1%}) are in this data, "
                f"more than max_contaminated_share {config.max_contaminated_share:.1%}: leave the contaminated source out "
                "(evidence/manifest.jsonl names the rows) or raise the bound"
            )
    if survivors:
        raise StageError(
            f"{len(survivors)} planted leaks are still there, e.g. {survivors[0]}: name the suites of `leak_from` among the "
            "benchmarks, or lower threshold"
        )
    if not kept:
        raise StageError(f"all {read} rows overlap with the benchmarks: nothing is left to train on")
