"""Which stages ask an engine, how, and how many engines answer."""

from collections.abc import Sequence

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.work import SamplingPlan
from pedigree.configs.language.kinds import kind_of
from pedigree.configs.rows.suite_forms import Form


def sampling_plan_of(config: Frozen, forms: Sequence[Form | None] = ()) -> SamplingPlan | None:
    """How a stage submits its requests; None where it asks no engine. `forms` are those of the suites that `evaluate` asks."""
    return kind_of(config).sampling_plan(config, forms)


def opens_engines(config: Frozen) -> bool:
    """Whether a stage opens as many engines as its placement says; one that also trains has a single engine."""
    return sampling_plan_of(config) is not None and not kind_of(config).trains


def engines_of(config: Frozen, placed: int) -> int:
    """Engines that answer side by side in a stage whose placement has so many."""
    return placed if opens_engines(config) else 1
