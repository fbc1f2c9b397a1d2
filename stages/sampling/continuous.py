"""Continuous generation for several policies, without chunks: each engine gets all of its requests, runs as many as fit into its KV cache,
and starts another whenever one finishes, so that no request waits for the longest answer of a chunk.

Finished answers are appended to `chunks/answers.jsonl` in the job's scratch folder; after a kill only unanswered requests are repeated.

Rounding depends on which requests run together. Without interruptions, and with engines of the same number and size, results are
bitwise reproducible; a resumed run batches the remaining requests differently, may sample different tokens, and is marked.
"""

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TypeVar

from pedigree.configs.base.frozen import digest
from pedigree.data.records.sequences import Mapped
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.chunks import Ask, EngineProgress, Progress, at_work, by_architecture, context_of, with_weights
from pedigree.stages.sampling.engine_processes import WarmEngines
from pedigree.stages.sampling.response_log import ResponseLog
from pedigree.stages.sampling.sampler import Child, Generation, Request, request_key

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class _Share:
    """One engine's requests to one policy."""

    ask: Ask
    requests: Sequence[Request]
    keys: Sequence[str]


@dataclass(frozen=True)
class _Answered:
    key: str
    answer: Generation


def generate_continuously(asks: Mapping[K, Ask], *, dtype: str, job: Job, ahead: WarmEngines) -> dict[K, Sequence[Generation]]:
    """Label → answers, in the order of its requests; read on demand from the job's folder.

    Policies of the same architecture share engines, whose weights are replaced.

    Raises:
        StageError: a prompt with its answer is longer than the policy's context, or than a KV cache.
        EngineLost: an engine died or stopped responding; finished answers are kept for the next attempt.
    """
    progress = Progress(job, sum(len(ask.requests) for ask in asks.values()))
    families, answers = list(by_architecture(asks)), dict[K, Sequence[Generation]]()
    keys: dict[K, list[str]] = {}
    with job.busy("preparing requests"):
        contexts = [context_of({label: asks[label] for label in labels}) for labels in families]
        for labels, context in zip(families, contexts, strict=True):
            keys |= {label: _keys(asks[label], dtype, context, job) for label in labels}
    ahead.expect(len(families) * job.placement.engines)
    with ResponseLog(job, job.folder / "chunks" / "answers.jsonl", "answer", asdict, lambda written: Generation(**written)) as kept:
        if known := sum(key in kept for own in keys.values() for key in own):
            before = f"{known} of {progress.total} answers are those of interrupted attempts"
            job.marks.append(f"{before}: what is asked after an interruption runs in other company, and may round otherwise")
        for labels, context in zip(families, contexts, strict=True):
            with job.busy("preparing requests"):
                dealt = _deal({label: asks[label] for label in labels}, keys, kept, job.placement.engines)
            lacking = sum(len(share.keys) for shares in dealt for share in shares)
            progress.keep(sum(len(keys[label]) for label in labels) - lacking)
            if lacking:
                _fill(dealt, kept, dtype, context, ahead, progress)
            answers |= {label: Mapped(keys[label], kept.__getitem__) for label in labels}
    return answers


def _keys(ask: Ask, dtype: str, context: int, job: Job) -> list[str]:
    """A key per request: equal keys mean the same distribution of answers and the same seed."""
    numerics = job.numerics.model_dump()
    common = digest({"weights": ask.policy.record.content, **ask.settings(), "dtype": dtype, "context": context, "numerics": numerics})
    return [digest([common, request_key(request)])[:32] for request in ask.requests]


def _deal(asks: Mapping[K, Ask], keys: Mapping[K, Sequence[str]], kept: ResponseLog[Generation], engines: int) -> list[list[_Share]]:
    """Unanswered requests for each engine, by policy; engines without work are omitted.

    Requests with the same prompt go to the same engine, which computes it once. The assignment is static: dynamic assignment to idle
    engines would change the batches from run to run.
    """
    dealt: list[list[_Share]] = [[] for _ in range(engines)]
    for label, ask in asks.items():
        own = keys[label]
        missing = {key: place for place, key in enumerate(own) if key not in kept}
        parts = [array("q") for _ in range(engines)]
        for number, (_, alike) in enumerate(groupby(missing.values(), key=lambda place: ask.requests[place].prompt_ids)):
            parts[number % engines].extend(alike)
        for shares, part in zip(dealt, parts, strict=True):
            if part:
                shares.append(_Share(ask, Mapped(part, ask.requests.__getitem__), Mapped(part, own.__getitem__)))
    return [shares for shares in dealt if shares]


def _fill(
    dealt: Sequence[Sequence[_Share]], kept: ResponseLog[Generation], dtype: str, context: int, ahead: WarmEngines, progress: Progress
) -> None:
    """Run each engine on its shares, and keep each answer as it arrives."""
    opened = dealt[0][0].ask.policy

    def work(number: int, engine: Child, tell: Callable[[str | EngineProgress | _Answered], None]) -> None:
        loaded = opened
        for share in dealt[number]:
            loaded = with_weights(engine, loaded, share.ask.policy, tell)
            keys, stop_ids = share.keys, [share.ask.chat.eos_id]
            engine.stream(
                share.requests,
                share.ask.sampling,
                stop_ids,
                lambda place, answer, keys=keys: tell(_Answered(keys[place], answer)),
                lambda _: tell(EngineProgress(number, 0)),
            )

    with closing(at_work(work, len(dealt), opened, dtype, context, ahead, progress)) as answered:
        for one in answered:
            kept.keep(one.key, one.answer)
            progress.keep(1)
