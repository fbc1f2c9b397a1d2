"""Search a profile's settings for those under which a stage on GPUs is estimated to finish first.

All combinations are tried; ReaLHF (Mei et al. 2024, arXiv 2406.14088, §5) samples a larger space by an estimator in the same way. A stage
keeps its nodes and slots: what changes is how its ranks and engines use them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pydantic import ValidationError

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.work import Amounts, unservable
from pedigree.configs.language.execution import Numerics, batch_problem, engines_problem, ranks_problem, served_problem
from pedigree.configs.language.graph import Node
from pedigree.pipelines.estimate.estimates import Estimates, Setting, assumed, operations
from pedigree.pipelines.estimate.fit import Trial, lacks
from pedigree.pipelines.estimate.needs import Facts, trained_parameters
from pedigree.pipelines.estimate.peak_memory import SIZES

ROOM = 0.9
"""Share of a GPU's memory that may be used, since fragmentation is not estimated."""
WORTH = 0.95
"""Largest time, relative to that under the profile, that is worth a change."""
EQUAL = 1.02
"""Times up to so many times the shortest are equal: the fewest changes decide."""
PASSES = (0.125, 0.25, 0.5, 1, 2, 4)
"""Factors of `micro_batch_tokens`."""
POWERS = (1, 2, 4, 8, 16, 32)
NETWORK = 50e9
"""Bytes per second and GPU between nodes, in one direction: 400 Gbit/s."""


@dataclass(frozen=True)
class Faster:
    """Settings that replace the profile's for a stage, by the estimate."""

    numerics: Mapping[str, Any]
    """Those that differ from the profile's."""
    placement: Mapping[str, Any]
    """Likewise."""
    time_share: float | None
    """Its time relative to that under the profile; null if it does not fit under the profile."""
    peak_bytes: int
    """Memory of a GPU."""


def faster(estimates: Estimates, node: Node) -> Faster | None:
    """The best settings of a stage; None if the profile's are as good, or its work, its models or the GPUs are unknown."""
    (amounts, facts), (numerics, placement) = estimates.work_of(node), estimates.execution.of(node.kind, node.name)
    hardware = estimates.of(node).hardware
    if not isinstance(facts, Facts) or hardware.device == "cpu" or hardware.gpu_bytes is None:
        return None
    now = Trial(facts, numerics, placement, hardware)
    present, room = seconds(now, amounts), ROOM * hardware.gpu_bytes
    timed = [
        (time, trial)
        for trial in combinations(now, node.config)
        if (time := seconds(trial, amounts)) and trial.needs.peak <= room and not lacks(trial)
    ]
    if not timed or present is None:
        return None
    shortest = min(time for time, _ in timed)
    equal = [(time, trial) for time, trial in timed if time <= EQUAL * shortest]
    time, best = min(equal, key=lambda one: (sum(map(len, changes(now, one[1]))), one[0]))
    fits = not lacks(now)
    return None if fits and time > WORTH * present else Faster(*changes(now, best), time / present if fits else None, best.needs.peak)


