"""Answers of several policies, or likelihoods of given texts: requests → engines → log → answers in the order of the requests.

in chunks       An idle engine gets a fixed, ordered list of requests. A chunk's answers depend on nothing else and are kept together: a
                resumed job repeats interrupted chunks from their beginning, with equal bits.
continuously    Each engine gets all of its requests, runs as many as fit into its KV cache, and starts another whenever one finishes, so
                that no request waits for the longest answer of a chunk. Each answer is kept as it arrives. Rounding depends on which
                requests run together: results are bitwise reproducible without interruptions and with engines of the same number and
                size; a resumed run batches the remaining requests differently, may sample different tokens, and is marked.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Generic, Literal, TypeVar

from pedigree.configs.base.frozen import digest
from pedigree.configs.methods.training import Sampling
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.records.sequences import Mapped
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import AnswerLog, keys_of
from pedigree.stages.sampling.engines import Later, WarmEngines, open_engines, side_by_side
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
)

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
        return [vars(answer) for answer in sampler.generate(requests, self.sampling, [self.chat.eos_id], beat)]

    def stream(self, sampler: Sampler, requests: Sequence[Any], arrived: Arrived, beat: Beat) -> None:
        sampler.stream(requests, self.sampling, [self.chat.eos_id], arrived, beat)

    def read(self, kept: Any) -> Any:
        return Generation(**kept)

    def settings(self) -> dict[str, Any]:
        """Everything besides requests and weights that determines the answers."""
        return {"sampling": self.sampling.model_dump(), "stop": self.chat.eos_id}


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


@dataclass(frozen=True, eq=False)
class _Batch(Generic[K]):
    """Requests that an engine gets together: a chunk, or its share of a policy's requests."""

    labels: list[K]
    """The label of the requests, and those of equal chunks."""
    places: Sequence[int]


