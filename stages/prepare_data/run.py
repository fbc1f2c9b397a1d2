"""Load, validate, filter and mix sources into one dataset.

payload/rows-*.parquet    the records
payload/form.json         for a suite with a form: the form's content
evidence/counts.json      rows read, dropped by each filter, not drawn, repeated and kept, in total and per source of the recipe
evidence/statistics.json  statistics of the kept rows, in total and per source of the recipe
evidence/drops.jsonl      every dropped row with the filter and its evidence
evidence/bad_rows.jsonl   every rejected row with its location and the reason
evidence/parents.parquet  for rows of other stages: every row with a new id and its id there
evidence/validation.json  whether each expectation was met, and unexpected rows with their locations; also written if the stage fails
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pedigree.configs.rows.datasets import ROWS, TOKENIZER, PrepareData
from pedigree.configs.rows.expectations import facts_named, texts_named
from pedigree.configs.rows.filters import Ids, base_id, columns_named
from pedigree.configs.rows.row_sources import Arithmetic, Constraints, DataSource, Files, Hub, Packaged, RowProgram, StageRows, Stored
from pedigree.data.artifacts.artifacts import write_json, write_rows
from pedigree.data.expectations import row_facts, row_statistics
from pedigree.data.expectations.results import Verdict, recorded, refuse, warnings
from pedigree.data.expectations.validation import examine
from pedigree.data.filters import filtering
from pedigree.data.filters.filtering import Drop
from pedigree.data.filters.token_counts import TokenCounter
from pedigree.data.records import columns, parents, records
from pedigree.data.records.records import FORM_FILE
from pedigree.data.records.scattered import Numbers
from pedigree.data.sources import procedural, sources
from pedigree.data.sources.dataset_builder import DatasetBuilder, RowIndex, SourceRows
from pedigree.data.sources.leaks import PLANTED
from pedigree.data.sources.row_files import listed
from pedigree.data.sources.shares import Portion
from pedigree.data.sources.sources import OpenSource, Outside, Parsed
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only_or_none
from pedigree.stages.verifiers import check, row_programs, verify
from pedigree.stages.verifiers.choices import check_choices

BATCH = 1000
SILENT_SHARE = 0.9
"""Share of the job's heartbeat timeout after which a silent program is ended, so that the job itself is not killed."""
EXCERPT = 200
"""Characters of a dropped row in its evidence."""
HASH = re.compile(r"-([0-9a-f]{16})(?![0-9a-f])")
"""The content hash in a row's id."""
NAMING = ("ids", "exact_duplicates", "near_duplicates")
"""Filters whose evidence names rows without quoting them."""


