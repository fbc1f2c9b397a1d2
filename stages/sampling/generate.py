"""Answers of several policies, or likelihoods of given texts: requests → engines → log → answers in the order of the requests.

in chunks       An idle engine gets a fixed, ordered list of requests. A chunk's answers depend on nothing else and are kept together: a
                resumed job repeats interrupted chunks from their beginning, with equal bits.
continuously    Each engine gets all of its requests, runs as many as fit into its KV cache, and starts another whenever one finishes, so
                that no request waits for the longest answer of a chunk. Each answer is kept as it arrives. Rounding depends on which
                requests run together: results are bitwise reproducible without interruptions and with engines of the same number and
                size; a resumed run batches the remaining requests differently, may sample different tokens, and is marked.
"""

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pedigree.configs.base.frozen import digest
from pedigree.configs.methods.training import Sampling
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.records.sequences import Mapped
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import AnswerLog, keys_of
from pedigree.stages.sampling.conversations import Transcript, begun, converse
from pedigree.stages.sampling.engines import WarmEngines, dealt, open_engines, side_by_side
from pedigree.stages.sampling.sampler import (
    Arrived,
    Beat,
    Child,
    Continuation,
    Generation,
    Request,
    Sampler,
    architecture,
    engine_settings,
    model_context,
    request_key,
    seed_of,
)
from pedigree.stages.verifiers.environments import Environments

CONTEXT_STEP = 128
"""The engine's context is a multiple of this, or the model's own."""
ChunkSize = int | Literal["continuous"]

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Ask:
    """Requests to one policy with common sampling."""

    policy: Artifact
    chat: Chat
    requests: Sequence[Request]
    sampling: Sampling

    @property
    def longest(self) -> int:
        """Maximum tokens of a request with its answer."""
        return max(len(request.prompt_ids) for request in self.requests) + self.sampling.max_tokens

    def run(self, sampler: Sampler, requests: Sequence[Any], beat: Beat) -> list[Any]:
        """Answers to one chunk, as JSON."""
        return [answer.as_json() for answer in sampler.generate(requests, self.sampling, [self.chat.eos_id], beat)]

    def stream(self, sampler: Sampler, requests: Sequence[Any], arrived: Arrived, beat: Beat) -> None:
        sampler.stream(requests, self.sampling, [self.chat.eos_id], arrived, beat)

    def read(self, kept: Any) -> Any:
        return Generation(**kept)

    def settings(self) -> dict[str, Any]:
        """Everything besides requests and weights that determines the answers."""
        return {"sampling": self.sampling.model_dump(), "stop": self.chat.eos_id}


@dataclass(frozen=True, kw_only=True)
class Opening(Request):
    """The beginning of a conversation with an environment."""

    prompt: Mapping[str, Any]
    environment_seed: int


@dataclass(frozen=True)
class Episodes(Ask):
    """Conversations of one policy with an environment, in chunks. The requests are `Opening`s.

    Each turn of a chunk's conversations is an ordered list of requests of its own, so that they depend on nothing but the chunk.
    """

    environments: Environments

    @cached_property
    def longest_prompt(self) -> int:
        return max(len(request.prompt_ids) for request in self.requests)

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.environments.config.longest_answer(self.sampling.max_tokens, lengthens=True)

    def run(self, sampler: Sampler, requests: Sequence[Any], beat: Beat) -> list[Any]:
        openings: list[Opening] = list(requests)
        chat = deepcopy(self.chat)  # threads of several engines would change the settings of a common tokenizer under each other
        over: list[int] = []

        def waiting() -> None:
            beat(len(over))

        def seed(place: int, turn: int) -> int:
            return seed_of(openings[place].seed, turn) if turn else openings[place].seed

        def ask(asked: list[Request], arrived: Arrived) -> None:
            sampler.stream(asked, self.sampling, [chat.eos_id], arrived, lambda _: waiting(), chunk=True)

        most = self.environments.config.max_observation
        bound = f"the longest prompt's {self.longest_prompt} + max_observation {most}"
        starts = ((one.prompt, one.prompt_ids, one.environment_seed) for one in openings)
        talks = begun(self.environments, starts, chat, self.longest_prompt + most, bound, waiting)
        for talk, one in zip(talks, openings, strict=True):
            talk.temperature = one.temperature
        converse(talks, self.environments, chat, seed, ask, over.append, waiting)
        return [vars(talk.transcript) for talk in talks]

    def read(self, kept: Any) -> Any:
        return Transcript(**kept)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "environment": self.environments.identity()}


@dataclass(frozen=True)
class Score:
    """Texts to be scored by likelihood under one policy, in chunks."""

    policy: Artifact
    requests: Sequence[Continuation]

    @property
    def longest(self) -> int:
        return max(len(one.prompt_ids) + len(one.response_ids) for one in self.requests) + 1

    def run(self, sampler: Sampler, requests: Sequence[Any], beat: Beat) -> list[Any]:
        return sampler.score(requests, beat)

    def read(self, kept: Any) -> Any:
        return kept

    def settings(self) -> dict[str, Any]:
        return {"likelihood": True}


