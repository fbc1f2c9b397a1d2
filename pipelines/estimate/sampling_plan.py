"""Which stages use an engine, and how many."""

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.work import SamplingPlan
from pedigree.configs.language.kinds import kind_of


def sampling_plan_of(config: Frozen) -> SamplingPlan | None:
    """How a stage submits its requests; None where it uses no engine."""
    return kind_of(config).sampling_plan(config)


def opens_engines(config: Frozen) -> bool:
    """Whether a stage starts as many engines as its placement specifies; one that also trains has a single engine."""
    return sampling_plan_of(config) is not None and not kind_of(config).trains


def engines_of(config: Frozen, placed: int) -> int:
    """Engines that answer side by side in a stage whose placement has so many."""
    return placed if opens_engines(config) else 1