def changes(now: Trial, then: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numerics and the placement of the second that differ from those of the first."""
    pairs: Iterable[tuple[Frozen, Frozen]] = ((now.numerics, then.numerics), (now.placement, then.placement))
    numerics, placement = ({name: value for name, value in new if value != getattr(old, name)} for old, new in pairs)
    return numerics, placement


def combinations(now: Trial, config: Frozen) -> Iterator[Trial]:
    """The stage under all valid settings."""
    beside = now.facts.sampling is not None and now.facts.sampling.beside
    for trained, served in product(_trained(now, beside), _served(now)):
        try:
            numerics = Numerics.model_validate(now.numerics.model_dump() | trained | {"tensor_parallel": served["tensor_parallel"]})
        except ValidationError:
            continue
        free = now.placement.slots - (numerics.ranks_per_node if beside else 0)
        placed = {"engines": max(1, free // numerics.tensor_parallel - len(now.facts.queried))} if now.facts.served else {}
        placement = now.placement.model_copy(update=placed | {"gpu_memory_utilization": served["gpu_memory_utilization"]})
        wrong = batch_problem(config, numerics) or ranks_problem(numerics, placement)
        wrong = wrong or served_problem(numerics, placement, [plan.port for plan, _ in now.facts.queried], beside=beside)
        if not wrong and not engines_problem(numerics, placement, beside=beside):
            yield replace(now, numerics=numerics, placement=placement)


def _trained(now: Trial, beside: bool) -> Iterator[dict[str, Any]]:
    """Settings of the ranks."""
    numerics = now.numerics
    if now.facts.training is None:
        yield {}
        return
    moves = beside and numerics.nodes == 1
    sizes = [ranks for ranks in POWERS if ranks < now.placement.slots] if moves else [numerics.world_size]
    tokens = [int(factor * numerics.micro_batch_tokens) for factor in PASSES] if numerics.packing else [numerics.micro_batch_tokens]
    for ranks, stage, recomputed, each in product(sizes, {numerics.zero_stage, 1, 2, 3}, (False, True), tokens):
        if ranks > 1 or stage == numerics.zero_stage:
            yield {"world_size": ranks, "zero_stage": stage, "gradient_checkpointing": recomputed, "micro_batch_tokens": each}


def _served(now: Trial) -> Iterator[dict[str, Any]]:
    """Settings of the engines."""
    served, placement = now.facts.served, now.placement
    if served is None:
        yield {"tensor_parallel": now.numerics.tensor_parallel, "gpu_memory_utilization": placement.gpu_memory_utilization}
        return
    shares = [tenths / 10 for tenths in range(2, 10)] if now.facts.training else [placement.gpu_memory_utilization]  # else alone
    for ranks, share in product(POWERS, shares):
        if ranks <= placement.slots and not unservable(*served.divided, now.numerics.device, ranks):
            yield {"tensor_parallel": ranks, "gpu_memory_utilization": share}


def seconds(trial: Trial, amounts: Amounts) -> float | None:
    """Time of the work with what ranks exchange, which is assumed not to overlap with computing; None if unknown."""
    numerics, facts = trial.numerics, trial.facts
    size = operations(amounts, facts, numerics.gradient_checkpointing)
    found = assumed(amounts, facts, Setting(numerics, trial.placement.engines, trial.hardware), size) if size else None
    if found is None:
        return None
    return replace(found, training=found.training + exchange_seconds(trial, amounts)).total


def exchange_seconds(trial: Trial, amounts: Amounts) -> float:
    """Time in which the ranks of a training exchange weights and gradients, 0 if unknown (`formulas.md`)."""
    plan, numerics, hardware, facts = trial.facts.training, trial.numerics, trial.hardware, trial.facts
    if plan is None or amounts.steps is None or amounts.tokens is None or hardware.link is None:
        return 0.0
    a_step = amounts.tokens.value / max(1.0, amounts.steps.value) / numerics.world_size
    passes = math.ceil(a_step / max(1, trial.needs.tokens_a_pass))
    trained = [trained_parameters(facts.policy, plan.adapters, plan.scalar_head), *([facts.value.parameters] if facts.value else [])]
    frozen = facts.policy.parameters if plan.adapters else 0
    bandwidth = NETWORK if numerics.nodes > 1 else hardware.link
    each = sum(exchanged_bytes(count, SIZES[plan.dtype], numerics, passes) for count in trained)
    each += gathered_bytes(frozen, SIZES[plan.dtype], numerics, passes)
    return amounts.steps.value * plan.updates * each / bandwidth


def exchanged_bytes(trained: int, size: int, numerics: Numerics, passes: int) -> float:
    """Bytes that a rank receives per update for weights that are trained: fp32 gradients reduced once, from ZeRO-2 after each pass; weights
    gathered once, with ZeRO-3 as `gathered_bytes` (Rajbhandari et al. 2019, arXiv 1910.02054, §7)."""
    share = (numerics.world_size - 1) / numerics.world_size
    gradients = 4 * trained * (passes if numerics.zero_stage >= 2 else 1)
    if numerics.zero_stage == 3:
        return share * gradients + gathered_bytes(trained, size, numerics, passes)
    return share * (gradients + size * trained)


def gathered_bytes(parameters: int, size: int, numerics: Numerics, passes: int) -> float:
    """Bytes of weights that a rank receives per update with ZeRO-3: for each forward, recomputed and backward pass."""
    if numerics.zero_stage < 3:
        return 0.0
    share = (numerics.world_size - 1) / numerics.world_size
    return share * size * parameters * passes * (2 + numerics.gradient_checkpointing)