class Batch(NamedTuple, Generic[K]):
    """Requests that an engine gets together: a chunk, or its share of a policy's requests."""

    labels: list[K]
    """The label of the requests, and those of equal chunks."""
    places: Sequence[int]


class Step(NamedTuple, Generic[K]):
    """What an engine's thread reports of a batch."""

    engine: int
    batch: Batch[K]
    answers: Mapping[str, Any] = {}
    """New answers by key."""
    unfinished: int = 0
    """Answers of a chunk that are there, but not reported yet."""
    ended: bool = False
    doing: str = ""
    """What the engine does before it answers."""


def generate(
    asks: Mapping[K, Ask | Score],
    *,
    chunk_size: ChunkSize,
    dtype: str,
    job: Job,
    ahead: WarmEngines,
    arrived: Callable[[K, Sequence[Any]], None] = lambda label, answers: None,
) -> dict[K, Sequence[Any]]:
    """Label → answers, in the order of its requests: `Generation`s, `Transcript`s of `Episodes`, or the log-probabilities of each token.
    They are read on demand from the job's folder.

    Policies of the same architecture share engines, whose weights are replaced. Labels of the same policy must be adjacent, so that its
    weights are loaded once. `arrived` is called with the answers of a label as soon as they are complete.

    Raises:
        StageError: a prompt with its answer is longer than the policy's context, or than a KV cache.
        EngineLost: an engine died or stopped responding; finished chunks, or answers, are kept for the next attempt.
    """
    keys: dict[K, list[str]] = {}
    with job.busy("preparing requests"):
        families = [(labels, context_of({label: asks[label] for label in labels})) for labels in by_architecture(asks)]
        for labels, context in families:
            keys |= {label: request_keys(asks[label], chunk_size, dtype, context, job) for label in labels}
    ahead.expect(len(families) * job.placement.engines)
    answers: dict[K, Sequence[Any]] = {label: [] for label in asks}
    kept, total, unfinished = 0, sum(map(len, keys.values())), dict[int, int]()
    with AnswerLog(job) as log:
        known = sum(key in log for own in keys.values() for key in own)
        if known and chunk_size == "continuous":
            before = f"{known} of {total} answers are those of interrupted attempts"
            job.marks.append(f"{before}: what is asked after an interruption runs in other company, and may round otherwise")

        def complete(label: K) -> None:
            answers[label] = Mapped(keys[label], lambda key: asks[label].read(log[key]))
            arrived(label, answers[label])

        for labels, context in families:
            with job.busy("preparing requests"):
                own = {label: keys[label] for label in labels}
                engines = job.placement.engines
                queues = shares(asks, own, log, engines) if chunk_size == "continuous" else [chunks(own, log, chunk_size)]
            batches = [batch for queue in queues for batch in queue]
            left = Counter(label for batch in batches for label in batch.labels)
            kept += sum(map(len, own.values())) - sum(len(batch.places) * len(batch.labels) for batch in batches)
            job.progress(kept, total)
            for label in labels:
                if not left[label]:
                    complete(label)
            with closing(_answered(queues, asks, keys, chunk_size, dtype, context, job, ahead)) as steps:
                for step in steps:
                    if step.doing:
                        job.doing(step.doing)
                        continue
                    if step.answers:
                        log.keep(step.answers)
                    kept += len(step.answers) * len(step.batch.labels)
                    unfinished[step.engine] = step.unfinished
                    job.progress(kept + sum(unfinished.values()), total)
                    for label in step.batch.labels if step.ended else ():
                        left[label] -= 1
                        if not left[label]:
                            complete(label)
    return answers


def chunks(keys: Mapping[K, list[str]], log: AnswerLog, size: int) -> list[Batch[K]]:
    """Unanswered chunks; a label with equal weights shares those of another one."""
    found: dict[str, Batch[K]] = {}
    for label, own in keys.items():
        for start in range(0, len(own), size):
            places = range(start, min(start + size, len(own)))
            if not all(own[place] in log for place in places):
                found.setdefault(own[start], Batch([], places)).labels.append(label)
    return list(found.values())


def shares(asks: Mapping[K, Ask | Score], keys: Mapping[K, list[str]], log: AnswerLog, engines: int) -> list[list[Batch[K]]]:
    """For each engine its share of each policy's unanswered requests, equal ones once; engines without work are omitted."""
    found: list[list[Batch[K]]] = [[] for _ in range(engines)]
    for label, own in keys.items():
        missing = {key: place for place, key in enumerate(own) if key not in log}
        for share, part in zip(found, dealt(missing.values(), asks[label].requests, engines), strict=True):
            share.extend([Batch([label], part)] if part else [])
    return [share for share in found if share]


