"""Rewards by models: reward models in torch, and a language model. Formulas and functions are those of `judge`.

Values and replies are in the job's log, so a resumed run computes and requests nothing twice.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from pedigree.configs.methods.reward_terms import ModelReward, RatedReward
from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.records import records
from pedigree.stages.core.ensembles import Member, combine, of_all
from pedigree.stages.core.rating import mean_rating
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.asking import Bound, Server, ask_server, mark_models
from pedigree.stages.sampling.endpoint import Reply
from pedigree.stages.sampling.frozen_copies import copies_of
from pedigree.stages.sampling.raters import RatingQuestions, ratings_of, some_of
from pedigree.stages.sampling.rewards import FrozenRewardModel, RawReward, part_of, reward_statistics
from pedigree.stages.training import kernels
from pedigree.stages.verifiers.reward_programs import Answered, Value


def rows_of(group: Sequence[Answered]) -> list[dict[str, Any]]:
    """The answers to a prompt as rows for judges."""
    return [
        {
            "id": f"{answer.prompt['id']}/{place}",
            "messages": answer.prompt["messages"],
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            **records.context_of(answer.prompt),
        }
        for place, answer in enumerate(group)
    ]


def in_groups(values: Sequence[Value], groups: Sequence[Sequence[Answered]]) -> list[list[Value]]:
    rest = iter(values)
    return [[next(rest) for _ in group] for group in groups]


class ModelRewards:
    """A term's rewards by reward models. On GPUs a model has device memory only while it scores.

    Answers to a prompt pass through a model together, so that their rewards do not depend on the batch in which they arrive.

    Raises:
        StageError: a model's statistics are missing.
    """

    def __init__(self, term: ModelReward, models: Mapping[str, Artifact], job: Job, log: AnswerLog) -> None:
        self._term, self._job, self._log = term, job, log
        self._models = {label: models[label] for label in term.models or models}
        for model in self._models.values():
            kernels.refuse(model.payload, job.numerics)
        self._statistics = [reward_statistics(model.payload) for model in self._models.values()]
        self._opened = ExitStack()
        self._copies = [
            self._opened.enter_context(closing(copies_of(partial(FrozenRewardModel, model.payload, term.dtype), job)))
            for model in self._models.values()
        ]

    def load(self) -> None:
        """Load the models now: loading changes torch's default dtype, which other threads would see."""
        for copies in self._copies:
            copies.load()

    def values(self, groups: Sequence[Sequence[Answered]]) -> list[list[Value]]:
        raw = [self._raw(number, groups) for number in range(len(self._models))]
        members = [Member([one.value for one in own], *known) for own, known in zip(raw, self._statistics, strict=True)]
        values: list[Value] = []
        for place in range(len(raw[0])):
            rewards = of_all(members, place)
            unscored = [f"{label}: {own[place].reason}" for label, own in zip(self._models, raw, strict=True) if own[place].reason]
            values.append(unscored[0] if rewards is None else combine(rewards, self._term.ensemble))
        return in_groups(values, groups)

    def _raw(self, number: int, groups: Sequence[Sequence[Answered]]) -> list[RawReward]:
        model, total = [*self._models.values()][number], sum(map(len, groups))
        parts = (part_of(model, rows_of(group), self._term.dtype, self._job) for group in groups)

        def progress(done: int) -> None:
            self._job.doing(f"rewarding by {self._term.called}", done, total, "answers")

        found = [RawReward(*one) for values in self._copies[number].values(parts, self._log, progress) for one in values]
        self._copies[number].rest()
        return found

    def close(self) -> None:
        self._opened.close()


class RatedRewards:
    """A term's ratings by a language model."""

    def __init__(self, term: RatedReward, server: Server, job: Job, log: AnswerLog) -> None:
        self._term, self._server, self._job, self._log = term, server, job, log
        self.models = set[str]()
        """Names that the endpoint reported so far, also to earlier attempts."""

    def values(self, groups: Sequence[Sequence[Answered]]) -> list[list[Value]]:
        term, job = self._term, self._job
        questions = RatingQuestions(term, [row for group in groups for row in rows_of(group)], job.source_files)
        bound = Bound(term.max_unanswered_share, len(questions.completions), "no rating for {} of {} answers", "max_unanswered_share")
        progress: Callable[[int, int], None] = partial(job.doing, f"rewarding by {term.called}", unit="questions")
        replies = ask_server(self._server, questions, job, bound, self._log, progress)
        if not (shown := job.evidence / f"questions_{term.called}.jsonl").exists():
            write_rows(shown, some_of(questions, replies))
        self.models |= {reply.model for reply in replies if isinstance(reply, Reply) and reply.model is not None}
        found = ratings_of(questions, replies)
        causes = {failure["id"]: f"{failure['judge']}: {failure['reason']}" for failure in reversed(found.failures)}
        values: list[Value] = []
        for row, ratings in zip(questions.completions, found.by_answer, strict=True):
            rating = mean_rating(one["rating"] for one in ratings.values())
            values.append(causes[row["id"]] if rating is None else rating)
        return in_groups(values, groups)

    def close(self) -> None:
        replies = [Reply("", True, name) for name in self.models]
        mark_models(f"rewarded ({self._term.called})", replies, self._job)
