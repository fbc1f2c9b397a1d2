"""Removes training rows that share text with benchmark items, and lists them with the item and the score.

    payload/rows-*.parquet    the rows that stay, unchanged and in order
    evidence/manifest.jsonl   one line per removed row and item
    evidence/report.json      rows read, kept and removed; which turns were searched; per benchmark: items, items overlapped, rows removed

The manifest is outside the payload, so that adding a benchmark that removes nothing changes no content hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.datasets import Decontaminate
from data import columns, records
from data.artifacts import write_json, write_rows
from data.coverage import Overlap
from data.decontamination import Index
from data.parallel import mapped
from data.scattered import Numbers, Scattered
from data.sources import LEAK
from stages.job import Inputs, Job, StageError, only

MANY = 10_000
"""So many rows are worth further processes."""


class Hit(NamedTuple):
    """A row that overlaps."""

    place: int
    id: str
    source: str
    overlaps: list[Overlap]


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
        stays[[hit.place for hit in self.hits]] = False
        return np.flatnonzero(stays)

    @property
    def survivors(self) -> list[str]:
        """Ids of planted rows that stay."""
        gone = {hit.place for hit in self.hits}
        return [name for place, name in self.leaks if place not in gone]


def run(config: Decontaminate, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Removes every row that covers more than `threshold` of an item.

    Raises:
        StageError: a benchmark overlaps more than `max_contaminated_share`, a planted leak survives, or no row does.
    """
    data = only(inputs, "data")
    with job.busy("reading benchmarks"):
        benchmarks = {label: records.load(suite) for label, suite in inputs["benchmarks"].items()}
        index = Index(benchmarks, config.ngram, config.turns)
    found = search(index, data.payload, records.RECORDS[data.type], config.threshold, job)
    report = {label: summary(label, items, found.hits) for label, items in benchmarks.items()}
    write_rows(job.evidence / "manifest.jsonl", [line(hit, overlap) for hit in found.hits for overlap in hit.overlaps])
    kept = found.kept
    metrics = {
        "rows": len(kept),
        "removed": len(found.hits),
        "turns": list(config.turns),
        "benchmarks": report,
        "planted_leaks": len(found.leaks),
        "leaks_found": len(found.leaks) - len(found.survivors),
    }
    read = len(found.rows.sizes)
    write_json(job.evidence / "report.json", {"read": read, **metrics})
    refuse(config, report, found.survivors, read, len(kept))
    for rows in found.rows.write(job.out / "payload", kept, job.numerics.threads):
        job.doing("writing rows", rows, len(kept), "rows")
    return metrics


def search(index: Index, payload: Path, record: type, threshold: float, job: Job) -> Searched:
    """Compares all rows, a group of them at a time; the same for any number of processes."""
    files = [payload / name for name in records.row_files(path.name for path in payload.iterdir())]
    groups = groups_of(files)
    total = sum(group.rows for group in groups)

    def look(group: Group) -> Compared:
        rows = columns.to_rows(columns.read_group(files[group.file], group.number), record)
        overlaps = zip(rows, index.overlaps(rows, threshold), strict=True)
        hits = [Hit(group.place + at, row["id"], row["source"], some) for at, (row, some) in enumerate(overlaps) if some]
        leaks = [(group.place + at, row["id"]) for at, row in enumerate(rows) if row["source"].startswith(LEAK)]
        return Compared(hits, leaks, [records.size_of(row) for row in rows])

    workers = job.numerics.threads if total >= MANY else 1
    if workers > 1:
        index.compile()  # once for all
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


def summary(label: str, items: list[dict[str, Any]], hits: Sequence[Hit]) -> dict[str, Any]:
    """Counts of one benchmark. Items that overlap are the benchmark's contaminated share (Tülu 3's 2 % rule counts them)."""
    mine = [[one.item["id"] for one in hit.overlaps if one.benchmark == label] for hit in hits]
    overlapped = {item for hit in mine for item in hit}
    return {
        "items": len(items),
        "items_overlapped": len(overlapped),
        "share_overlapped": len(overlapped) / len(items),
        "rows_removed": sum(bool(hit) for hit in mine),
    }


def line(hit: Hit, overlap: Overlap) -> dict[str, Any]:
    return {
        "id": hit.id,
        "source": hit.source,
        "benchmark": overlap.benchmark,
        "task": overlap.item["task"],
        "item": overlap.item["id"],
        "score": round(overlap.score, 4),
        "matched": overlap.matched,
    }


def refuse(config: Decontaminate, report: dict[str, Any], survivors: Sequence[str], read: int, kept: int) -> None:
    for label, one in report.items():
        if one["share_overlapped"] > config.max_contaminated_share:
            raise StageError(
                f"{one['items_overlapped']} of {one['items']} items of {label} ({one['share_overlapped']:.1%}) are in this data, "
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
