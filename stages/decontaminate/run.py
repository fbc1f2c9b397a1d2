"""Remove training rows that share text with benchmark items, and list them with the item and the score.

    payload/rows-*.parquet    the remaining rows, unchanged and in order
    evidence/manifest.jsonl   one line per overlapping row and item, with the verdict: removed, waived, or a doubt
    evidence/paraphrases.jsonl   one line per row that resembles an item by embedding, if enabled, with the verdict
    evidence/report.json      rows read, kept and removed; turns searched; per benchmark: items, items overlapped, rows removed

The manifest is outside the payload, so that a new benchmark which removes nothing does not change the content hash.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pedigree.configs.rows.overlap_criteria import Decontaminate
from pedigree.data.artifacts.artifacts import Artifact, write_json, write_rows
from pedigree.data.contamination.coverage import ALIKE, Benchmarks
from pedigree.data.contamination.decontamination import Comparison
from pedigree.data.records import records
from pedigree.data.records.scattered import Scattered, search
from pedigree.data.sources.leaks import PLANTED
from pedigree.stages.core.overlaps import (
    REMOVED,
    WAIVED,
    Hit,
    hit_of,
    lines,
    refuse_contaminated,
    refuse_unknown,
    staying,
    summary,
    waiver_summary,
)
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only


class Compared(NamedTuple):
    """Results of comparing rows with the benchmarks."""

    hits: list[Hit]
    leaks: list[tuple[int, str]]
    """(place, id) of the planted rows."""

    @property
    def survivors(self) -> list[str]:
        """Ids of planted rows that were not removed."""
        gone = {hit.place for hit in self.hits if hit.removed}
        return [name for place, name in self.leaks if place not in gone]


def run(config: Decontaminate, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Remove every row that covers more than `threshold` of an item.

    Raises:
        StageError: a waiver matches nothing, the contaminated share of a benchmark exceeds `max_contaminated_share`, a planted leak
            survives, or no row does.
        PedigreeError: the embedder is enabled but not on this machine.
    """
    data = only(inputs, "data")
    with job.busy("reading benchmarks"):
        benchmarks = {label: records.load(suite) for label, suite in inputs["benchmarks"].items()}
        refuse_unknown(config.waivers, benchmarks)
        comparison = Comparison(benchmarks, config)
    found, by_position = compare(comparison, benchmarks, data, config, job)
    report = {label: summary(label, items, found.hits) for label, items in benchmarks.items()}
    every = [line for hit in found.hits for line in lines(hit)]
    write_rows(job.evidence / "manifest.jsonl", [line for line in every if line["verdict"] != ALIKE])
    if config.embedded:
        write_rows(job.evidence / "paraphrases.jsonl", [line for line in every if line["pass"] == "embedded"])
    read = len(by_position.sizes)
    kept = staying(read, found.hits)
    metrics = {
        "rows": len(kept),
        "removed": sum(hit.removed for hit in found.hits),
        "turns": list(config.turns),
        "benchmarks": report,
        "planted_leaks": len(found.leaks),
        "leaks_found": len(found.leaks) - len(found.survivors),
        **({"paraphrases": {label: paraphrase_counts(label, found.hits) for label in benchmarks}} if config.embedded else {}),
        **({"waivers": [waiver_summary(one, found.hits) for one in config.waivers]} if config.waivers else {}),
    }
    write_json(job.evidence / "report.json", {"read": read, **metrics})
    refuse(config, report, found.survivors, read, len(kept))
    for done in by_position.write(job.out / "payload", kept, job.numerics.threads):
        job.doing("writing rows", done, len(kept), "rows")
    return metrics


def compare(comparison: Comparison, benchmarks: Benchmarks, data: Artifact, config: Decontaminate, job: Job) -> tuple[Compared, Scattered]:
    """Compare all rows in parallel; return the results and the rows' locations. Worker processes return item ids instead of items, to
    avoid a copy of the item per overlap."""
    items = {(label, item["id"]): item for label, some in benchmarks.items() for item in some}

    def look(place: int, rows: Sequence[dict[str, Any]]) -> Compared:
        overlaps = zip(rows, comparison.overlaps(rows), strict=True)
        hits = [hit_of(place + at, row, some, config.waivers).with_ids() for at, (row, some) in enumerate(overlaps) if some]
        return Compared(hits, [(place + at, row["id"]) for at, row in enumerate(rows) if row["source"] in PLANTED])

    found, by_position = search(data, look, job.numerics.threads, job.progress, comparison.compile)
    hits = [hit.with_items(items) for one in found for hit in one.hits]
    return Compared(hits, [leak for one in found for leak in one.leaks]), by_position


def paraphrase_counts(label: str, hits: Sequence[Hit]) -> dict[str, int]:
    """Counts of one benchmark's embedding matches, which its other counts exclude."""
    matched = [hit.of(label, ALIKE, REMOVED, WAIVED, embedded=True) for hit in hits]
    return {
        "rows": sum(map(bool, matched)),
        "items": len({one.item["id"] for some in matched for one in some}),
        "rows_removed": sum(bool(hit.of(label, REMOVED, embedded=True)) for hit in hits),
    }


def refuse(config: Decontaminate, report: dict[str, Any], survivors: Sequence[str], read: int, kept: int) -> None:
    refuse_contaminated(report, config.max_contaminated_share)
    if survivors:
        raise StageError(
            f"{len(survivors)} planted leaks were not removed, e.g. {survivors[0]}: add the suites of `leak_from` to the "
            "benchmarks, or lower threshold"
        )
    if not kept:
        raise StageError(f"all {read} rows overlap with the benchmarks; no training data is left")
