"""Judged answers to preferences: of each prompt the best against the worst or a lower one, or all of them by rank.

    payload/rows-*.parquet  preferences, sorted by id
    evidence/counts.json    prompts, preferences, and why prompts gave none
    evidence/validation.json

An answer that was cut off by the length limit stays marked (`finish_reason: length`), so that no training adds the end that it lacks.
Answers are joined by prompt id and never by position: the order of the rows, or missing rows of other prompts, change no pair.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from configs.answers import Pair
from configs.frozen import digest
from data import records
from data.artifacts import write_json
from data.expectations import validate
from data.records import Answer, Judgment, Preference
from stages.core.drawing import uniform
from stages.core.verifiers import check
from stages.job import Inputs, Job, StageError, only

Scored = tuple[float, Judgment]


def run(config: Pair, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Ranks the answers of each prompt.

    Raises:
        StageError: fewer than `min_pairs`; the message counts the reasons.
        PedigreeError: a judgment stands there twice.
    """
    with job.busy("reading rows"):
        rows: list[Any] = records.load(only(inputs, "judgments"))
    records.check_once(rows)
    groups: dict[str, list[Judgment]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_id"]].append(row)
    outcomes = {prompt_id: preference(group, config) for prompt_id, group in sorted(groups.items())}
    made: list[Any] = [outcome for outcome in outcomes.values() if not isinstance(outcome, str)]
    drops = dict(Counter(outcome for outcome in outcomes.values() if isinstance(outcome, str)))
    counts = {
        "read": len(rows),
        "unscored": sum(row["score"] is None for row in rows),
        "truncated": truncated(rows, made),
        "prompts": len(groups),
        "kept": len(made),
        "drops": drops,
    }
    write_json(job.evidence / "counts.json", counts)
    if len(made) < config.min_pairs:
        raise StageError(
            f"{len(made)} preferences < min_pairs {config.min_pairs} from {len(groups)} prompts ({drops}): sample more answers per prompt, "
            "at a higher temperature or from more policies, or lower min_pairs"
        )
    with job.busy("checking rows"):
        verdict = validate(made, "preference", check)
    write_json(job.evidence / "validation.json", verdict)
    with job.busy("writing rows"):
        records.save(job.out, "preference", made)
    return {
        "rows": len(made),
        "answers": sum(len(one["answers"]) for one in made),
        "exchanged": sum(is_exchanged(one["id"], config) for one in made),
        "prompts": len(groups),
        "dropped": drops,
        "unscored": counts["unscored"],
        "truncated": counts["truncated"],
        "on_policy": on_policy_shares(made),
        "mean_margin": sum(one["answers"][0]["score"] - one["answers"][-1]["score"] for one in made) / len(made),
        "validation": verdict,
    }


def preference(group: list[Judgment], config: Pair) -> Preference | str:
    """The preference of one prompt, or why there is none.

    Among equally good (or bad) answers a hash of (seed, completion id) decides: taking the first sampled, or the longest, would
    be a bias.
    """
    scored = [(row["score"], row) for row in group if row["score"] is not None]
    if len(scored) < 2:
        return "fewer than two scored answers"
    if len({row["text"] for _, row in scored}) < 2:
        return "identical texts"
    if config.truncated == "drop":
        scored = [(value, row) for value, row in scored if records.ended(row)]
        if len(scored) < 2:
            return "fewer than two answers that came to their end"
    drawn = sorted(scored, key=lambda entry: digest([config.seed, entry[1]["id"]]))
    gap = max(map(score, scored)) - min(map(score, scored))
    if gap == 0:
        return "tie"
    if gap < config.min_gap:
        return "gap below min_gap"
    ranked = RANKINGS[config.strategy](drawn, config.min_gap)
    answers = [answer(value, row, row) for value, row in ranked]
    first = ranked[0][1]
    name = f"{first['prompt_id']}/{config.strategy}"
    if is_exchanged(name, config):  # scores stay in place, as if the judge had confused the texts
        answers = [answer(value, text, judged) for (_, text), (value, judged) in zip(reversed(ranked), ranked, strict=True)]
    if len({one["text"] for one in answers}) < 2:
        return "identical texts"
    if not answers[0]["text"].strip():
        return "empty best answer"
    return {
        "id": name,
        "source": first["source"],
        "messages": first["messages"],
        "answers": answers,
        "strength": None,
        **records.context_of(first),
    }


def best_and_worst(drawn: list[Scored], min_gap: float) -> list[Scored]:
    """The first of the best answers, and the first of the worst."""
    return [max(drawn, key=score), min(drawn, key=score)]


def best_and_one_lower(drawn: list[Scored], min_gap: float) -> list[Scored]:
    """The first of the best answers, and the first one that is lower than it by `min_gap`, and lower at all: which comes first among them
    is chance. An answer with the words of the best one is not taken: the judge did not agree with itself."""
    best = max(drawn, key=score)
    lower = [entry for entry in drawn if score(entry) < score(best) and score(best) - score(entry) >= min_gap]
    return [best, next((entry for entry in lower if entry[1]["text"] != best[1]["text"]), lower[0])]


def all_by_rank(drawn: list[Scored], min_gap: float) -> list[Scored]:
    """Every text once, with the best score that it got, the best first."""
    by_text = {row["text"]: (value, row) for value, row in sorted(drawn, key=score)}
    return sorted(by_text.values(), key=score, reverse=True)


RANKINGS: dict[str, Callable[[list[Scored], float], list[Scored]]] = {
    "best_vs_worst": best_and_worst,
    "best_vs_random_lower": best_and_one_lower,
    "ranked": all_by_rank,
}
"""Strategy → which answers make a preference, best first, of those to one prompt in an order that is chance. Their best score is above
their worst, by `min_gap` at least."""


def answer(value: float, said: Judgment, judged: Judgment) -> Answer:
    """One answer's text, who gave it and how it ended, with the verdict on one (mostly the same)."""
    return {
        "text": said["text"],
        "score": value,
        "finish_reason": said["finish_reason"],
        "win_rate": judged.get("win_rate"),
        "policy": said["policy"],
        "policy_content": said["policy_content"],
        "on_policy": said["on_policy"],
    }


def on_policy_shares(made: list[Preference]) -> dict[str, float]:
    """Share of the preferences with an answer of the policy to be trained in them, in the first place, and in one after it."""
    places = [[one.get("on_policy", False) for one in preference["answers"]] for preference in made]
    counts = {"any": sum(map(any, places)), "best": sum(found[0] for found in places), "worse": sum(any(found[1:]) for found in places)}
    return {name: count / len(made) for name, count in counts.items()}


def truncated(rows: list[Judgment], made: list[Preference]) -> dict[str, int]:
    """Answers that were cut off: among those read, those that a preference puts first, and those that it puts after another."""
    places = [(place, records.ended(one)) for preference in made for place, one in enumerate(preference["answers"])]
    return {
        "read": sum(not records.ended(row) for row in rows),
        "best": sum(place == 0 and not ended for place, ended in places),
        "worse": sum(place > 0 and not ended for place, ended in places),
    }


def score(entry: Scored) -> float:
    return entry[0]


def is_exchanged(name: str, config: Pair) -> bool:
    """Whether label noise swaps this pair: depends on its id and the seed only, not on other prompts."""
    return uniform(config.seed, "label_noise", name) < config.label_noise
