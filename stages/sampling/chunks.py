"""Generate or score answers of several policies in chunks that are kept across restarts.

A chunk's file is named by a hash of everything that determines its answers (weights, requests in order, sampling, dtype, context,
numerics) and is written atomically; a chunk interrupted by a kill is regenerated from its beginning.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pedigree.configs.base.frozen import digest
from pedigree.configs.methods.training import Sampling
from pedigree.data.artifacts.artifacts import Artifact, write_text
from pedigree.data.chat.chat import Chat
from pedigree.data.host.faults import fault_point
from pedigree.data.records.sequences import InParts
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job
from pedigree.stages.job.mirroring import open_mirror
from pedigree.stages.sampling.engine_processes import WarmEngines
from pedigree.stages.sampling.fleet import open_engines, side_by_side
from pedigree.stages.sampling.sampler import (
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


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


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
        """Answers to some of the requests, as JSON."""
        return [asdict(answer) for answer in sampler.generate(requests, self.sampling, [self.chat.eos_id], beat)]

    def read(self, kept: Any) -> Any:
        return Generation(**kept)

    def settings(self) -> dict[str, Any]:
        """Everything besides requests and weights that determines the answers."""
        return {"sampling": self.sampling.model_dump(), "stop": self.chat.eos_id}


@dataclass(frozen=True)
class Score:
    """Texts to be scored by likelihood under one policy."""

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


@dataclass(frozen=True)
class _Chunk(Generic[K]):
    label: K
    requests: Sequence[Any]
    file: Path


def _answers(ask: Ask | Score, chunks: Sequence[_Chunk[Any]]) -> Sequence[Any]:
    """Answers in chunks, read on demand."""
    files = [chunk.file for chunk in chunks]
    return InParts((len(chunk.requests) for chunk in chunks), lambda part: [ask.read(one) for one in json.loads(files[part].read_text())])


@dataclass(frozen=True)
class EngineProgress:
    """Progress of an engine: requests answered in its current work."""

    engine: int
    answered: int


@dataclass(frozen=True)
class _Made(Generic[K]):
    engine: int
    chunk: _Chunk[K]
    answers: list[Any]


class Progress:
    """Number of answered requests: kept ones, and those of the engines' current work."""

    def __init__(self, job: Job, total: int) -> None:
        self.job, self.total, self.kept = job, total, 0
        self._working: dict[int | None, int] = {}

    def keep(self, count: int, engine: int | None = None) -> None:
        """Count answers as kept, and reset the engine's current work."""
        self.kept += count
        self._working.pop(engine, None)
        self._tell()

    def working(self, news: EngineProgress) -> None:
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
    ahead: WarmEngines,
    tell: Callable[[K, Sequence[Any]], None] = lambda label, answers: None,
) -> dict[K, Sequence[Any]]:
    """Label → answers, in the order of its requests: `Generation`s, or the log-probabilities of each token. They are read on demand from
    the job's folder.

    Policies of the same architecture share engines, whose weights are replaced. Labels of the same policy must be adjacent, so that its
    weights are loaded once. `tell` is called with the answers of a label as soon as they are complete.

    Raises:
        StageError: a prompt with its answer is longer than the policy's context.
        EngineLost: an engine died or stopped responding; finished chunks are kept for the next attempt.
    """
    answers: dict[K, Sequence[Any]] = {label: [] for label in asks}
    chunks: dict[K, list[_Chunk[K]]] = {}
    progress = Progress(job, sum(len(ask.requests) for ask in asks.values()))

    def complete(label: K) -> None:
        answers[label] = _answers(asks[label], chunks[label])
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
    missing: list[_Chunk[K]], asks: Mapping[K, Ask | Score], dtype: str, context: int, ahead: WarmEngines, progress: Progress
) -> Iterator[_Chunk[K]]:
    """Generate the missing chunks, each on an idle engine; yield each when it is complete."""
    job = progress.job
    alike: dict[Path, list[_Chunk[K]]] = {}
    for chunk in missing:  # two labels with equal weights have the same chunks
        alike.setdefault(chunk.file, []).append(chunk)
    waiting = deque(first for first, *_ in alike.values())
    opened = asks[missing[0].label].policy

    def take() -> _Chunk[K] | None:
        with suppress(IndexError):  # another engine has taken the last one
            return waiting.popleft()

    def work(number: int, engine: Child, tell: Callable[[str | EngineProgress | _Made[K]], None]) -> None:
        loaded = opened
        for chunk in iter(take, None):
            ask = asks[chunk.label]
            loaded = with_weights(engine, loaded, ask.policy, tell)
            tell(_Made(number, chunk, ask.run(engine, chunk.requests, lambda answered: tell(EngineProgress(number, answered)))))

    with closing(at_work(work, min(job.placement.engines, len(waiting)), opened, dtype, context, ahead, progress)) as made:
        for one in made:
            _keep(one.chunk.file, one.answers, job)
            for chunk in alike[one.chunk.file]:
                progress.keep(len(chunk.requests), one.engine)
                yield chunk


def at_work(
    work: Callable[[int, Child, Callable[[str | EngineProgress | T], None]], None],
    engines: int,
    policy: Artifact,
    dtype: str,
    context: int,
    ahead: WarmEngines,
    progress: Progress,
) -> Generator[T, None, None]:
    """Start engines with a policy's weights and run `work` on each, see `side_by_side`.

    Yields:
        their results as they arrive; progress messages go to the job.
    """
    job = progress.job
    job.doing("starting vLLM")
    settings = engine_settings(policy.payload, dtype=dtype, context=context, numerics=job.numerics, placement=job.placement)
    with open_engines(settings, engines, ahead) as opened, closing(side_by_side(opened, work)) as news:
        for one in news:
            if isinstance(one, str):
                job.doing(one)
            elif isinstance(one, EngineProgress):
                progress.working(one)
            else:
                yield one


def with_weights(engine: Child, loaded: Artifact, policy: Artifact, tell: Callable[[str], None]) -> Artifact:
    """Load a policy's weights into an engine unless it has them; return the loaded policy."""
    if policy.record.content != loaded.record.content:
        tell("loading weights")
        engine.load(policy.payload)
    return policy


def fetch_saved(job: Job) -> None:
    """Download this job's chunks from the mirror."""
    mirror = open_mirror(job)
    if mirror is not None:
        mirror.fetch_all_chunks(job.folder / "chunks")


def cached(name: str, make: Callable[[], Any], job: Job) -> Any:
    """Load a value from the job's folder, or compute and save it.

    Args:
        name: file name, from everything that determines the value.
        make: computes the value as JSON.
        job: the job.
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


def _cut(label: K, ask: Ask | Score, chunk_size: int, dtype: str, context: int, job: Job) -> list[_Chunk[K]]:
    chunks = []
    for start in range(0, len(ask.requests), chunk_size):
        requests = ask.requests[start : start + chunk_size]
        decides = {
            "weights": ask.policy.record.content,
            "requests": [request_key(request) for request in requests],
            **ask.settings(),
            "dtype": dtype,
            "context": context,
            "numerics": job.numerics.model_dump(),
        }
        chunks.append(_Chunk(label, requests, job.folder / "chunks" / f"{digest(decides)[:32]}.json"))
    return chunks
