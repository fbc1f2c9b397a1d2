"""Removes training rows that share text with benchmark items, and lists them with the item and the score.

    payload/rows.jsonl        the rows that stay, unchanged and in order
    evidence/manifest.jsonl   one line per removed row and item
    evidence/report.json      rows read, kept and removed; which turns were searched; per benchmark: items, items overlapped, rows removed

The manifest is outside the payload, so that adding a benchmark that removes nothing changes no content hash.
"""

from typing import Any

from configs.datasets import Decontaminate
from data import records
from data.artifacts import write_json, write_rows
from data.decontamination import Index, Overlap
from data.sources import LEAK
from stages.job import Inputs, Job, StageError, only

BATCH = 1000
"""Rows that are looked at together."""


def run(config: Decontaminate, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Removes every row that covers more than `threshold` of an item.

    Raises:
        StageError: a benchmark overlaps more than `max_contaminated_share`, a planted leak survives, or no row does.
    """
    with job.busy("reading rows and benchmarks"):
        rows = records.load(only(inputs, "data"))
        benchmarks = {label: records.load(suite) for label, suite in inputs["benchmarks"].items()}
        index = Index(benchmarks, config.ngram, config.turns)
    found: dict[str, list[Overlap]] = {}
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        found |= zip((row["id"] for row in batch), index.overlaps(batch, config.threshold), strict=True)
        job.progress(len(found), len(rows))
    kept = [row for row in rows if not found[row["id"]]]
    removed = [row for row in rows if found[row["id"]]]
    report = {label: summary(label, items, removed, found) for label, items in benchmarks.items()}
    write_rows(job.evidence / "manifest.jsonl", [line(row, overlap) for row in removed for overlap in found[row["id"]]])
    metrics = {
        "rows": len(kept),
        "removed": len(removed),
        "turns": list(config.turns),
        "benchmarks": report,
        "planted_leaks": sum(row["source"].startswith(LEAK) for row in rows),
        "leaks_found": sum(row["source"].startswith(LEAK) for row in removed),
    }
    write_json(job.evidence / "report.json", {"read": len(rows), **metrics})
    refuse(config, report, rows, kept)
    with job.busy("writing rows"):
        records.save(job.out, kept)
    return metrics


def summary(label: str, items: list[dict[str, Any]], removed: list[dict[str, Any]], found: dict[str, list[Overlap]]) -> dict[str, Any]:
    """Counts of one benchmark. Items that overlap are the benchmark's contaminated share (Tülu 3's 2 % rule counts them)."""
    mine = {row["id"]: [one.item["id"] for one in found[row["id"]] if one.benchmark == label] for row in removed}
    overlapped = {item for hit in mine.values() for item in hit}
    return {
        "items": len(items),
        "items_overlapped": len(overlapped),
        "share_overlapped": len(overlapped) / len(items),
        "rows_removed": sum(bool(hit) for hit in mine.values()),
    }


def line(row: dict[str, Any], overlap: Overlap) -> dict[str, Any]:
    return {
        "id": row["id"],
        "source": row["source"],
        "benchmark": overlap.benchmark,
        "task": overlap.item["task"],
        "item": overlap.item["id"],
        "score": round(overlap.score, 4),
        "matched": overlap.matched,
    }


def refuse(config: Decontaminate, report: dict[str, Any], rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    for label, one in report.items():
        if one["share_overlapped"] > config.max_contaminated_share:
            raise StageError(
                f"{one['items_overlapped']} of {one['items']} items of {label} ({one['share_overlapped']:.1%}) are in this data, "
                f"more than max_contaminated_share {config.max_contaminated_share:.1%}: leave the contaminated source out "
                "(evidence/manifest.jsonl names the rows) or raise the bound"
            )
    survivors = [row["id"] for row in kept if row["source"].startswith(LEAK)]
    if survivors:
        raise StageError(
            f"{len(survivors)} planted leaks are still there, e.g. {survivors[0]}: name the suites of `leak_from` among the "
            "benchmarks, or lower threshold"
        )
    if not kept:
        raise StageError(f"all {len(rows)} rows overlap with the benchmarks: nothing is left to train on")
