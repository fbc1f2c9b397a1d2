"""Ratings of answers by a language model: a policy that vLLM runs here, or an endpoint.

One question for each answer and rubric, the rubrics of one answer after each other: they share all but their ends, which caches of
prefixes know how to use. An endpoint is asked equal questions once, e.g. of two policies that answer alike.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from configs.frozen import digest
from configs.rating import EndpointJudge, PolicyJudge, Rating
from configs.rubrics import load_rubric
from data import records
from data.artifacts import Artifact, write_rows
from data.chat import Chat, ChatError
from data.records import AspectRating, Message
from stages.core.rating import parse_rating, question
from stages.engines.chunks import Ask, generate
from stages.engines.endpoint import ChatServer, NoReply, Reply, request_body
from stages.engines.replies import KeptReplies
from stages.engines.sampler import Ahead, EngineLost, Request, model_context, seed_of
from stages.job import Job, StageError

SHOWN_ANSWERS = 4


@dataclass(frozen=True)
class Ratings:
    """What a judge made of all answers."""

    by_answer: list[dict[str, AspectRating]]
    """Rubric → rating of each answer."""
    failures: list[dict[str, Any]]
    """Every rating that is missing, and why."""
    reported: dict[str, dict[str, int]]
    """What the endpoint said that it was: `model` and `fingerprint` → name → replies; empty for a policy."""


class Questions:
    """All questions, each made when it is asked for: together they are many times as long as the answers."""

    def __init__(self, rating: Rating, completions: Sequence[dict[str, Any]]) -> None:
        self.rating, self.completions = rating, completions
        self.rubrics = {name: load_rubric(name) for name in rating.rubrics}

    def __len__(self) -> int:
        return len(self.completions) * len(self.rubrics)

    def of(self, number: int) -> tuple[dict[str, Any], str]:
        """(answer, name of the rubric) that a question is about."""
        return self.completions[number // len(self.rubrics)], self.rating.rubrics[number % len(self.rubrics)]

    def messages(self, number: int) -> list[Message]:
        row, name = self.of(number)
        return question(row["messages"], row["text"], self.rubrics[name], ended=records.ended(row))

    def seed(self, number: int) -> int:
        row, name = self.of(number)
        return seed_of(self.rating.seed, "rating", row["id"], name)


def rate(
    rating: Rating, judge: Artifact | None, completions: Sequence[dict[str, Any]], job: Job, *, max_unanswered_share: float
) -> Ratings:
    """Asks for all ratings.

    Args:
        rating: who is asked what.
        judge: the policy, where one is asked.
        completions: the answers.
        job: the job.
        max_unanswered_share: with more answers without a reply the asking stops.

    Raises:
        StageError: an endpoint refuses too many requests, its key or its model; or vLLM cannot serve the policy.
        EngineLost: the judge is down; what it has said is kept for the next attempt.
    """
    questions = Questions(rating, completions)
    if isinstance(rating.by, PolicyJudge):
        assert judge is not None
        with Ahead(job.numerics) as ahead:
            replies = _of_policy(rating.by, judge, questions, job, ahead)
    else:
        replies = _of_endpoint(rating.by, questions, job, max_unanswered_share)
    shown = min(len(questions), SHOWN_ANSWERS * len(questions.rubrics))
    write_rows(job.evidence / "questions.jsonl", [_shown(questions, number, replies[number]) for number in range(shown)])
    return _read(questions, replies)


def _of_policy(by: PolicyJudge, judge: Artifact, questions: Questions, job: Job, ahead: Ahead) -> list[Reply | str]:
    chat, longest = Chat(judge.payload), model_context(judge.payload)
    sampling = questions.rating.sampling
    replies: list[Reply | str] = ["it was not asked"] * len(questions)
    requests: dict[int, Request] = {}
    for number in range(len(questions)):
        job.doing("tokenising", number, len(questions), "questions")
        try:
            ids = chat.prompt(questions.messages(number))
        except ChatError as error:  # e.g. the answer spells out a token that ends turns
            replies[number] = str(error)
            continue
        if len(ids) + sampling.max_tokens > longest:
            replies[number] = (
                f"the question has {len(ids)} tokens and its reply may have {sampling.max_tokens}, the judge's context is {longest}"
            )
        else:
            requests[number] = Request(ids, questions.seed(number))
    if requests:
        ask = Ask(judge, chat, list(requests.values()), sampling)
        answers = generate({"judge": ask}, chunk_size=by.chunk_size, dtype=by.dtype, job=job, ahead=ahead)["judge"]
        for number, answer in zip(requests, answers, strict=True):
            replies[number] = Reply(chat.decode(answer.response_ids), records.ended({"finish_reason": answer.finish_reason}))
    return replies


def _of_endpoint(by: EndpointJudge, questions: Questions, job: Job, max_unanswered_share: float) -> list[Reply | str]:
    server = ChatServer(by, job.placement)
    replies: list[Reply | str] = ["it was not asked"] * len(questions)
    keys: dict[int, str] = {}
    """Of the numbers that are being asked."""
    askers: dict[str, list[int]] = {}
    """Key → all numbers that wait for its outcome."""
    unanswered: dict[str, NoReply] = {}
    failed: set[str] = set()
    done = 0

    def settle(number: int, outcome: Reply | NoReply) -> None:
        nonlocal done
        if isinstance(outcome, Reply):
            replies[number] = outcome
        else:
            replies[number] = outcome.reason
            failed.add(questions.of(number)[0]["id"])
            if len(failed) > max_unanswered_share * len(questions.completions):
                raise _too_many(by, len(failed), len(questions.completions), max_unanswered_share, outcome)
        done += 1
        job.progress(done, len(questions))

    with KeptReplies(job) as kept:

        def unknown() -> Iterator[tuple[int, dict[str, Any]]]:
            """Each question once: a second reply to the same one could be another, and only one of them would be kept."""
            for number in range(len(questions)):
                body = request_body(questions.rating, questions.messages(number), questions.seed(number))
                key = digest([by.base_url, body])
                known = kept.get(key) or unanswered.get(key)
                if known is not None:
                    settle(number, known)
                elif key in askers:
                    askers[key].append(number)
                else:
                    keys[number], askers[key] = key, [number]
                    yield number, body

        def arrived(number: int, outcome: Reply | NoReply) -> None:
            key = keys.pop(number)
            if isinstance(outcome, Reply):
                kept.keep(key, outcome)
            else:
                unanswered[key] = outcome
            for one in askers.pop(key):
                settle(one, outcome)

        server.ask(unknown(), arrived, lambda: job.doing("waiting for the judge's endpoint"))
    return replies


def _too_many(by: EndpointJudge, failed: int, answers: int, share: float, last: NoReply) -> Exception:
    what = f"the judge at {by.base_url} gave no rating for {failed} of {answers} answers, more than {share:.0%}"
    if last.refused:
        return StageError(f"{what} (the last: {last.reason}): look at model, sampling and the prompts, or raise max_unscored_share")
    return EngineLost(f"lost engine: {what} (the last: {last.reason}); all answers that came are kept")


def _read(questions: Questions, replies: list[Reply | str]) -> Ratings:
    by_answer: list[dict[str, AspectRating]] = [{} for _ in questions.completions]
    failures: list[dict[str, Any]] = []
    reported: dict[str, Counter[str]] = {"model": Counter(), "fingerprint": Counter()}
    for number, reply in enumerate(replies):
        row, name = questions.of(number)
        found: int | str = reply if isinstance(reply, str) else parse_rating(reply.text, ended=reply.ended)
        if isinstance(found, str):
            failures.append({"id": row["id"], "judge": f"rating/{name}", "reason": found})
        text = None if isinstance(reply, str) else reply.text
        by_answer[number // len(questions.rubrics)][name] = {"rating": found if isinstance(found, int) else None, "text": text}
        if isinstance(reply, Reply):
            for what, value in (("model", reply.model), ("fingerprint", reply.fingerprint)):
                if value is not None:
                    reported[what][value] += 1
    return Ratings(by_answer, failures, {what: dict(sorted(names.items())) for what, names in reported.items() if names})


def _shown(questions: Questions, number: int, reply: Reply | str) -> dict[str, Any]:
    row, name = questions.of(number)
    said = {"failure": reply} if isinstance(reply, str) else {"reply": reply.text}
    return {"id": row["id"], "rubric": name, "question": questions.messages(number)[0]["content"], **said}
