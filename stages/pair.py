"""Best against worst answer of each prompt.

    payload/rows.jsonl      preferences, sorted by id
    evidence/counts.json    prompts, pairs, and why prompts gave none
    evidence/validation.json

Answers are joined by prompt id and never by position: the order of the rows, or missing rows of other prompts, change no pair.
"""

from collections import Counter, defaultdict
from typing import Any

from configs.datasets import Pair
from configs.frozen import digest
from data import records
from data.artifacts import write_json
from data.expectations import validate
from data.records import Judgment, Preference
from stages.core.verifiers import check
from stages.job import Inputs, Job, StageError, only


def run(config: Pair, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Pairs the answers of each prompt.

    Raises:
        StageError: fewer than `min_pairs`; the message says where the prompts went.
    """
    rows: list[Any] = records.load(only(inputs, "judgments"))
    groups: dict[str, list[Judgment]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_id"]].append(row)
    outcomes = {prompt_id: pair(group, config) for prompt_id, group in sorted(groups.items())}
    pairs: list[Any] = [outcome for outcome in outcomes.values() if not isinstance(outcome, str)]
    drops = dict(Counter(outcome for outcome in outcomes.values() if isinstance(outcome, str)))
    counts = {
        "read": len(rows),
        "unscored": sum(row["score"] is None for row in rows),
        "prompts": len(groups),
        "kept": len(pairs),
        "drops": drops,
    }
    write_json(job.evidence / "counts.json", counts)
    if len(pairs) < config.min_pairs:
        raise StageError(
            f"{len(pairs)} pairs < min_pairs {config.min_pairs} from {len(groups)} prompts ({drops}): sample more answers per prompt, "
            "at a higher temperature or from more policies, or lower min_pairs"
        )
    verdict = validate(pairs, "preference", check)
    write_json(job.evidence / "validation.json", verdict)
    records.save(job.out, pairs)
    return {
        "rows": len(pairs),
        "prompts": len(groups),
        "dropped": drops,
        "unscored": counts["unscored"],
        "mean_margin": sum(one["margin"] for one in pairs) / len(pairs),
        "validation": verdict,
    }


def pair(group: list[Judgment], config: Pair) -> Preference | str:
    """The pair of one prompt, or why there is none.

    Among equally good (or bad) answers a hash of (seed, completion id) decides: the first sampled, or the longest, would be a
    bias.
    """
    scored = [(row["score"], row) for row in group if row["score"] is not None]
    if len(scored) < 2:
        return "fewer than two scored answers"
    ranked = sorted(scored, key=lambda entry: digest([config.seed, entry[1]["id"]]))
    (high, best), (low, worst) = max(ranked, key=score), min(ranked, key=score)  # the first of equals
    gap = high - low
    if len({row["text"] for _, row in scored}) < 2:
        return "identical texts"
    if gap == 0:
        return "tie"
    if gap < config.min_gap:
        return "gap below min_gap"
    if best["text"] == worst["text"]:
        return "identical texts"
    if not best["text"].strip():
        return "empty best answer"
    return {
        "id": f"{best['prompt_id']}/{config.strategy}",
        "source": best["source"],
        "messages": best["messages"],
        "chosen": best["text"],
        "rejected": worst["text"],
        "margin": gap,
    }


def score(entry: tuple[float, Judgment]) -> float:
    return entry[0]