def run(config: PrepareData, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Load, filter, mix and validate.

    Raises:
        StageError: no row is left, or a verifier scores a procedural answer wrongly.
        ChatError: the model for token counts has a template or tokenizer that cannot be used for training.
        PedigreeError: malformed rows, fewer rows than a mixture requires, or rows that violate an expectation; the message shows them.
    """
    model = only_or_none(inputs, TOKENIZER)
    counter = TokenCounter(model.payload, config.record) if model else None
    suites: list[Any] = [item for suite in inputs.get("leak_from", {}).values() for item in records.load(suite)]
    outside = Outside(
        suites=suites, files=job.source_files, artifacts=inputs.get(ROWS, {}), beat=lambda: job.progress(0, 0), mark=job.marks.append,
        check_verifier=check, run=partial(run_program, job),
    )  # fmt: skip
    for source in config.sources:
        check_procedural_verifier(source)
    if any(isinstance(source, RowProgram) for source in config.sources):
        row_programs.require()
    workers = job.numerics.threads
    facts = facts_named(config.expectations)
    with DatasetBuilder(job.folder / "drafts", config.record, config.filters, config.seed, check, workers, facts, counter) as builder:
        for source, amount in zip(config.sources, config.amounts, strict=True):
            with job.busy("reading sources"):
                given = replace(opened(source, config, outside), portion=Portion.of(source, amount, config.total))
            for done in builder.take(given):
                job.doing("reading sources", done, unit="rows")
        refuse_columns(filtering.unknown_columns(config.filters, builder.columns))
        with job.busy("filtering rows"):
            rows = builder.table(config.draw)
            refuse_unknown(filtering.unknown_ids(config.filters, rows.facts))
            drops = filtering.decide(config.filters, rows.facts, rows.ids, lambda places: read(rows, places, config), workers)
            kept = np.setdiff1d(np.arange(len(rows)), np.fromiter(drops, np.int64, len(drops)))
        with job.busy("drawing rows"):
            if config.draw == "after_filters":
                rows, kept = rows.repeated(rows.drawn(builder.taken, kept))
            kept = rows.ordered(kept, config.order)
        counts = count(builder.taken, rows, drops, kept)
        if not len(kept):
            raise StageError(nothing_left(counts, builder.taken))
        with job.busy("checking rows"):
            verdict = validated(rows, kept, config)
            write_json(job.evidence / "validation.json", verdict)
        refuse(verdict)
        job.marks += warnings(verdict)
        for done in rows.write(job.out / "payload", kept, workers):
            job.doing("writing rows", done, len(kept), "rows")
        with job.busy("writing evidence"):
            write_json(job.evidence / "statistics.json", statistics(config, builder.taken, rows, kept))
            by_fault = sum(map(faults, builder.taken), Counter[str]())
            bad_rows = [{"source": part.source.name, **row.as_json()} for part in builder.taken for row in part.bad]
            write_json(job.evidence / "counts.json", counts)
            write_rows(job.evidence / "drops.jsonl", dropped_rows(rows, drops, config))
            write_rows(job.evidence / "bad_rows.jsonl", bad_rows)
            if inputs.get(ROWS):
                parents.write(job.evidence, new_ids(rows, config))
    if config.the_form is not None:
        write_json(job.out / "payload" / FORM_FILE, {"name": config.form_name, **config.the_form.deciding()})
    return {
        "rows": len(kept),
        "sources": counts["sources"],
        "dropped": counts["drops"] | by_fault,
        "bad_rows": len(bad_rows) - by_fault.total(),
        "planted_leaks": sum(number for name, number in counts["sources"].items() if name in PLANTED),
        "validation": recorded(verdict),
        **({"out_of_turn": counts["out_of_turn"]} if counts["out_of_turn"] else {}),
    }


def opened(source: DataSource, config: PrepareData, outside: Outside) -> OpenSource:
    """Open a source whose rows are converted to the config's record type."""
    form, task = config.the_form, config.task
    if form is None or task is None or not isinstance(source, Packaged | Files | Stored | Hub):
        return sources.opened(source, config.record, task, outside, columns_named(config.filters))
    given = sources.opened_items(source, form, task, config.shots, outside)
    return replace(given, parse=lambda block: checked(given.parse(block)))


def run_program(job: Job, source: RowProgram, file: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of each row that a program outputs; each counts as a heartbeat of the job."""
    silent = SILENT_SHARE * job.placement.heartbeat_timeout_s
    return row_programs.rows_of(source, file, silent, lambda made: job.doing(f"running {source.path}", made, source.count, "rows"))


def checked(items: Parsed) -> Parsed:
    for item in items.rows:
        if "choices" in item:
            check_choices(item["verifier"], item["choices"])
    return items


def check_procedural_verifier(source: DataSource) -> None:
    """Check that the verifier of a procedural source accepts every right answer and rejects every wrong one."""
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


def faults(part: SourceRows) -> Counter[str]:
    """Fault → number of rows that the source's `out_of_turn` drops."""
    return Counter(row.out_of_turn for row in part.bad if row.out_of_turn)


def count(taken: Sequence[SourceRows], rows: RowIndex, drops: Mapping[int, Drop], kept: Numbers) -> dict[str, Any]:
    """Rows read, dropped and kept, in total and per source in recipe order. Rows that are not drawn count as not read."""
    gone = np.fromiter(drops, np.int64, len(drops))
    named = rows.index["source"].take(pa.array(np.sort(kept))).value_counts().to_pylist()
    per_source = []
    for number, part in enumerate(taken):
        reasons = Counter(drops[place].reason for place in gone[rows.sources[gone] == number].tolist())
        mine = kept[rows.sources[kept] == number]
        once = int((mine < rows.read).sum())
        seen = once + reasons.total()
        by_fault = faults(part)
        malformed = len(part.bad) - by_fault.total()
        left_out = {**part.source.left_out, **by_fault, "malformed": malformed, "not drawn": part.rows - seen}
        per_source.append(
            {
                "source": part.source.name,
                "left_out": {reason: number for reason, number in left_out.items() if number},
                "in": seen,
                "dropped": dict(reasons),
                "out_of_turn": dict(part.out_of_turn),
                "repeated": len(mine) - once,
                "kept": len(mine),
            }
        )
    return {
        "read": sum(one["in"] for one in per_source),
        "kept": len(kept),
        "repeated": len(rows) - rows.read,
        "drops": dict(Counter(drop.reason for drop in drops.values())),
        "out_of_turn": dict(sum((part.out_of_turn for part in taken), Counter[str]())),
        "sources": {one["values"]: one["counts"] for one in named},
        "per_source": per_source,
    }


def nothing_left(counts: Mapping[str, Any], taken: Sequence[SourceRows]) -> str:
    bad = [row for part in taken for row in part.bad]
    why = f"(dropped: {counts['drops']}), and {len(bad)} more are malformed"
    message = f"no row is left of {counts['read']} {why}: loosen the filters, fix the rows, or add sources"
    return f"{message}:\n  {listed(bad)}" if bad else message


def refuse_columns(names: Sequence[str]) -> None:
    if names:
        raise StageError(
            f"a filter uses the column {' or '.join(names)}, which no row of any source has: spell it as in the dataset, with dots for "
            "nested fields (`extra.pass_rate`), or remove the filter"
        )


def refuse_unknown(ids: Sequence[str]) -> None:
    if ids:
        raise StageError(
            f"{len(ids)} ids of a filter match no row, e.g. {ids[0]!r}: correct them (`pedigree trace` prints ids), or remove them if the "
            "source no longer has or draws these rows"
        )


def statistics(config: PrepareData, taken: Sequence[SourceRows], rows: RowIndex, kept: Numbers) -> dict[str, Any]:
    """Statistics of the kept rows, in total and per source in recipe order."""
    languages = filtering.languages(config.filters, rows.facts)
    sources = rows.sources[kept]
    return {
        "all": row_statistics.summary(rows.index, languages, kept),
        "per_source": [
            {"source": part.source.name, **row_statistics.summary(rows.index, languages, kept[sources == number])}
            for number, part in enumerate(taken)
        ],
    }


def validated(rows: RowIndex, kept: Numbers, config: PrepareData) -> Verdict:
    """Validate the kept rows in hash order, so that the first ones are a random sample."""
    kept = rows.shuffled(kept)

    def texts_of(count: int) -> pa.Table:
        sample, names = rows.table(kept[:count]), texts_named(config.expectations)
        batches = (columns.to_rows(sample.slice(start, BATCH), records.RECORDS[config.record]) for start in range(0, len(sample), BATCH))
        return pa.concat_tables([row_facts.texts_of(batch, names) for batch in batches])

    def places_of(numbers: list[int]) -> list[str]:
        return rows.places_read(kept[numbers])

    return examine(rows.index.take(pa.array(kept)), config.record, config.expectations, texts_of, places_of)


def dropped_rows(rows: RowIndex, drops: Mapping[int, Drop], config: PrepareData) -> Iterator[dict[str, Any]]:
    """Every dropped row, by source: in reading order, or in drawing order if rows are drawn before the filters."""
    places = sorted(drops)
    named = frozenset(name[-16:] for one in config.filters if isinstance(one, Ids) for name in one.ids)
    for start in range(0, len(places), BATCH):
        batch = places[start : start + BATCH]
        given = read(rows, np.array(batch), config)
        yield from (excerpt(row, drops[place], named) for place, row in zip(batch, given, strict=True))


def new_ids(rows: RowIndex, config: PrepareData) -> Iterator[tuple[str, list[str]]]:
    """(new id, [id in its stage]) of all rows from other stages, also of dropped ones, except those that keep their id."""
    foreign = [number for number, source in enumerate(config.sources) if isinstance(source, StageRows)]
    places = np.flatnonzero(np.isin(rows.sources, foreign))
    for start in range(0, len(places), BATCH):
        batch = places[start : start + BATCH]
        for name, before in zip(rows.ids.take(pa.array(batch)).to_pylist(), rows.places_read(batch), strict=True):
            if base_id(name) != base_id(before):
                yield name, [before]


def read(rows: RowIndex, places: Numbers, config: PrepareData) -> list[dict[str, Any]]:
    return columns.to_rows(rows.table(places), records.RECORDS[config.record])


def excerpt(row: dict[str, Any], drop: Drop, named: Collection[str]) -> dict[str, Any]:
    """A line of evidence. Omits the text of rows that the `ids` filter drops and of their copies, in case it must not be stored.

    `named` are the hashes in the ids that this filter names, even if another one dropped the row first.
    """
    hidden = any(found in named for found in HASH.findall(f"{row['id']} {drop.evidence}"))
    evidence = "" if hidden and drop.reason not in NAMING else drop.evidence
    text = "" if hidden else "\n".join(records.texts(row))
    return {"id": row["id"], "source": row["source"], "reason": drop.reason, "evidence": evidence, "text": text[:EXCERPT]}
