"""The rewards of answers: by verifiers, functions of the project, models, votes, length and form. `configs.methods.reward_terms` has
formulas."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import regex

from pedigree.configs.methods.reward_terms import (
    Cosine,
    EnvironmentReward,
    Format,
    Length,
    Majority,
    ModelReward,
    Overlong,
    RatedReward,
    RepeatedNgrams,
    Reward,
    Term,
)
from pedigree.configs.methods.training import Rlvr
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.stages.job.job import Job
from pedigree.stages.rlvr.majority import Majorities
from pedigree.stages.rlvr.model_rewards import ModelRewards, RatedRewards
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.functions import opened
from pedigree.stages.sampling.policy_servers import PolicyServer, server_of
from pedigree.stages.verifiers.reward_programs import Answered, Value

SEARCH_SECONDS = 2.0
"""Time limit for a pattern, which may take forever."""
LARGEST = 1e15
"""Bound of |R|: fp32, in which advantages are computed, holds the sum of a hundred million of its squares."""


class Rewarded(NamedTuple):
    """The reward of an answer and its terms; NaN if unknown."""

    reward: float
    terms: dict[str, float | None]
    """Name → value without its weight; None where a function leaves the answer out."""
    cause: str
    """Why a term is unknown."""


class Rewarder(Protocol):
    """Computes the values of a term that needs processes, models or threads."""

    def values(self, groups: Sequence[Sequence[Answered]]) -> list[list[Value]]: ...

    def close(self) -> None: ...


class Rewards:
    """Computes rewards as configured; `rewarders` are by name of their term, and other terms are in `TERMS`."""

    def __init__(
        self, given: Reward, max_tokens: int, rewarders: Mapping[str, Rewarder], doing: Callable[[str], None] = lambda _: None
    ) -> None:
        """
        Args:
            doing: called with what is done, for each answer to which a pattern is applied.
        """
        self.given, self.max_tokens, self.rewarders, self._doing = given, max_tokens, rewarders, doing

    def of(self, answers: Sequence[Answered], samples: int) -> list[Rewarded]:
        """The rewards of whole groups, each of `samples` answers to one prompt."""
        groups = [answers[start : start + samples] for start in range(0, len(answers), samples)]
        terms = {term.called: self._values(term, groups) for term in self.given.terms}
        return [self._rewarded(answer, {name: values[place] for name, values in terms.items()}) for place, answer in enumerate(answers)]

    def models(self) -> dict[str, list[str]]:
        """Term → the models that rated so far; JSON, for the checkpoint."""
        return {name: sorted(one.models) for name, one in self.rewarders.items() if isinstance(one, RatedRewards)}

    def resume(self, models: Mapping[str, Sequence[str]]) -> None:
        """Continue after a checkpoint with these `models`."""
        for name, one in self.rewarders.items():
            if isinstance(one, RatedRewards):
                one.models |= {*models.get(name, ())}

    def _values(self, term: Term, groups: Sequence[Sequence[Answered]]) -> list[Value]:
        if term.called in self.rewarders:
            found = self.rewarders[term.called].values(groups)
        elif isinstance(term, Format):
            found = [matches(term, group, partial(self._doing, f"rewarding by {term.called}")) for group in groups]
        else:
            found = [TERMS[type(term)](term, group, self.max_tokens) for group in groups]
        for group, values in zip(groups, found, strict=True):
            for cause in dict.fromkeys(value for value in values if isinstance(value, str)):
                print(f"no {term.called} for {values.count(cause)} answers to {group[0].prompt['id']}: {cause}", flush=True)
        return [value for values in found for value in values]

    def _rewarded(self, answer: Answered, values: Mapping[str, Value]) -> Rewarded:
        terms = {name: math.nan if isinstance(value, str) else value for name, value in values.items()}
        cause = next((f"{name}: {value}" for name, value in values.items() if isinstance(value, str)), "")
        score = math.nan if answer.score is None else answer.score
        total = reward(score, answer.finish_reason, self.given, terms)
        if abs(total) > LARGEST:
            cause = f"the reward is {total:g}, beyond ±{LARGEST:g}: scale its terms down, or set reward.clip"
            print(f"no reward for an answer to {answer.prompt['id']}: {cause}", flush=True)
            total = math.nan
        return Rewarded(total, terms, cause)


@contextmanager
def open_rewards(
    config: Rlvr, prompts: Sequence[Mapping[str, Any]], models: Mapping[str, Artifact], servers: Mapping[str, PolicyServer], job: Job
) -> Iterator[Rewards | None]:
    """The rewards on rank 0, None elsewhere. Functions of the project and reward models run until the end of the block; `servers` has the
    policy that rates.

    Raises:
        PedigreeError: a function or a model cannot be used.
    """
    if job.rank != 0:
        yield None
        return
    with ExitStack() as stack:
        log = cache(lambda: stack.enter_context(AnswerLog(job)))
        functions = stack.enter_context(opened(config.reward.programs, (prompt["verifier"] for prompt in prompts), job))
        rewarders: dict[str, Rewarder] = {**functions}
        for term in config.reward.terms:
            if found := _opened(term, models, servers, job, log):
                stack.callback(found.close)
                rewarders[term.called] = found
            if config.asynchronous and isinstance(found, ModelRewards):
                found.load()
        yield Rewards(config.reward, config.sampling.max_tokens, rewarders, job.doing)


def _opened(
    term: Term, models: Mapping[str, Artifact], servers: Mapping[str, PolicyServer], job: Job, log: Callable[[], AnswerLog]
) -> Rewarder | None:
    match term:
        case ModelReward():
            return ModelRewards(term, models, job, log())
        case RatedReward():
            return RatedRewards(term, server_of(term.by, "judge", servers, job), job, log())
        case Majority():
            return Majorities(term, partial(job.doing, f"rewarding by {term.called}"))
        case _:
            return None


def reward(score: float, finish_reason: str, given: Reward, terms: Mapping[str, float | None] | None = None) -> float:
    """R of `configs.methods.reward_terms.Reward`; NaN if a part of it is unknown, or if there is none."""
    if given.truncated is not None and finish_reason == "length":
        return given.truncated
    parts = [given.right * score] if given.right else []
    for term in given.terms:
        value = (terms or {}).get(term.called)
        if term.weight and value is not None:
            parts.append(term.weight * value)
    total = sum(parts) if parts else math.nan
    if given.clip is None or math.isnan(total):
        return total
    low, high = given.clip
    return min(max(total, low), high)


def earned(term: EnvironmentReward, group: Sequence[Answered], max_tokens: int) -> list[Value]:
    return [answer.earned for answer in group]


def overlong(term: Overlong, group: Sequence[Answered], max_tokens: int) -> list[Value]:
    excess = (len(answer.ids) - (max_tokens - term.buffer) for answer in group)
    return [-min(max(tokens, 0), term.buffer) / term.buffer for tokens in excess]


def length(term: Length, group: Sequence[Answered], max_tokens: int) -> list[Value]:
    sizes = [len(answer.ids) for answer in group]
    least, span = min(sizes), max(sizes) - min(sizes)

    def value(score: float, size: int) -> float:
        share = 0.5 - (size - least) / span if span else 0.0
        return share if score >= 1 else min(0.0, share)

    return [_by_score(value, answer) for answer in group]


def cosine(term: Cosine, group: Sequence[Answered], max_tokens: int) -> list[Value]:
    def value(score: float, size: int) -> float:
        if size >= max_tokens and term.exceeded is not None:
            return term.exceeded
        short, long = (term.right_short, term.right_long) if score >= 1 else (term.wrong_short, term.wrong_long)
        return long + 0.5 * (short - long) * (1 + math.cos(math.pi * min(size / max_tokens, 1.0)))

    return [_by_score(value, answer) for answer in group]


def repetition(term: RepeatedNgrams, group: Sequence[Answered], max_tokens: int) -> list[Value]:
    def value(ids: Sequence[int]) -> float:
        ngrams = [*zip(*(ids[start:] for start in range(term.ngram)), strict=False)]
        return len({*ngrams}) / len(ngrams) - 1 if ngrams else 0.0

    return [value(answer.ids) for answer in group]


def matches(term: Format, group: Sequence[Answered], beat: Callable[[], None]) -> list[Value]:
    def value(text: str) -> Value:
        beat()
        try:
            found = regex.match(term.pattern, text, flags=regex.DOTALL | regex.MULTILINE, timeout=SEARCH_SECONDS)
        except TimeoutError:
            return f"the pattern {term.pattern!r} took more than {SEARCH_SECONDS:g} s on an answer of {len(text)} characters"
        return float(found is not None)

    return [value(answer.text) for answer in group]


def _by_score(value: Callable[[float, int], float], answer: Answered) -> Value:
    return "the verifier's score is unknown" if answer.score is None else value(answer.score, len(answer.ids))


TERMS: dict[type[Term], Callable[[Any, Sequence[Answered], int], list[Value]]] = {
    EnvironmentReward: earned,
    Overlong: overlong,
    Length: length,
    Cosine: cosine,
    RepeatedNgrams: repetition,
}
