"""Answers of several policies to many requests, drawn or only scored, in chunks that are each made once and kept across restarts.

A chunk's file is named after everything that determines its answers (weights, requests in order, sampling, dtype, context, numerics)
and is written atomically; a chunk that a kill interrupted is made again from its beginning.
"""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from configs.frozen import digest
from configs.training import Sampling
from data.artifacts import Artifact, write_text
from data.chat import Chat
from data.faults import fault_point
from stages.engines.mirroring import open_mirror
from stages.engines.sampler import (
    Ahead,
    Beat,
    Continuation,
    Generation,
    Request,
    Sampler,
    architecture,
    model_context,
    open_sampler,
)
from stages.job import Job

CONTEXT_STEP = 128
"""The engine's context is a multiple of this, or the model's own."""


K = TypeVar("K", bound=Hashable)


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


def generate(
    asks: Mapping[K, Ask | Score],
    *,
    chunk_size: int,
    dtype: str,
    job: Job,
    ahead: Ahead | None = None,
    tell: Callable[[K, list[Any]], None] = lambda label, answers: None,
) -> dict[K, list[Any]]:
    """Label → answers, in the order of its requests: `Generation`s, or the log-probabilities of each token.

    Policies of one architecture share an engine, whose weights are replaced; another architecture takes another engine. Labels of one
    policy stand together, so that its weights are loaded once. `tell` is called with the answers of a label as soon as they are there.

    Raises:
        StageError: a prompt with its answer is longer than the policy's context.
        EngineLost: the engine died or stopped responding; finished chunks are kept for the next attempt.
    """
    answers: dict[K, list[Any]] = {label: [] for label in asks}
    chunks: dict[K, list[_Chunk[K]]] = {}
    total, done = sum(len(ask.requests) for ask in asks.values()), 0

    def complete(label: K) -> None:
        answers[label] = [asks[label].read(kept) for chunk in chunks[label] for kept in json.loads(chunk.file.read_text())]
        tell(label, answers[label])

    families = list(_by_architecture(asks))
    if ahead is not None:
        ahead.expect(len(families))
    for labels in families:
        context = _context([asks[label] for label in labels])
        with job.busy("preparing requests"):
            chunks |= {label: _cut(label, asks[label], chunk_size, dtype, context, job) for label in labels}
        wanted = [chunk for label in labels for chunk in chunks[label]]
        mirror = open_mirror(job)
        if mirror is not None:
            mirror.fetch_chunks([chunk.file for chunk in wanted if not chunk.file.exists()])
        missing = [chunk for chunk in wanted if not chunk.file.exists()]
        done += sum(len(chunk.requests) for chunk in wanted) - sum(len(chunk.requests) for chunk in missing)
        job.progress(done, total)
        lacks = Counter(chunk.label for chunk in missing)
        for label in labels:
            if not lacks[label]:
                complete(label)
        for chunk in _fill(missing, asks, dtype, context, job, ahead, done, total) if missing else ():
            done += len(chunk.requests)
            lacks[chunk.label] -= 1
            if not lacks[chunk.label]:
                complete(chunk.label)
    return answers


def _fill(
    missing: list[_Chunk[K]],
    asks: Mapping[K, Ask | Score],
    dtype: str,
    context: int,
    job: Job,
    ahead: Ahead | None,
    done: int,
    total: int,
) -> Iterator[_Chunk[K]]:
    """Makes what is missing; gives each chunk when it is there."""
    loaded = asks[missing[0].label].policy
    job.doing("starting vLLM")
    settings: dict[str, Any] = {"dtype": dtype, "context": context, "numerics": job.numerics, "placement": job.placement}
    with open_sampler(loaded.payload, inline=False, ahead=ahead, **settings) as sampler:
        for chunk in missing:
            if chunk.file.exists():  # equal weights under two labels have the same chunks
                done += len(chunk.requests)
                yield chunk
                continue
            ask = asks[chunk.label]
            if ask.policy.record.content != loaded.record.content:
                job.doing("loading weights")
                sampler.load(ask.policy.payload)
                loaded = ask.policy
            before = done
            made = ask.made(sampler, chunk.requests, lambda finished, before=before: job.progress(before + finished, total))
            fault_point("chunk generated")
            job.seal()
            write_text(chunk.file, json.dumps(made))
            mirror = open_mirror(job)
            if mirror is not None:
                mirror.offer_chunk(chunk.file)
            done += len(chunk.requests)
            job.progress(done, total)
            yield chunk


def _by_architecture(asks: Mapping[K, Ask | Score]) -> Iterator[list[K]]:
    """Labels grouped by architecture, in order of first appearance."""
    families: dict[str, list[K]] = {}
    for label, ask in asks.items():
        families.setdefault(digest(architecture(ask.policy.payload)), []).append(label)
    yield from families.values()


def _context(asks: list[Ask | Score]) -> int:
    """What the longest request needs, rounded up where the model allows: a short context saves memory and start-up time."""
    needed = max(ask.longest for ask in asks)
    rounded = -(-needed // CONTEXT_STEP) * CONTEXT_STEP
    return max(needed, min(rounded, model_context(asks[0].policy.payload)))


def _cut(label: K, ask: Ask | Score, chunk_size: int, dtype: str, context: int, job: Job) -> list[_Chunk[K]]:
    chunks = []
    for start in range(0, len(ask.requests), chunk_size):
        requests = ask.requests[start : start + chunk_size]
        decides = {
            "weights": ask.policy.record.content,
            "requests": [asdict(request) for request in requests],
            **ask.settings(),
            "dtype": dtype,
            "context": context,
            "numerics": job.numerics.model_dump(),
        }
        chunks.append(_Chunk(label, requests, job.folder / "chunks" / f"{digest(decides)[:32]}.json"))
    return chunks
