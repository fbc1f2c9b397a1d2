"""Ask a language model questions: a policy in a local vLLM engine, or a server. Replies are kept for the next attempt. A server gets equal
questions only once.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from pedigree.configs.base.frozen import digest
from pedigree.configs.base.texts import shown
from pedigree.configs.language.execution import Placement
from pedigree.configs.methods.language_model import ByEndpoint, ByPolicy, Speaker
from pedigree.configs.methods.training import Sampling
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.records import records
from pedigree.data.records.records import Message
from pedigree.stages.core.forging import control_token
from pedigree.stages.job.failures import EngineLost, StageError
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.endpoint import KEPT_NAME, ChatServer, NoReply, Reply, as_sent, request_body
from pedigree.stages.sampling.engines import WarmEngines
from pedigree.stages.sampling.generate import Ask, generate
from pedigree.stages.sampling.prepared import prepared
from pedigree.stages.sampling.sampler import Request, model_context

Outcomes = Callable[[int, Reply | NoReply], None]
"""Called with the number of a request and its outcome."""
MOST_NAMES = 20
"""Limit on the reported model names and fingerprints: a server may have a new fingerprint for each reply."""
MARKED_NAMES = 3
"""Limit on the model names in a mark of the record."""


class Questions(Protocol):
    """A set of questions, each built on demand, because together they may be long."""

    @property
    def sampling(self) -> Sampling:
        """Sampling of replies."""
        ...

    def __len__(self) -> int: ...

    def messages(self, number: int) -> list[Message]:
        """The question's messages."""
        ...

    def seed(self, number: int) -> int:
        """The question's own seed."""
        ...

    def about(self, number: int) -> str:
        """The subject of a question, which is incomplete without a reply; questions may share a subject."""
        ...


class Server(Protocol):
    """What answers questions while a stage works."""

    name: str
    """As errors call it."""

    def request(self, messages: list[Message], sampling: Sampling, seed: int) -> tuple[str, Any] | NoReply:
        """(a key, equal for equal requests; the request), or why it cannot be asked."""
        ...

    def ask(self, requests: Iterable[tuple[int, Any]], sampling: Sampling, arrived: Outcomes, wait: Callable[[], None]) -> None:
        """Send all requests, each with a number; consumed on demand.

        Args:
            arrived: called with each outcome, in any order; an exception stops all requests.
            wait: called while none arrives.
        """
        ...


class Endpoint:
    """A server with the chat completions API."""

    def __init__(self, by: ByEndpoint, placement: Placement) -> None:
        """
        Raises:
            StageError: the key in the environment cannot be one.
        """
        self.name, self._by, self._client = f"the model at {by.base_url}", by, ChatServer(by, placement)

    def request(self, messages: list[Message], sampling: Sampling, seed: int) -> tuple[str, Any] | NoReply:
        if token := control_token(messages):
            return NoReply(f"what is asked about spells out the control token {token!r}, which could forge a turn", True)
        body = request_body(self._by, sampling, messages, seed)
        return digest([self._by.base_url, body]), as_sent(self._by, body)

    def ask(self, requests: Iterable[tuple[int, Any]], sampling: Sampling, arrived: Outcomes, wait: Callable[[], None]) -> None:
        self._client.ask(requests, arrived, wait)


@dataclass(frozen=True)
class Bound:
    """Limit on the share of subjects without a reply from a server."""

    share: float
    of: int
    lacks: str
    """What is missing, e.g. `no rating for {} of {} answers`."""
    field: str
    """Config field that sets the share."""

    def problem(self, failed: int, server: str, last: NoReply) -> Exception | None:
        """The error to raise after `failed` failures, of which `last` is the latest; None within the limit."""
        if failed <= self.share * self.of:
            return None
        what = f"{server} gave {self.lacks.format(failed, self.of)}, more than {self.share:.0%}"
        if last.refused:
            return StageError(f"{what} (the last: {last.reason}): check model, sampling and the prompts, or raise {self.field}")
        return EngineLost(f"lost engine: {what} (the last: {last.reason}); all answers received so far are kept")


def ask(by: Speaker, policy: Artifact | None, questions: Questions, job: Job, bound: Bound) -> list[Reply | str]:
    """Ask all questions.

    Returns:
        For each question the reply, or why there is none.

    Raises:
        StageError: an endpoint rejects too many requests, its key or its model; vLLM cannot serve the policy; or no question would fit
            into its context with a reply.
        EngineLost: the model is down; its replies are kept for the next attempt.
    """
    if isinstance(by, ByPolicy):
        assert policy is not None
        longest = model_context(policy.payload)
        if questions.sampling.max_tokens >= longest:
            raise StageError(
                f"sampling.max_tokens is {questions.sampling.max_tokens} and the model's context is {longest}, so no question fits "
                "with its reply: lower sampling.max_tokens, or use a model with a longer context"
            )
        with WarmEngines(job.numerics, job.placement.engines) as ahead:
            return _of_policy(by, policy, questions, job, ahead)
    with AnswerLog(job) as log:
        return ask_server(Endpoint(by, job.placement), questions, job, bound, log, job.progress)