def _answered(
    queues: Sequence[Sequence[Batch[K]]],
    asks: Mapping[K, Ask | Score],
    keys: Mapping[K, list[str]],
    chunk_size: ChunkSize,
    dtype: str,
    context: int,
    job: Job,
    ahead: WarmEngines,
) -> Generator[Step[K], None, None]:
    """What engines report while they answer all batches: those of a queue each, or the next of a common one."""
    if not any(queues):
        return
    first = asks[queues[0][0].labels[0]].policy
    settings = engine_settings(first.payload, dtype=dtype, context=context, numerics=job.numerics, placement=job.placement)
    waiting = [iter(queue) for queue in queues]

    def work(number: int, engine: Child, report: Callable[[Step[K]], None]) -> None:
        loaded = first
        for batch in waiting[number % len(waiting)]:
            ask, step = asks[batch.labels[0]], partial(Step, number, batch)
            requests = Mapped(batch.places, ask.requests.__getitem__)
            names = Mapped(batch.places, keys[batch.labels[0]].__getitem__)
            if ask.policy.record.content != loaded.record.content:
                report(step(doing="loading weights"))
                engine.load(ask.policy.payload)
                loaded = ask.policy
            if isinstance(ask, Ask) and chunk_size == "continuous":
                ask.stream(
                    engine,
                    requests,
                    lambda place, answer, names=names, step=step: report(step({names[place]: answer.as_json()})),
                    lambda _, step=step: report(step()),
                )
                report(step(ended=True))
            else:
                answers = ask.run(engine, requests, lambda count, step=step: report(step(unfinished=count)))
                report(step(dict(zip(names, answers, strict=True)), ended=True))

    job.doing("starting vLLM")
    count = len(queues) if chunk_size == "continuous" else min(job.placement.engines, len(queues[0]))
    with open_engines(settings, count, ahead) as engines:
        yield from side_by_side(engines, work)


def request_keys(ask: Ask | Score, chunk_size: ChunkSize, dtype: str, context: int, job: Job) -> list[str]:
    """A key per request. Equal keys mean equal bits of answers in chunks, and the same distribution and seed of continuous ones."""
    decides = {
        "weights": ask.policy.record.content,
        **ask.settings(),
        "dtype": dtype,
        "context": context,
        "numerics": job.numerics.deciding(),
    }
    if chunk_size == "continuous":
        common = digest(decides)
        return [digest([common, request_key(request)])[:32] for request in ask.requests]
    starts = range(0, len(ask.requests), chunk_size)
    chunks = ([request_key(one) for one in ask.requests[start : start + chunk_size]] for start in starts)
    return [key for chunk in chunks for key in keys_of({**decides, "requests": chunk}, len(chunk))]


def by_architecture(asks: Mapping[K, Ask | Score]) -> list[list[K]]:
    """Labels grouped by architecture, in order of first appearance."""
    families: dict[str, list[K]] = {}
    for label, ask in asks.items():
        families.setdefault(digest(architecture(ask.policy.payload)), []).append(label)
    return list(families.values())


def context_of(asks: Mapping[K, Ask | Score]) -> int:
    """Context required by the longest request to policies of one architecture, rounded up within the model's: a short context saves
    memory and startup time.

    Raises:
        StageError: the model's context is shorter.
    """
    longest = {label: ask.longest for label, ask in asks.items()}
    label = max(longest, key=longest.__getitem__)
    model = model_context(asks[label].policy.payload)
    if longest[label] > model:
        raise StageError(_too_long(label, asks[label], longest[label], model))
    return min(-(-longest[label] // CONTEXT_STEP) * CONTEXT_STEP, model)


def _too_long(label: Hashable, ask: Ask | Score, longest: int, model: int) -> str:
    name = " on ".join(map(str, label)) if isinstance(label, tuple) else label
    if isinstance(ask, Score):
        return (
            f"{name}: a choice with its prompt takes {longest - 1} tokens plus one, but the model's context is {model}: drop the "
            "item, use fewer worked examples, or use a model with a longer context"
        )
    if isinstance(ask, Episodes):
        config = ask.environments.config
        return (
            f"{name}: the longest prompt's {ask.longest_prompt} tokens + max_turns {config.max_turns} x (max_observation "
            f"{config.max_observation} + max_tokens {ask.sampling.max_tokens}) exceed the model's context of {model}: lower one of them"
        )
    answer, prompt = ask.sampling.max_tokens, longest - ask.sampling.max_tokens
    remedy = f"lower max_tokens to {model - prompt}, drop longer prompts" if prompt < model else "drop longer prompts"
    return (
        f"{name}: the longest prompt has {prompt} tokens and max_tokens is {answer}, but the model's context is {model}: "
        f"{remedy}, or use a model with a longer context"
    )
