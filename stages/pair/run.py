"""Answers to preferences: of each prompt some that are compared, or all of them by rank.

    payload/rows-*.parquet  preferences, in the order of their prompts' ids
    evidence/counts.json    prompts, preferences, and why prompts gave none, or preferences were left out
    evidence/validation.json

An answer that was cut off by the length limit stays marked (`finish_reason: length`), so that no training adds the end that it lacks.
Answers are joined by prompt id and never by position: the order of the rows, or missing rows of other prompts, change no pair. Answers to
relaxed prompts are joined to the prompts that were made of these.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from configs.judging.pairing import Delta, Pair, Relaxed
from data.artifacts.artifacts import Artifact, write_json
from data.expectations.output import blocks
from data.records import answer_pool, records
from data.records.answer_pool import AnswerFacts, AnswerPool
from data.records.records import Answer, Preference
from stages.core.constraining import PART
from stages.job.job import Inputs, Job, StageError, only, only_or_none
from stages.job.output_rows import written
from stages.pair.pairing import Preferred, preferences, within
from stages.verifiers import VerifierError, verify


def run(config: Pair, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Compares the answers of each prompt.

    Raises:
        StageError: fewer than `min_pairs`, the message counts the reasons; or nothing to decide by.
        PedigreeError: an answer stands there twice.
    """
    given, unjoined = read(config, inputs, job)
    refuse(config, given.facts)
    groups = given.by_prompt()
    made, drops = chosen(groups, config)
    drops |= unjoined
    counts = {
        "read": len(given.facts),
        "unscored": sum(one.value is None for one in given.facts) if config.scored else 0,
        "truncated": truncated(given.facts, made),
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


def read(config: Pair, inputs: Inputs, job: Job) -> tuple[AnswerPool, dict[str, int]]:
    """(all answers, each under the prompt for which it is compared; reason → relaxed prompts that belong to none)."""
    with job.busy("reading rows"):
        if isinstance(config.strategy, Relaxed):
            return with_relaxed(only(inputs, "completions"), only(inputs, "relaxed"), config.strategy.verified)
        judged = only_or_none(inputs, "judgments")
        return answer_pool.read(judged or only(inputs, "completions"), config.by if judged else None), {}


def with_relaxed(constrained: Artifact, relaxed: Artifact, verified: bool) -> tuple[AnswerPool, dict[str, int]]:
    """Answers to prompts with constraints and, as if they were answers to these, those to the prompts that they were made of.

    Args:
        constrained: completions.
        relaxed: completions.
        verified: whether the value of an answer is what the verifier of the prompt with constraints gives it; otherwise it has none.
    """
    verifiers: dict[str, dict[str, Any] | None] = {}

    def of_own_prompt(row: Mapping[str, Any]) -> float | None:
        verifier = verifiers.setdefault(row["prompt_id"], row["verifier"])
        return follows(verifier, row["text"]) if verified and records.derived_from(row["prompt_id"], PART) is not None else None

    own = answer_pool.read(constrained, of_own_prompt)
    made = {base: name for name in verifiers if (base := records.derived_from(name, PART)) is not None}

    def of_made_prompt(row: Mapping[str, Any]) -> float | None:
        name = made.get(row["prompt_id"])
        return follows(verifiers[name], row["text"]) if verified and name is not None else None

    others = answer_pool.read(relaxed, of_made_prompt)
    joined = [one._replace(prompt_id=made[one.prompt_id], relaxed=True) for one in others.facts if one.prompt_id in made]
    alone = len({one.prompt_id for one in others.facts if one.prompt_id not in made})
    return own.concat(replace(others, said=joined)), {"no prompt was made of it": alone} if alone else {}


def follows(verifier: Mapping[str, Any] | None, text: str) -> float | None:
    """What the verifier gives an answer; None where there is none, or it cannot say."""
    try:
        return None if verifier is None else verify(verifier, text).score
    except VerifierError:
        return None


def refuse(config: Pair, said: Sequence[AnswerFacts]) -> None:
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


def chosen(groups: Mapping[str, Sequence[AnswerFacts]], config: Pair) -> tuple[list[Preferred], dict[str, int]]:
    """(preferences, reason → prompts that gave none, or preferences that were left out)."""
    outcomes = [preferences(group, config) for group in groups.values()]
    drops = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    found = [one for outcome in outcomes if not isinstance(outcome, str) for one in outcome]
    if config.budget is None or len(found) <= config.budget.pairs:
        return found, dict(drops)
    kept = within(config.budget, found, config.seed)
    return kept, dict(drops) | {"over budget": len(found) - len(kept)}


def write(made: Sequence[Preferred], given: AnswerPool, job: Job) -> dict[str, Any]:
    """Writes the payload; returns the verdict of the expectations."""
    sizes = [one.ranked[0].asked + sum(said.length for said in one.ranked) for one in made]

    def rows(part: slice) -> Iterator[list[Preference]]:
        words = given.read(said for one in made[part] for said in one.ranked)
        for block in blocks(made[part], sizes[part]):
            read = words.rows(said for one in block for said in one.ranked)
            yield [preference(one, read) for one in block]

    return written(job, "preference", sizes, rows)


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


def truncated(said: Sequence[AnswerFacts], made: Sequence[Preferred]) -> dict[str, int]:
    """Answers that were cut off: among those read, those that a preference puts first, and those that it puts after another."""
    places = [(place, one.ended) for preferred in made for place, one in enumerate(preferred.said)]
    return {
        "read": sum(not one.ended for one in said),
        "best": sum(place == 0 and not ended for place, ended in places),
        "worse": sum(place > 0 and not ended for place, ended in places),
    }
