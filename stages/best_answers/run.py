"""Turn judged answers into conversations: keep the answers to each prompt that are worth imitating.

    payload/rows-*.parquet    conversations of a prompt and one answer, in the order of prompt ids; the id is the answer's
    evidence/counts.json      answers read and kept, and why prompts yielded none
    evidence/parents.parquet  the prompt of each conversation
    evidence/validation.json

Truncated answers that are kept stay marked (`finish_reason: length`), so that no end-of-turn token is added.
"""

from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from pedigree.configs.judging.selection import BestAnswers
from pedigree.data.artifacts.artifacts import write_json
from pedigree.data.records import answer_pool, parents, records
from pedigree.data.records.answer_pool import value_of
from pedigree.data.records.records import Conversation, Message
from pedigree.stages.core.keeping import histogram, pass_rate, worth_imitating
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only
from pedigree.stages.job.output_rows import written


def run(config: BestAnswers, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Keep the good answers to each prompt.

    Raises:
        StageError: fewer than `min_rows` are left; the message counts the reasons.
        PedigreeError: an answer is there twice.
    """
    with job.busy("reading rows"):
        given = answer_pool.read(only(inputs, "judgments"), config.by)
    groups = given.by_prompt()
    outcomes = {prompt_id: worth_imitating(group, config) for prompt_id, group in groups.items()}
    drops = dict(Counter(outcome for outcome in outcomes.values() if isinstance(outcome, str)))
    kept = [one for outcome in outcomes.values() if not isinstance(outcome, str) for one in outcome]
    counts = {
        "read": len(given.facts),
        "unscored": sum(one.value is None for one in given.facts),
        "truncated": {"read": sum(not one.ended for one in given.facts), "kept": sum(not one.ended for one in kept)},
        "malformed": sum(one.malformed for one in given.facts),
        "prompts": len(groups),
        "kept": len(kept),
        "drops": drops,
    }
    write_json(job.evidence / "counts.json", counts)
    if len(kept) < config.min_rows:
        raise StageError(
            f"{len(kept)} answers < min_rows {config.min_rows} from {len(groups)} prompts ({drops}): sample more answers per prompt, lower "
            "keep.min_score, or lower min_rows"
        )
    sizes = [one.asked + one.length for one in kept]
    verdict = written(
        job, "conversation", kept, sizes, given.read, lambda one: [one.place], lambda one, rows: conversation(rows[one.place])
    )
    parents.write(job.evidence, ((one.id, [one.prompt_id]) for one in kept))
    rates = [rate for group in groups.values() if (rate := pass_rate(group, config)) is not None]
    return {
        "rows": len(kept),
        "prompts": len(groups),
        "prompts_kept": len(groups) - sum(drops.values()),
        "dropped": drops,
        "unscored": counts["unscored"],
        "truncated": counts["truncated"],
        **({"pass_rates": histogram(rates), "pass_rate": fmean(rates)} if config.keep.min_score is not None else {}),
        "mean_score": fmean(map(value_of, kept)),
        "mean_length": fmean(one.length for one in kept),
        "on_policy": sum(one.on_policy for one in kept) / len(kept),
        "validation": verdict,
    }


def conversation(row: Mapping[str, Any]) -> Conversation:
    """A prompt with one answer."""
    answer: Message = {"role": "assistant", "content": row["text"]}
    if row["finish_reason"] == "length":
        answer["finish_reason"] = "length"
    return {"id": row["id"], "source": row["source"], "messages": [*row["messages"], answer], **records.context_of(row)}
