"""Check whether a stage fits the hardware of a profile, and find settings that make it fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from pydantic import ValidationError

from pedigree.configs.base.work import Adapters
from pedigree.configs.language.execution import SMALLEST_TOKENS, Numerics, Placement
from pedigree.pipelines.estimate.machines import Hardware
from pedigree.pipelines.estimate.needs import Facts, Needs, needs_of
from pedigree.pipelines.quantities import size

SHOWN_REMEDIES = 3


@dataclass(frozen=True)
class Shortfall:
    """A resource that a stage needs more of than is available, in bytes."""

    resource: str
    needed: int
    bound: int
    largest: tuple[tuple[str, int], ...] = ()
    """The largest terms, in descending order."""

    def __str__(self) -> str:
        terms = ", ".join(f"{name.replace('_', ' ')} {size(count)}" for name, count in self.largest)
        made_of = f" ({terms})" if terms else ""
        return f"{self.resource} needs {size(self.needed)}{made_of} but has {size(self.bound)}, {size(self.needed - self.bound)} too little"


@dataclass(frozen=True)
class FitProblem:
    """Why a stage does not fit, and remedies."""

    lacks: tuple[Shortfall, ...]
    remedies: tuple[str, ...]
    """Each alone makes the stage fit according to the estimate."""

    def __str__(self) -> str:
        remedy = "; or ".join(self.remedies) or "no setting makes it fit: use more or larger GPUs, or a smaller model"
        return f"{'; '.join(map(str, self.lacks))}: {remedy}"


@dataclass(frozen=True)
class Trial:
    """A stage under given settings."""

    facts: Facts
    numerics: Numerics
    placement: Placement
    hardware: Hardware

    @property
    def needs(self) -> Needs:
        return needs_of(self.facts, self.numerics, self.placement, self.hardware.gpu_bytes)


Change = Callable[[Trial], Iterator[tuple[str, Trial]]]
"""A trial → (instruction, changed trial) for other values of one setting."""


def misfit(trial: Trial) -> FitProblem | None:
    """Why the stage does not fit, with verified remedies; None if it fits."""
    found = lacks(trial)
    return FitProblem(tuple(found), tuple(remedies_of(trial))) if found else None


def lacks(trial: Trial) -> list[Shortfall]:
    """Resources that are insufficient for the stage; a resource with an unknown bound is skipped."""
    needs, hardware, found = trial.needs, trial.hardware, []
    needed = needs.together if hardware.device == "cpu" else needs.peak
    bound = hardware.bytes_per_rank
    if bound is not None and needs.device:
        ranks = f" of {needs.ranks} ranks" if needs.ranks > 1 else ""
        each = f"memory{ranks}" if hardware.device == "cpu" else "the GPU of rank 0" if "sampler" in needs.device else "each GPU"
        phase, terms = max(needs.phases.items(), key=lambda phase: sum(phase[1].values()))
        if needed > bound:
            largest = sorted(terms.items(), key=lambda term: -term[1])[:3]
            found.append(Shortfall(f"{phase} on {each}" if phase else each, needed, bound, tuple(largest)))
    place = "placement.gpu_memory_utilization" if hardware.device == "cuda" else "placement.sampler_memory_gb"
    caches = [("a chunk of requests", needs.engine, needs.engine.least_cache)] if needs.engine else []
    caches += [(f"the context of the {port}", engine, engine.cache) for port, engine in needs.queried.items()]
    for what, engine, cache in caches:
        if engine.room is not None and cache > engine.room:
            found.append(Shortfall(f"the KV cache of {what} (under {place})", cache, engine.room))
    if hardware.device == "cuda" and hardware.host_bytes is not None:
        together = needs.host_of(hardware.gpus_per_node)
        if together > hardware.host_bytes:
            found.append(Shortfall("host memory of a node", together, hardware.host_bytes))
    return found


def remedies_of(trial: Trial) -> Iterator[str]:
    """Settings that each alone make the stage fit, or else the cheapest combination of two or three that does."""
    alone = [words for change in CHANGES for words, changed in change(trial) if not lacks(changed)]
    yield from alone[:SHOWN_REMEDIES]
    if not alone:
        combined = (several for count in (2, 3) for several in combinations(CHANGES, count))
        yield from islice((words for several in combined for words in _together(trial, several)), 1)


def _together(trial: Trial, several: Sequence[Change]) -> Iterator[str]:
    """Combined changes of these settings that make the stage fit; settings in `ADAPTING` are changed last."""
    first, *others = sorted(several, key=lambda change: change in ADAPTING)
    for words, changed in first(trial):
        if not others:
            yield from [words] if not lacks(changed) else []
        else:
            yield from (f"{words} and {more}" for more in _together(changed, others))


def _numerics(trial: Trial, **fields: Any) -> Iterator[tuple[str, Trial]]:
    try:
        changed = Numerics.model_validate(trial.numerics.model_dump() | fields)
    except ValidationError:
        return
    words = " and ".join(f"numerics.{name}: {str(value).lower()}" for name, value in fields.items())
    yield f"set {words}", replace(trial, numerics=changed)


def _zero(trial: Trial) -> Iterator[tuple[str, Trial]]:
    if trial.facts.training and trial.numerics.world_size > 1:
        for stage in range(trial.numerics.zero_stage + 1, 4):
            yield from _numerics(trial, zero_stage=stage)


def _checkpointing(trial: Trial) -> Iterator[tuple[str, Trial]]:
    if trial.facts.training and not trial.numerics.gradient_checkpointing:
        yield from _numerics(trial, gradient_checkpointing=True)


def _smaller_passes(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """The largest of half, a quarter, ... that fits, else the smallest valid value."""
    halves = _halves(trial.numerics.micro_batch_tokens, SMALLEST_TOKENS) if trial.numerics.packing else ()
    tried = [found for tokens in halves for found in _numerics(trial, micro_batch_tokens=tokens)]
    yield from [*_first_fitting(tried)] or tried[-1:]


def _shared_rows(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """The fewest ranks to a row that fit."""
    facts, numerics = trial.facts, trial.numerics
    for ranks in (2, 4, 8, 16):
        divides = numerics.world_size % ranks == 0 and facts.policy.kv_heads % ranks == 0
        if facts.training and not facts.sampling and not facts.policy.experts and divides and ranks > numerics.sequence_parallel:
            yield from _numerics(trial, sequence_parallel=ranks)


def _offload(trial: Trial) -> Iterator[tuple[str, Trial]]:
    if trial.facts.training and not trial.numerics.offload_optimizer:
        yield from _numerics(trial, offload_optimizer=True)


def _cached_reference(trial: Trial) -> Iterator[tuple[str, Trial]]:
    plan = trial.facts.training
    if plan is not None and plan.without_reference and trial.facts.reference is not None:
        yield plan.without_reference, replace(trial, facts=replace(trial.facts, reference=None))


def _tensor_parallel(trial: Trial) -> Iterator[tuple[str, Trial]]:
    served = trial.facts.served
    if served is None or trial.numerics.device != "cuda":
        return
    for ranks in (2, 4, 8):
        fits_heads = served.heads % ranks == 0
        engines = min(trial.placement.engines, max(1, trial.hardware.gpus_per_node // ranks))
        needed, fewer = ranks * engines, engines < trial.placement.engines
        if trial.numerics.tensor_parallel < ranks <= trial.hardware.gpus_per_node and fits_heads:
            for words, changed in _numerics(trial, tensor_parallel=ranks):
                words += f" and placement.engines: {engines}" if fewer else ""
                words += "" if trial.placement.slots >= needed else f" and placement.slots: {needed}"
                yield words, _placed(changed, engines=engines) if fewer else changed


def _fewer_engines(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """The largest of half, a quarter, ... of the engines or copies of a model that fits."""
    halves = _halves(trial.placement.engines)
    yield from _first_fitting((f"set placement.engines: {engines}", _placed(trial, engines=engines)) for engines in halves)


def _engine_memory(trial: Trial) -> Iterator[tuple[str, Trial]]:
    placement, engine = trial.placement, trial.needs.engine
    if engine is None:
        return
    if trial.numerics.device == "cpu":
        wanted = -(-engine.cache * 10 // (1 << 30)) / 10
        if wanted > placement.sampler_memory_gb:
            yield f"set placement.sampler_memory_gb: {wanted:g}", _placed(trial, sampler_memory_gb=wanted)
        return
    shares = [share for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95) if share != placement.gpu_memory_utilization]
    name = "gpu_memory_utilization"
    yield from _first_fitting((f"set placement.{name}: {share}", _placed(trial, **{name: share})) for share in shares)


def _smaller_chunks(trial: Trial) -> Iterator[tuple[str, Trial]]:
    plan = trial.facts.sampling
    if plan is not None and plan.chunk_field:
        yield from _first_fitting(
            (f"set {plan.chunk_field}: {chunk} in the recipe", _sampled(trial, together=chunk)) for chunk in _halves(plan.together)
        )


def _queued(trial: Trial) -> Iterator[tuple[str, Trial]]:
    plan = trial.facts.sampling
    if plan is not None and plan.queued_by and plan.chunk != 1:
        yield f"set {plan.queued_by} in the recipe", _sampled(trial, chunk=1)


def _adapters(trial: Trial) -> Iterator[tuple[str, Trial]]:
    plan = trial.facts.training
    if plan is not None and plan.adaptable and plan.adapters is None:
        changed = replace(trial.facts, training=replace(plan, adapters=Adapters()))
        yield "train adapters instead: `lora: {rank: 16}` in the recipe", replace(trial, facts=changed)


def _placed(trial: Trial, **fields: Any) -> Trial:
    return replace(trial, placement=Placement.model_validate(trial.placement.model_dump() | fields))


def _sampled(trial: Trial, **fields: Any) -> Trial:
    assert trial.facts.sampling is not None
    return replace(trial, facts=replace(trial.facts, sampling=replace(trial.facts.sampling, **fields)))


def _halves(value: int, least: int = 1) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def _first_fitting(trials: Iterable[tuple[str, Trial]]) -> Iterator[tuple[str, Trial]]:
    yield from islice(((words, changed) for words, changed in trials if not lacks(changed)), 1)


CHANGES: Sequence[Change] = (
    _zero, _checkpointing, _smaller_passes, _tensor_parallel, _engine_memory, _smaller_chunks, _queued, _fewer_engines, _cached_reference,
    _shared_rows,
    _offload,
    _adapters,
)  # fmt: skip
"""Changes to try, cheapest first; the last ones cost time or change the training result."""
ADAPTING = (_smaller_passes, _engine_memory, _smaller_chunks)
"""Changes that adapt their value to the minimum needed."""
