"""Turn answers into preferences: compare some answers to each prompt, or rank all of them.

    payload/rows-*.parquet    preferences, in the order of prompt ids
    evidence/counts.json      prompts, preferences, and why prompts yielded none or preferences were dropped
    evidence/parents.parquet  the prompt of each preference
    evidence/validation.json

Truncated answers stay marked (`finish_reason: length`), so that training adds no end-of-turn token. Answers are joined by prompt id, so row
order and missing rows of other prompts do not affect pairs. Answers to relaxed prompts are joined to the constrained prompts derived from
them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from pedigree.configs.judging.pairing import Delta, Pair, Relaxed
from pedigree.data.artifacts.artifacts import Artifact, write_json
from pedigree.data.records import answer_pool, parents, records
from pedigree.data.records.answer_pool import AnswerFacts, AnswerPool
from pedigree.data.records.records import Answer, Preference
from pedigree.stages.core.added_constraints import PART
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job, only, only_or_none
from pedigree.stages.job.output_rows import written
from pedigree.stages.pair.pair_selection import Preferred, preferences, within
from pedigree.stages.verifiers import VerifierError, verify


def run(config: Pair, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Compare the answers to each prompt.

    Raises:
        StageError: fewer than `min_pairs` are left (the message counts the reasons), or the answers lack what the strategy needs.
        PedigreeError: an answer is there twice.
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
    sizes = [one.ranked[0].asked + sum(answer.length for answer in one.ranked) for one in made]
    verdict = written(job, "preference", made, sizes, given.read, lambda one: [answer.place for answer in one.ranked], preference)
    parents.write(job.evidence, ((one.id, [one.ranked[0].prompt_id]) for one in made))
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
        "mean_length": {"best": fmean(one.ranking[0].length for one in made), "worst": fmean(one.ranking[-1].length for one in made)},
        "validation": verdict,
    }


def read(config: Pair, inputs: Inputs, job: Job) -> tuple[AnswerPool, dict[str, int]]:
    """(all answers, keyed by the prompt for which they are compared; reason → relaxed prompts without a constrained one)."""
    with job.busy("reading rows"):
        if isinstance(config.strategy, Relaxed):
            return with_relaxed(only(inputs, "completions"), only(inputs, "relaxed"), config.strategy.verified)
        judged = only_or_none(inputs, "judgments")
        return answer_pool.read(judged or only(inputs, "completions"), config.by if judged else None), {}


def with_relaxed(constrained: Artifact, relaxed: Artifact, verified: bool) -> tuple[AnswerPool, dict[str, int]]:
    """Join answers to constrained prompts with answers to the original prompts, each valued by the verifier of the constrained prompt if
    `verified`, else without a value."""
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
    return own.concat(replace(others, facts=joined)), {"no prompt was made of it": alone} if alone else {}


def follows(verifier: Mapping[str, Any] | None, text: str) -> float | None:
    """The verifier's score of an answer; None without a verifier, or if it fails."""
    try:
        return None if verifier is None else verify(verifier, text).score
    except VerifierError:
        return None


def refuse(config: Pair, answers: Sequence[AnswerFacts]) -> None:
    """Check that the answers have what the config requires.

    Raises:
        StageError: a named policy has no answers, or there is no ensemble for `disagreement`.
    """
    if isinstance(config.strategy, Delta):
        policies = sorted({one.policy for one in answers})
        for field, policy in (("strong", config.strategy.strong), ("weak", config.strategy.weak)):
            if policy not in policies:
                raise StageError(f"strategy.{field} is {policy!r}, but the completions are from {', '.join(policies)}: use one of them")
    if config.budget is not None and config.budget.choose == "disagreement":
        members = max((len(one.rewards) for one in answers), default=0)
        if members < 2:
            raise StageError(
                f"budget.choose disagreement requires two or more reward models, and the judgments have {members}: add reward_models to "
                "the `judge` stage, or choose by smallest_gap"
            )


def chosen(groups: Mapping[str, Sequence[AnswerFacts]], config: Pair) -> tuple[list[Preferred], dict[str, int]]:
    """(preferences, reason → prompts that yielded none, or preferences that were dropped)."""
    outcomes = [preferences(group, config) for group in groups.values()]
    drops = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    found = [one for outcome in outcomes if not isinstance(outcome, str) for one in outcome]
    if config.budget is None or len(found) <= config.budget.pairs:
        return found, dict(drops)
    kept = within(config.budget, found, config.seed)
    return kept, dict(drops) | {"over budget": len(found) - len(kept)}


def preference(one: Preferred, rows: Mapping[int, Mapping[str, Any]]) -> Preference:
    """A preference with its texts; `rows` are its answers' rows, by place."""
    first = rows[one.ranked[0].place]
    sides = zip(one.ranking, one.ranked, strict=True)
    return {
        "id": one.id,
        "source": first["source"],
        "messages": first["messages"],
        "answers": [answer_of(judged.value, rows[shown.place], rows[judged.place]) for shown, judged in sides],
        "strength": one.strength,
        **records.context_of(first),
    }


def answer_of(value: float | None, shown: Mapping[str, Any], judged: Mapping[str, Any]) -> Answer:
    """The answer with the text of the row `shown` and the verdict of the row `judged`: another row if label noise exchanged the two."""
    return {
        "text": shown["text"],
        "score": value,
        "finish_reason": shown["finish_reason"],
        "win_rate": judged.get("win_rate"),
        "policy": shown["policy"],
        "policy_content": shown["policy_content"],
        "on_policy": shown["on_policy"],
    }


def on_policy_shares(made: Sequence[Preferred]) -> dict[str, float]:
    """Shares of the preferences with an on-policy answer at all, as the best, and among the worse."""
    places = [[answer.on_policy for answer in one.ranking] for one in made]
    counts = {"any": sum(map(any, places)), "best": sum(found[0] for found in places), "worse": sum(any(found[1:]) for found in places)}
    return {name: count / len(made) for name, count in counts.items()}


def truncated(answers: Sequence[AnswerFacts], made: Sequence[Preferred]) -> dict[str, int]:
    """Truncated answers among those read, those ranked best, and those ranked worse."""
    places = [(place, one.ended) for preferred in made for place, one in enumerate(preferred.ranking)]
    return {
        "read": sum(not one.ended for one in answers),
        "best": sum(place == 0 and not ended for place, ended in places),
        "worse": sum(place > 0 and not ended for place, ended in places),
    }
