"""Answers of several policies to many requests, drawn or only scored, in chunks that are each made once and kept across restarts.

A chunk's file is named after everything that determines its answers (weights, requests in order, sampling, dtype, context, numerics)
and is written atomically; a chunk that a kill interrupted is made again from its beginning.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from configs.base.frozen import digest
from configs.methods.training import Sampling
from data.artifacts.artifacts import Artifact, write_text
from data.chat.chat import Chat
from data.host.faults import fault_point
from data.records.sequences import InParts
from stages.job.job import Job, StageError
from stages.job.mirroring import open_mirror
from stages.sampling.engine_processes import Ahead
from stages.sampling.fleet import open_engines, side_by_side
from stages.sampling.sampler import (
    Beat,
    Child,
    Continuation,
    Generation,
    Request,
    Sampler,
    architecture,
    engine_settings,
    model_context,
    told,
)

CONTEXT_STEP = 128
"""The engine's context is a multiple of this, or the model's own."""


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """Requests to one policy, to be answered alike."""

    policy: Artifact
    chat: Chat
    requests: Sequence[Request]
    sampling: Sampling

    @property
    def longest(self) -> int:
        """Most tokens of a request with its answer."""
        return max(len(request.prompt_ids) for request in self.requests) + self.sampling.max_tokens

    def made(self, sampler: Sampler, requests: Sequence[Any], beat: Beat) -> list[Any]:
        """Answers to some of the requests, as JSON has them."""
        return [asdict(answer) for answer in sampler.generate(requests, self.sampling, [self.chat.eos_id], beat)]

    def read(self, kept: Any) -> Any:
        return Generation(**kept)

    def settings(self) -> dict[str, Any]:
        """What decides the answers beside requests and weights."""
        return {"sampling": self.sampling.model_dump(), "stop": self.chat.eos_id}


@dataclass(frozen=True)
class Score:
    """Texts whose likelihood one policy is asked for."""

    policy: Artifact
    requests: Sequence[Continuation]

    @property
    def longest(self) -> int:
        return max(len(one.prompt_ids) + len(one.response_ids) for one in self.requests) + 1

    def made(self, sampler: Sampler, requests: Sequence[Any], beat: Beat) -> list[Any]:
        return sampler.score(requests, beat)

    def read(self, kept: Any) -> Any:
        return kept

    def settings(self) -> dict[str, Any]:
        return {"likelihood": True}


@dataclass(frozen=True)
class _Chunk(Generic[K]):
    label: K
    requests: Sequence[Any]
    file: Path


class _Answers(InParts[Any]):
    """What chunks hold, read when it is asked for."""

    def __init__(self, ask: Ask | Score, chunks: Sequence[_Chunk[Any]]) -> None:
        self._ask, self._files = ask, [chunk.file for chunk in chunks]
        super().__init__(len(chunk.requests) for chunk in chunks)

    def _read(self, part: int) -> list[Any]:
        return [self._ask.read(kept) for kept in json.loads(self._files[part].read_text())]


@dataclass(frozen=True)
class Working:
    """So many requests of what an engine is working on have been answered."""

    engine: int
    answered: int


@dataclass(frozen=True)
class _Made(Generic[K]):
    engine: int
    chunk: _Chunk[K]
    answers: list[Any]


class Progress:
    """How many requests have been answered: those that are kept, and those that engines are working on."""

    def __init__(self, job: Job, total: int) -> None:
        self.job, self.total, self.kept = job, total, 0
        self._working: dict[int | None, int] = {}

    def keep(self, count: int, engine: int | None = None) -> None:
        """Counts answers that are kept, and an engine's as no longer being worked on."""
        self.kept += count
        self._working.pop(engine, None)
        self._tell()

    def working(self, news: Working) -> None:
        self._working[news.engine] = news.answered
        self._tell()

    def _tell(self) -> None:
        self.job.progress(self.kept + sum(self._working.values()), self.total)


def generate(
    asks: Mapping[K, Ask | Score],
    *,
    chunk_size: int,
    dtype: str,
    job: Job,
    ahead: Ahead,
    tell: Callable[[K, Sequence[Any]], None] = lambda label, answers: None,
) -> dict[K, Sequence[Any]]:
    """Label → answers, in the order of its requests: `Generation`s, or the log-probabilities of each token. They are read when they are
    asked for, and are there as long as the job's folder is.

    Policies of one architecture share engines, whose weights are replaced; another architecture takes other engines. Labels of one
    policy stand together, so that its weights are loaded once. `tell` is called with the answers of a label as soon as they are there.

    Raises:
        StageError: a prompt with its answer is longer than the policy's context.
        EngineLost: an engine died or stopped responding; finished chunks are kept for the next attempt.
    """
    answers: dict[K, Sequence[Any]] = {label: [] for label in asks}
    chunks: dict[K, list[_Chunk[K]]] = {}
    progress = Progress(job, sum(len(ask.requests) for ask in asks.values()))

    def complete(label: K) -> None:
        answers[label] = _Answers(asks[label], chunks[label])
        tell(label, answers[label])

    families = list(by_architecture(asks))
    with job.busy("preparing requests"):
        contexts = [context_of({label: asks[label] for label in labels}) for labels in families]
    ahead.expect(len(families) * job.placement.engines)
    for labels, context in zip(families, contexts, strict=True):
        with job.busy("preparing requests"):
            chunks |= {label: _cut(label, asks[label], chunk_size, dtype, context, job) for label in labels}
        wanted = [chunk for label in labels for chunk in chunks[label]]
        mirror = open_mirror(job)
        if mirror is not None:
            mirror.fetch_chunks([chunk.file for chunk in wanted if not chunk.file.exists()])
        missing = [chunk for chunk in wanted if not chunk.file.exists()]
        progress.keep(sum(len(chunk.requests) for chunk in wanted) - sum(len(chunk.requests) for chunk in missing))
        lacks = Counter(chunk.label for chunk in missing)
        for label in labels:
            if not lacks[label]:
                complete(label)
        for chunk in _fill(missing, asks, dtype, context, ahead, progress) if missing else ():
            lacks[chunk.label] -= 1
            if not lacks[chunk.label]:
                complete(chunk.label)
    return answers