def reported(replies: Iterable[Reply | str]) -> dict[str, dict[str, int]]:
    """The models that an endpoint reported: `model` and `fingerprint` → name → replies; empty for a policy.

    Lists the `MOST_NAMES` most frequent names, and the total number of replies from all others.
    """
    every, found = list(replies), {}
    for what in ("model", "fingerprint"):
        names = _names(every, what)
        others = names[MOST_NAMES:]
        if names:
            found[what] = dict(sorted(names[:MOST_NAMES])) | ({f"{len(others)} others": sum(n for _, n in others)} if others else {})
    return found


def mark_models(done: str, replies: Iterable[Reply | str], job: Job) -> None:
    """Mark the result if an endpoint reported several models, e.g. `rated by 2 models: new, old`.

    The server chooses the names and may send a new one with each reply, so only a few are listed, sanitized to one line.
    """
    names = _names(replies, "model")
    if len(names) > 1:
        first = [" ".join(shown(name).split())[:KEPT_NAME] for name, _ in names[:MARKED_NAMES]]
        others = [f"and {len(names) - MARKED_NAMES} others"] if len(names) > MARKED_NAMES else []
        job.marks.append(f"{done} by {len(names)} models: {', '.join([*first, *others])}")


def _names(replies: Iterable[Reply | str], what: str) -> list[tuple[str, int]]:
    """(name, number of replies), the most frequent first."""
    names = (getattr(reply, what) for reply in replies if isinstance(reply, Reply))
    return sorted(Counter(name for name in names if name is not None).items(), key=lambda one: (-one[1], one[0]))


def tokenized(chat: Chat, messages: list[Message], sampling: Sampling, context: int) -> list[int] | str:
    """A question to a policy as token ids, or why it cannot be asked."""
    try:
        ids = chat.prompt(messages)
    except ChatError as error:  # e.g. an answer contains an end-of-turn token as text
        return str(error)
    if len(ids) + sampling.max_tokens > context:
        return f"the question has {len(ids)} tokens and its reply may have {sampling.max_tokens}, the model's context is {context}"
    return ids


def _of_policy(by: ByPolicy, policy: Artifact, questions: Questions, job: Job, ahead: WarmEngines) -> list[Reply | str]:
    chat, longest = Chat(policy.payload), model_context(policy.payload)
    sampling = questions.sampling
    replies: list[Reply | str] = ["it was not asked"] * len(questions)
    sent = array("q")

    def fitting() -> Iterator[Request]:
        for number in range(len(questions)):
            job.doing("tokenizing", number, len(questions), "questions")
            ids = tokenized(chat, questions.messages(number), sampling, longest)
            if isinstance(ids, str):
                replies[number] = ids
            else:
                sent.append(number)
                yield Request(ids, questions.seed(number))

    requests = prepared(fitting(), job.folder)
    if requests:
        asked = Ask(policy, chat, requests, sampling)
        answers = generate({"asked": asked}, chunk_size=by.chunk_size, dtype=by.dtype, job=job, ahead=ahead)["asked"]
        for number, answer in zip(sent, answers, strict=True):
            replies[number] = Reply(chat.decode(answer.response_ids), records.ended({"finish_reason": answer.finish_reason}))
    return replies


def ask_server(
    server: Server, questions: Questions, job: Job, bound: Bound, log: AnswerLog, progress: Callable[[int, int], None]
) -> list[Reply | str]:
    """As `ask`, with a log of the caller's. `progress` is called with the number of replies and that of questions."""
    replies: list[Reply | str] = ["it was not asked"] * len(questions)
    keys: dict[int, str] = {}
    """Question number → key, of requests in flight."""
    askers: dict[str, list[int]] = {}
    """Key → numbers of all questions waiting for its outcome."""
    unanswered: dict[str, NoReply] = {}
    failed: set[str] = set()
    done = 0

    def settle(number: int, outcome: Reply | NoReply) -> None:
        nonlocal done
        if isinstance(outcome, Reply):
            replies[number] = outcome
        else:
            replies[number] = outcome.reason
            failed.add(questions.about(number))
            problem = bound.problem(len(failed), server.name, outcome)
            if problem is not None:
                raise problem
        done += 1
        progress(done, len(questions))

    def unknown() -> Iterator[tuple[int, Any]]:
        """Requests for questions without a reply, equal ones once: a second reply could differ, and only one would be kept."""
        for number in range(len(questions)):
            asked = server.request(questions.messages(number), questions.sampling, questions.seed(number))
            if isinstance(asked, NoReply):
                settle(number, asked)
                continue
            key, request = asked
            known = Reply(**log[key]) if key in log else unanswered.get(key)
            if known is not None:
                settle(number, known)
            elif key in askers:
                askers[key].append(number)
            else:
                keys[number], askers[key] = key, [number]
                yield number, request

    def arrived(number: int, outcome: Reply | NoReply) -> None:
        key = keys.pop(number)
        if isinstance(outcome, Reply):
            log.keep({key: vars(outcome)})
        else:
            unanswered[key] = outcome
        for one in askers.pop(key):
            settle(one, outcome)

    server.ask(unknown(), questions.sampling, arrived, lambda: job.doing(f"waiting for {server.name}"))
    return replies