def generate(
    asks: Mapping[K, Ask | Score],
    *,
    chunk_size: ChunkSize,
    dtype: str,
    job: Job,
    ahead: WarmEngines,
    tell: Callable[[K, Sequence[Any]], None] = lambda label, answers: None,
) -> dict[K, Sequence[Any]]:
    """Label → answers, in the order of its requests: `Generation`s, or the log-probabilities of each token. They are read on demand from
    the job's folder.

    Policies of the same architecture share engines, whose weights are replaced. Labels of the same policy must be adjacent, so that its
    weights are loaded once. `tell` is called with the answers of a label as soon as they are complete.

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
    with AnswerLog(job) as log:
        known = sum(key in log for own in keys.values() for key in own)
        if known and chunk_size == "continuous":
            before = f"{known} of {sum(map(len, keys.values()))} answers are those of interrupted attempts"
            job.marks.append(f"{before}: what is asked after an interruption runs in other company, and may round otherwise")
        work = _Work(asks, keys, log, job, tell, continuous=chunk_size == "continuous")
        for labels, context in families:
            with job.busy("preparing requests"):
                queues = work.shares(labels) if chunk_size == "continuous" else work.chunks(labels, chunk_size)
            work.begin(labels, {batch for queue in queues for batch in queue})
            if queues:
                policy = asks[queues[0][0].labels[0]].policy
                settings = engine_settings(policy.payload, dtype=dtype, context=context, numerics=job.numerics, placement=job.placement)
                job.doing("starting vLLM")
                with open_engines(settings, len(queues), ahead) as engines:
                    side_by_side(engines, partial(work.run, queues, policy))
    return work.answers


class _Work(Generic[K]):
    """What is asked, answered and complete. `run` is called in a thread per engine, and everything else in the job's."""

    def __init__(
        self,
        asks: Mapping[K, Ask | Score],
        keys: Mapping[K, list[str]],
        log: AnswerLog,
        job: Job,
        tell: Callable[[K, Sequence[Any]], None],
        *,
        continuous: bool,
    ) -> None:
        self.answers: dict[K, Sequence[Any]] = {label: [] for label in asks}
        self._asks, self._keys, self._log, self._job, self._tell, self._continuous = asks, keys, log, job, tell, continuous
        self._left: Counter[K] = Counter()
        """Batches of each label that are not answered."""
        self._kept, self._total = 0, sum(map(len, keys.values()))
        self._answered: dict[int, int] = {}
        """Engine → answers of its current chunk."""

    def chunks(self, labels: Sequence[K], size: int) -> list[deque[_Batch[K]]]:
        """A queue for each engine: the same one, whose next chunk goes to the next idle engine."""
        found: dict[str, _Batch[K]] = {}
        for label in labels:
            keys = self._keys[label]
            for places in (range(len(keys))[start : start + size] for start in range(0, len(keys), size)):
                if (first := keys[places[0]]) in found:  # a label with equal weights
                    found[first].labels.append(label)
                elif not all(keys[place] in self._log for place in places):
                    found[first] = _Batch([label], places)
        return [deque(found.values())] * min(self._job.placement.engines, len(found))

    def shares(self, labels: Sequence[K]) -> list[deque[_Batch[K]]]:
        """A queue for each engine with its share of each policy's unanswered requests; engines without work are omitted.

        Requests with the same prompt go to the same engine, which computes it once. The assignment is static: dynamic assignment to idle
        engines would change the batches from run to run.
        """
        queues: list[deque[_Batch[K]]] = [deque() for _ in range(self._job.placement.engines)]
        for label in labels:
            requests = self._asks[label].requests
            missing = {key: place for place, key in enumerate(self._keys[label]) if key not in self._log}
            parts = [array("q") for _ in queues]
            for number, (_, alike) in enumerate(groupby(missing.values(), key=lambda place: requests[place].prompt_ids)):
                parts[number % len(queues)].extend(alike)
            for queue, part in zip(queues, parts, strict=True):
                queue.extend([_Batch([label], part)] if part else [])
        return [queue for queue in queues if queue]

    def begin(self, labels: Sequence[K], batches: Collection[_Batch[K]]) -> None:
        """Count what is answered already."""
        self._left = Counter(label for batch in batches for label in batch.labels)
        missing = sum(len(batch.places) * len(batch.labels) for batch in batches)
        self._count(-1, sum(len(self._keys[label]) for label in labels) - missing)
        for label in labels:
            if not self._left[label]:
                self._complete(label)

    def run(self, queues: Sequence[deque[_Batch[K]]], loaded: Artifact, number: int, engine: Child, later: Later) -> None:
        """Answer one engine's batches; it has the weights of a policy."""
        for batch in _drained(queues[number]):
            ask, keys = self._asks[batch.labels[0]], self._keys[batch.labels[0]]
            if ask.policy.record.content != loaded.record.content:
                later(partial(self._job.doing, "loading weights"))
                engine.load(ask.policy.payload)
            loaded = ask.policy
            requests, names = Mapped(batch.places, ask.requests.__getitem__), Mapped(batch.places, keys.__getitem__)
            keep = partial(self._keep, number, len(batch.labels))
            if isinstance(ask, Ask) and self._continuous:
                ask.stream(
                    engine,
                    requests,
                    lambda place, answer, names=names, keep=keep: later(partial(keep, {names[place]: vars(answer)})),
                    lambda _: later(partial(self._working, number, 0)),
                )
            else:
                answers = ask.run(engine, requests, lambda count: later(partial(self._working, number, count)))
                later(partial(keep, dict(zip(names, answers, strict=True))))
            later(partial(self._done, batch))

    def _keep(self, engine: int, labels: int, answers: Mapping[str, Any]) -> None:
        self._log.keep(answers)
        self._count(engine, len(answers) * labels)

    def _count(self, engine: int, answers: int) -> None:
        self._kept += answers
        self._working(engine, 0)

    def _working(self, engine: int, answered: int) -> None:
        self._answered[engine] = answered
        self._job.progress(self._kept + sum(self._answered.values()), self._total)

    def _done(self, batch: _Batch[K]) -> None:
        for label in batch.labels:
            self._left[label] -= 1
            if not self._left[label]:
                self._complete(label)

    def _complete(self, label: K) -> None:
        self.answers[label] = Mapped(self._keys[label], lambda key: self._asks[label].read(self._log[key]))
        self._tell(label, self.answers[label])


def _drained(queue: deque[_Batch[K]]) -> Iterator[_Batch[K]]:
    with suppress(IndexError):  # another engine has taken the last one
        while True:
            yield queue.popleft()


def request_keys(ask: Ask | Score, chunk_size: ChunkSize, dtype: str, context: int, job: Job) -> list[str]:
    """A key per request. Equal keys mean equal bits of answers in chunks, and the same distribution and seed of continuous ones."""
    decides = {
        "weights": ask.policy.record.content,
        **ask.settings(),
        "dtype": dtype,
        "context": context,
        "numerics": job.numerics.model_dump(),
    }
    if chunk_size == "continuous":
        common = digest(decides)
        return [digest([common, request_key(request)])[:32] for request in ask.requests]
    starts = range(0, len(ask.requests), chunk_size)
    chunks = ([request_key(one) for one in ask.requests[start : start + chunk_size]] for start in starts)
    return [key for chunk in chunks for key in keys_of({**decides, "requests": chunk}, len(chunk))]


def by_architecture(asks: Mapping[K, Ask | Score]) -> Iterator[list[K]]:
    """Labels grouped by architecture, in order of first appearance."""
    families: dict[str, list[K]] = {}
    for label, ask in asks.items():
        families.setdefault(digest(architecture(ask.policy.payload)), []).append(label)
    yield from families.values()


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
    answer, prompt = ask.sampling.max_tokens, longest - ask.sampling.max_tokens
    remedy = f"lower max_tokens to {model - prompt}, drop longer prompts" if prompt < model else "drop longer prompts"
    return (
        f"{name}: the longest prompt has {prompt} tokens and max_tokens is {answer}, but the model's context is {model}: "
        f"{remedy}, or use a model with a longer context"
    )
