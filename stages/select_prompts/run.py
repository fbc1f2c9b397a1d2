"""Select prompts by the mean score of their answers, e.g. those that are neither always nor never solved.

payload/rows-*.parquet  the kept prompts, unchanged and in order
evidence/counts.json    prompts read and kept, and why the others were dropped
evidence/rates.jsonl    every judged prompt: mean score, number of answers, and whether it is kept
"""

from collections import Counter
from statistics import fmean
from typing import Any

import numpy as np

from pedigree.configs.judging.selection import SelectPrompts
from pedigree.data.artifacts.artifacts import write_json, write_rows
from pedigree.data.records import answer_pool, records
from pedigree.data.records.scattered import Scattered
from pedigree.stages.core.keeping import histogram
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only


def run(config: SelectPrompts, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Keep the prompts whose mean score is within the bounds.

    Raises:
        StageError: fewer than `min_rows` are left; the message counts the reasons.
        PedigreeError: an answer is there twice.
    """
    pool = only(inputs, "prompts")
    with job.busy("reading rows"):
        answers = answer_pool.read(only(inputs, "judgments"), config.by).by_prompt()
        scores = {name: [one.value for one in group if one.value is not None] for name, group in answers.items()}
        ids, sizes = zip(*((row["id"], records.bulk_of(row)) for row in records.stream(pool.payload)), strict=True)
    outcomes = [outcome(scores.get(name), config) for name in ids]
    kept = np.array([place for place, reason in enumerate(outcomes) if reason is None], np.int64)
    drops = dict(Counter(reason for reason in outcomes if reason is not None))
    write_json(job.evidence / "counts.json", {"read": len(ids), "kept": len(kept), "drops": drops})
    judged = [
        {"id": name, "mean": fmean(scores[name]), "answers": len(scores[name]), "kept": reason is None}
        for name, reason in zip(ids, outcomes, strict=True)
        if scores.get(name)
    ]
    write_rows(job.evidence / "rates.jsonl", judged)
    if len(kept) < config.min_rows:
        raise StageError(
            f"{len(kept)} prompts < min_rows {config.min_rows} of {len(ids)} ({drops}): widen min_mean and max_mean, sample answers to "
            "more of them, or lower min_rows"
        )
    for rows in Scattered.of(pool, sizes).write(job.out / "payload", kept, job.numerics.threads):
        job.doing("writing rows", rows, len(kept), "rows")
    return {
        "rows": len(kept),
        "prompts": len(ids),
        "judged": len(judged),
        "dropped": drops,
        "rates": histogram(one["mean"] for one in judged),
        "mean": {"judged": fmean(one["mean"] for one in judged), "kept": fmean(one["mean"] for one in judged if one["kept"])},
    }


def outcome(scores: list[float] | None, config: SelectPrompts) -> str | None:
    """Why a prompt is dropped, or None. `scores` are those of its answers; None if it has no answers."""
    if scores is None:
        return "not judged"
    if not scores:
        return "no scored answer"
    if len(scores) < config.min_answers:
        return "fewer than min_answers"
    mean = fmean(scores)
    if config.min_mean is not None and mean < config.min_mean:
        return "below min_mean"
    return "above max_mean" if config.max_mean is not None and mean > config.max_mean else None
