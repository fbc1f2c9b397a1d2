"""Sources to one validated, filtered, shuffled set of records.

payload/rows.jsonl      the records
payload/form.json       of a suite with a form: what the form says
evidence/counts.json    rows read, dropped by each filter and kept, in all and per source of the recipe
evidence/drops.jsonl    every dropped row with the filter and its evidence
evidence/bad_rows.jsonl every row that nothing could be made of, with its place and the reason
evidence/validation.json
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from configs.datasets import Arithmetic, Constraints, DataSource, Files, Hub, Packaged, PrepareData, Stored
from data import filters, procedural, records, sources
from data.artifacts import write_json, write_rows
from data.expectations import validate
from data.filters import Dropped
from data.records import FORM_FILE
from data.sources import LEAK, Loaded, Outside
from stages.core.verifiers import check, verify
from stages.core.verifiers.choices import check_choices
from stages.job import Inputs, Job, StageError

EXCERPT = 200
"""Characters of a dropped row that its evidence shows."""


def run(config: PrepareData, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Loads, filters, validates and shuffles.

    Raises:
        StageError: no row is left, or a procedural answer that its verifier scores wrongly.
        SourceError, ValidationError: malformed rows, or rows that break an expectation; the message shows them.
    """
    suites: list[Any] = [item for suite in inputs.get("leak_from", {}).values() for item in records.load(suite)]
    outside = Outside(
        suites=suites, files=job.source_files, beat=lambda: job.progress(0, 0), mark=job.marks.append, check_verifier=check
    )
    for source in config.sources:
        prove_verifier(source)
    with job.busy("reading sources"):
        loaded = [load(source, config, outside) for source in config.sources]
        given = sources.with_ids([row for part in loaded for row in part.rows])
    with job.busy("filtering rows"):
        kept, dropped = filters.apply(config.filters, given)
    drops = dict(Counter(one.drop.reason for one in dropped))
    counts = {
        "read": len(given),
        "kept": len(kept),
        "drops": drops,
        "sources": dict(Counter(row["source"] for row in kept)),
        "per_source": count(loaded, given, kept, dropped),
    }
    if not kept:
        raise StageError(f"no row is left of {len(given)} (dropped: {drops}): loosen the filters or add sources")
    with job.busy("checking rows"):
        rows = sources.shuffled(kept, config.seed)
        verdict = validate(rows, config.record, check)
    with job.busy("writing rows"):
        records.save(job.out, rows)
        if config.the_form is not None:
            write_json(job.out / "payload" / FORM_FILE, {"name": config.form, **config.the_form.deciding()})
    write_json(job.evidence / "counts.json", counts)
    write_json(job.evidence / "validation.json", verdict)
    write_rows(job.evidence / "drops.jsonl", [excerpt(one) for one in dropped])
    bad = [{"source": part.name, **row._asdict()} for part in loaded for row in part.bad]
    write_rows(job.evidence / "bad_rows.jsonl", bad)
    return {
        "rows": len(rows),
        "sources": counts["sources"],
        "dropped": counts["drops"],
        "bad_rows": len(bad),
        "planted_leaks": sum(row["source"].startswith(LEAK) for row in rows),
        "validation": verdict,
    }


def load(source: DataSource, config: PrepareData, outside: Outside) -> Loaded:
    """The rows of one source as records."""
    form, task = config.the_form, config.task
    if form is None or task is None or not isinstance(source, Packaged | Files | Stored | Hub):
        return sources.load(source, config.record, task, outside)
    loaded = sources.load_items(source, form, task, config.shots, outside)
    for item in loaded.rows:
        if "choices" in item:
            check_choices(item["verifier"], item["choices"])
    return loaded


def prove_verifier(source: DataSource) -> None:
    """Checks that the verifier of a procedural source accepts every right answer and rejects a wrong one."""
    match source:
        case Arithmetic():
            examples = procedural.arithmetic(source)
        case Constraints():
            examples = procedural.constraints(source)
        case _:
            return
    for example in examples:
        for text, expected in ((example.answer, 1.0), (example.rejected, 0.0)):
            verdict = verify(example.verifier or {}, text or "")
            if verdict.score != expected:
                raise StageError(f"verifier {example.verifier} scores {text!r} {verdict.score}, not {expected}: {verdict.reason}")


def count(
    loaded: Sequence[Loaded], given: list[dict[str, Any]], kept: list[dict[str, Any]], dropped: Sequence[Dropped]
) -> list[dict[str, Any]]:
    """One entry per source of the recipe, in its order; `given` are their rows, one after another."""
    stayed = {row["id"] for row in kept}
    reasons = {one.row["id"]: one.drop.reason for one in dropped}
    counts, start = [], 0
    for part in loaded:
        ids = [row["id"] for row in given[start : start + len(part.rows)]]
        start += len(ids)
        counts.append(
            {
                "source": part.name,
                "left_out": part.left_out,
                "in": len(ids),
                "dropped": dict(Counter(reasons[name] for name in ids if name in reasons)),
                "kept": sum(name in stayed for name in ids),
            }
        )
    return counts


def excerpt(one: Dropped) -> dict[str, Any]:
    text = "\n".join(filters.texts(one.row))
    return {
        "id": one.row["id"],
        "source": one.row["source"],
        "reason": one.drop.reason,
        "evidence": one.drop.evidence,
        "text": text[:EXCERPT],
    }
