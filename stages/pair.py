"""Answers to preferences: of each prompt some that are compared, or all of them by rank.

    payload/rows-*.parquet  preferences, in the order of their prompts' ids
    evidence/counts.json    prompts, preferences, and why prompts gave none, or preferences were left out
    evidence/validation.json

An answer that was cut off by the length limit stays marked (`finish_reason: length`), so that no training adds the end that it lacks.
Answers are joined by prompt id and never by position: the order of the rows, or missing rows of other prompts, change no pair.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from configs.pairing import Delta, Pair
from data import answers, records
from data.answers import GivenAnswers, Said
from data.artifacts import write_json
from data.making import RowWriter, blocks
from data.records import Answer, Preference
from stages.core.pairing import Preferred, preferences, within
from stages.core.verifiers import check
from stages.job import Inputs, Job, StageError, only, only_or_none


def run(config: Pair, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Compares the answers of each prompt.

    Raises:
        StageError: fewer than `min_pairs`, the message counts the reasons; or nothing to decide by.
        PedigreeError: an answer stands there twice.
    """
    judged = only_or_none(inputs, "judgments")
    with job.busy("reading rows"):
        given = answers.read(judged or only(inputs, "completions"), config.by if judged else None)
    refuse(config, given.said)
    groups = given.by_prompt()
    made, drops = chosen(groups, config)
    counts = {
        "read": len(given.said),
        "unscored": sum(one.value is None for one in given.said) if judged else 0,
        "truncated": truncated(given.said, made),
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
    verdict = write(made, given, job)
    write_json(job.evidence / "validation.json", verdict)
    gaps = [one.gap for one in made if one.gap is not None]
    return {
        "rows": len(made),
        "answers": sum(len(one.ranked) for one in made),
        "exchanged": sum(one.exchanged for one in made),
        "prompts": len(groups),
        "dropped": drops,
        "unscored": counts["unscored"],
        "truncated": counts["truncated"],
        "on_policy": on_policy_shares(made),
        **({"mean_margin": fmean(gaps)} if gaps else {}),
        "mean_length": {"best": fmean(one.said[0].length for one in made), "worst": fmean(one.said[-1].length for one in made)},
        "validation": verdict,
    }


def refuse(config: Pair, said: Sequence[Said]) -> None:
    """Stops where the answers lack what the config decides by.

    Raises:
        StageError: a policy that is named gave none, or there is no ensemble to disagree.
    """
    if isinstance(config.strategy, Delta):
        policies = sorted({one.policy for one in said})
        for field, policy in (("strong", config.strategy.strong), ("weak", config.strategy.weak)):
            if policy not in policies:
                raise StageError(f"strategy.{field} is {policy!r}, and the completions are of {', '.join(policies)}: name one of them")
    if config.budget is not None and config.budget.choose == "disagreement":
        members = max((len(one.rewards) for one in said), default=0)
        if members < 2:
            raise StageError(
                f"budget.choose disagreement is that of two or more reward models, and the judgments have rewards of {members}: name more "
                "reward_models at `judge`, or choose by smallest_gap"
            )


def chosen(groups: Mapping[str, Sequence[Said]], config: Pair) -> tuple[list[Preferred], dict[str, int]]:
    """(preferences, reason → prompts that gave none, or preferences that were left out)."""
    outcomes = [preferences(group, config) for group in groups.values()]
    drops = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    found = [one for outcome in outcomes if not isinstance(outcome, str) for one in outcome]
    if config.budget is None or len(found) <= config.budget.pairs:
        return found, dict(drops)
    kept = within(config.budget, found, config.seed)
    return kept, dict(drops) | {"over budget": len(found) - len(kept)}


def write(made: Sequence[Preferred], given: GivenAnswers, job: Job) -> dict[str, Any]:
    """Writes the payload; returns the verdict of the expectations."""
    sizes = [one.ranked[0].asked + sum(said.length for said in one.ranked) for one in made]

    def rows(part: slice) -> Iterator[list[Preference]]:
        words = given.read(said for one in made[part] for said in one.ranked)
        for block in blocks(made[part]):
            read = words.rows(said for one in block for said in one.ranked)
            yield [preference(one, read) for one in block]

    into = RowWriter(job.out, "preference", check)
    for done in into.write(sizes, rows):
        job.doing("writing rows", done, len(made), "rows")
    with job.busy("checking rows"):
        return into.verdict()


def preference(one: Preferred, rows: Mapping[int, dict[str, Any]]) -> Preference:
    """A preference with its words; `rows` are those of its answers, by place."""
    first = rows[one.ranked[0].place]
    sides = zip(one.said, one.ranked, strict=True)
    return {
        "id": one.id,
        "source": first["source"],
        "messages": first["messages"],
        "answers": [answer(judged.value, rows[said.place], rows[judged.place]) for said, judged in sides],
        "strength": one.strength,
        **records.context_of(first),
    }


def answer(value: float | None, said: Mapping[str, Any], judged: Mapping[str, Any]) -> Answer:
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


def on_policy_shares(made: Sequence[Preferred]) -> dict[str, float]:
    """Share of the preferences with an answer of the policy to be trained in them, in the first place, and in one after it."""
    places = [[said.on_policy for said in one.said] for one in made]
    counts = {"any": sum(map(any, places)), "best": sum(found[0] for found in places), "worse": sum(any(found[1:]) for found in places)}
    return {name: count / len(made) for name, count in counts.items()}


def truncated(said: Sequence[Said], made: Sequence[Preferred]) -> dict[str, int]:
    """Answers that were cut off: among those read, those that a preference puts first, and those that it puts after another."""
    places = [(place, one.ended) for preferred in made for place, one in enumerate(preferred.said)]
    return {
        "read": sum(not one.ended for one in said),
        "best": sum(place == 0 and not ended for place, ended in places),
        "worse": sum(place > 0 and not ended for place, ended in places),
    }
