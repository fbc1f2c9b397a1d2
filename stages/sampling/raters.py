"""Rate answers with a language model: a policy in a local vLLM engine, or an endpoint.

One question per answer and rubric. The questions of an answer are consecutive and differ only at their ends, so prefix caches apply.
Identical answers of two policies are rated once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pedigree.configs.methods.rubrics import Rating, rubrics_of
from pedigree.configs.methods.training import Sampling
from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.records import records
from pedigree.data.records.records import AspectRating, Message
from pedigree.stages.core.rating import parse_rating, question
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.asking import Bound, ask, mark_models, reported
from pedigree.stages.sampling.endpoint import Reply
from pedigree.stages.sampling.sampler import seed_of

SHOWN_ANSWERS = 4


@dataclass(frozen=True)
class Ratings:
    """A judge's ratings of all answers."""

    by_answer: list[dict[str, AspectRating]]
    """For each answer, rubric → rating."""
    failures: list[dict[str, Any]]
    """Every missing rating, and why."""
    reported: dict[str, dict[str, int]]
    """The models that the endpoint reported, see `stages.sampling.asking.reported`."""

    def metrics(self) -> dict[str, Any]:
        """Rubric → mean rating, count of each rating, and number of unrated answers; and the models that an endpoint reported."""
        found = {}
        for name in self.by_answer[0]:
            given = [ratings[name]["rating"] for ratings in self.by_answer]
            known = [rating for rating in given if rating is not None]
            counts = {str(rating): count for rating, count in sorted(Counter(known).items())}
            found[name] = {"mean": fmean(known) if known else None, "counts": counts, "unrated": len(given) - len(known)}
        return {"ratings": found, **({"reported": self.reported} if self.reported else {})}


class RatingQuestions:
    """One question per answer and rubric, built on demand: together they are much longer than the answers."""

    def __init__(self, rating: Rating, completions: Sequence[dict[str, Any]], files: Mapping[str, Path]) -> None:
        self.rating, self.completions = rating, completions
        try:
            self.rubrics = rubrics_of(rating.rubrics, files)
        except ValueError as error:
            raise StageError(str(error)) from error
        self.names = tuple(self.rubrics)

    @property
    def sampling(self) -> Sampling:
        return self.rating.sampling

    def __len__(self) -> int:
        return len(self.completions) * len(self.rubrics)

    def of(self, number: int) -> tuple[dict[str, Any], str]:
        """(answer, name of the rubric) of a question."""
        return self.completions[number // len(self.rubrics)], self.names[number % len(self.names)]

    def about(self, number: int) -> str:
        return self.of(number)[0]["id"]

    def messages(self, number: int) -> list[Message]:
        row, name = self.of(number)
        return question(row["messages"], row["text"], self.rubrics[name], ended=records.ended(row))

    def seed(self, number: int) -> int:
        row, name = self.of(number)
        return seed_of(self.rating.seed, "rating", row["id"], name)


def rate(
    rating: Rating, judge: Artifact | None, completions: Sequence[dict[str, Any]], job: Job, *, max_unanswered_share: float
) -> Ratings:
    """Rate all answers.

    Raises:
        StageError: an endpoint rejects too many requests, its key or its model; or vLLM cannot serve the policy.
        EngineLost: the judge is down; its replies are kept for the next attempt.
    """
    questions = RatingQuestions(rating, completions, job.source_files)
    bound = Bound(max_unanswered_share, len(completions), "no rating for {} of {} answers", "max_unscored_share")
    replies = ask(rating.by, judge, questions, job, bound)
    write_rows(job.evidence / "questions.jsonl", some_of(questions, replies))
    mark_models("rated", replies, job)
    return ratings_of(questions, replies)


def some_of(questions: RatingQuestions, replies: list[Reply | str]) -> list[dict[str, Any]]:
    """The questions about the first answers, with their replies, for human readers."""
    count = min(len(questions), SHOWN_ANSWERS * len(questions.rubrics))
    return [_shown(questions, number, replies[number]) for number in range(count)]


def ratings_of(questions: RatingQuestions, replies: list[Reply | str]) -> Ratings:
    by_answer: list[dict[str, AspectRating]] = [{} for _ in range(len(questions.completions))]
    failures: list[dict[str, Any]] = []
    for number, reply in enumerate(replies):
        row, name = questions.of(number)
        found: int | str = reply if isinstance(reply, str) else parse_rating(reply.text, ended=reply.ended)
        if isinstance(found, str):
            failures.append({"id": row["id"], "judge": f"rating/{name}", "reason": found})
        rating = found if isinstance(found, int) else None
        by_answer[number // len(questions.rubrics)][name] = {"rating": rating, "text": None if isinstance(reply, str) else reply.text}
    return Ratings(by_answer, failures, reported(replies))


def _shown(questions: RatingQuestions, number: int, reply: Reply | str) -> dict[str, Any]:
    row, name = questions.of(number)
    outcome = {"failure": reply} if isinstance(reply, str) else {"reply": reply.text}
    return {"id": row["id"], "rubric": name, "question": questions.messages(number)[0]["content"], **outcome}