def _fill(
    missing: list[_Chunk[K]], asks: Mapping[K, Ask | Score], dtype: str, context: int, ahead: Ahead, progress: Progress
) -> Iterator[_Chunk[K]]:
    """Makes what is missing, each chunk by an engine that is idle; gives each when it is there."""
    job = progress.job
    alike: dict[Path, list[_Chunk[K]]] = {}
    for chunk in missing:  # equal weights under two labels have the same chunks
        alike.setdefault(chunk.file, []).append(chunk)
    waiting = deque(first for first, *_ in alike.values())
    opened = asks[missing[0].label].policy

    def take() -> _Chunk[K] | None:
        with suppress(IndexError):  # another engine has taken the last one
            return waiting.popleft()

    def work(number: int, engine: Child, tell: Callable[[str | Working | _Made[K]], None]) -> None:
        loaded = opened
        for chunk in iter(take, None):
            ask = asks[chunk.label]
            loaded = with_weights(engine, loaded, ask.policy, tell)
            tell(_Made(number, chunk, ask.made(engine, chunk.requests, lambda answered: tell(Working(number, answered)))))

    with closing(at_work(work, min(job.placement.engines, len(waiting)), opened, dtype, context, ahead, progress)) as made:
        for one in made:
            _keep(one.chunk.file, one.answers, job)
            for chunk in alike[one.chunk.file]:
                progress.keep(len(chunk.requests), one.engine)
                yield chunk


def at_work(
    work: Callable[[int, Child, Callable[[str | Working | T], None]], None],
    engines: int,
    policy: Artifact,
    dtype: str,
    context: int,
    ahead: Ahead,
    progress: Progress,
) -> Generator[T, None, None]:
    """Starts so many engines with the weights of a policy, and has `work` done with each of them, see `side_by_side`.

    Yields:
        what they make, as it comes; what else they tell goes to the job and its progress.
    """
    job = progress.job
    job.doing("starting vLLM")
    settings = engine_settings(policy.payload, dtype=dtype, context=context, numerics=job.numerics, placement=job.placement)
    with open_engines(settings, engines, ahead) as opened, closing(side_by_side(opened, work)) as news:
        for one in news:
            if isinstance(one, str):
                job.doing(one)
            elif isinstance(one, Working):
                progress.working(one)
            else:
                yield one


def with_weights(engine: Child, loaded: Artifact, policy: Artifact, tell: Callable[[str], None]) -> Artifact:
    """Gives an engine the weights of a policy where it has loaded others; returns whose it has then."""
    if policy.record.content != loaded.record.content:
        tell("loading weights")
        engine.load(policy.payload)
    return policy


def fetch_kept(job: Job) -> None:
    """Fetches what another machine has kept of this job."""
    mirror = open_mirror(job)
    if mirror is not None:
        mirror.fetch_all_chunks(job.folder / "chunks")


def kept(name: str, make: Callable[[], Any], job: Job) -> Any:
    """What was made once, as JSON has it; made now where it is not there.

    Args:
        name: of its file, after everything that determines it.
        make: makes it.
        job: that keeps it.
    """
    file = job.folder / "chunks" / f"{name}.json"
    if not file.exists():
        _keep(file, make(), job)
    return json.loads(file.read_text())


def _keep(file: Path, made: Any, job: Job) -> None:
    fault_point("chunk generated")
    job.seal()
    write_text(file, json.dumps(made))
    mirror = open_mirror(job)
    if mirror is not None:
        mirror.offer_chunk(file)


def by_architecture(asks: Mapping[K, Ask | Score]) -> Iterator[list[K]]:
    """Labels grouped by architecture, in order of first appearance."""
    families: dict[str, list[K]] = {}
    for label, ask in asks.items():
        families.setdefault(digest(architecture(ask.policy.payload)), []).append(label)
    yield from families.values()


def context_of(asks: Mapping[K, Ask | Score]) -> int:
    """What the longest request to policies of one architecture needs, rounded up where the model allows: a short context saves memory and
    start-up time.

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
            f"{name}: a choice with its prompt takes {longest - 1} tokens and one more is drawn, the model's context is {model}: drop the "
            "item, show fewer worked examples, or take a model with a longer context"
        )
    answer, prompt = ask.sampling.max_tokens, longest - ask.sampling.max_tokens
    remedy = f"lower max_tokens to {model - prompt}, drop longer prompts" if prompt < model else "drop longer prompts"
    return (
        f"{name}: the longest prompt has {prompt} tokens and its answer may have max_tokens {answer}, the model's context is {model}: "
        f"{remedy}, or take a model with a longer context"
    )


def _cut(label: K, ask: Ask | Score, chunk_size: int, dtype: str, context: int, job: Job) -> list[_Chunk[K]]:
    chunks = []
    for start in range(0, len(ask.requests), chunk_size):
        requests = ask.requests[start : start + chunk_size]
        decides = {
            "weights": ask.policy.record.content,
            "requests": [told(request) for request in requests],
            **ask.settings(),
            "dtype": dtype,
            "context": context,
            "numerics": job.numerics.model_dump(),
        }
        chunks.append(_Chunk(label, requests, job.folder / "chunks" / f"{digest(decides)[:32]}.json"))
    return chunks
