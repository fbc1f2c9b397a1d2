"""Config of how several reward models become one reward."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pedigree.configs.base.frozen import Frozen


class Mean(Frozen):
    """The mean of the members; for a single reward model, its own reward."""

    formula: ClassVar[str] = "R̄ = (1/k) Σ_i R_i, with R_i = (s_i - mean_i) / std_i over member i's held-out answers"
    source: ClassVar[str] = "Lakshminarayanan et al. 2017, arXiv 1612.01474; for rewards: Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["mean"]


class WorstCase(Frozen):
    """The minimum over the members (WCO)."""

    formula: ClassVar[str] = "min_i R_i"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["worst_case"]


class UncertaintyWeighted(Frozen):
    """The mean, minus a penalty for disagreement between members (UWO)."""

    formula: ClassVar[str] = "R̄ - weight · (1/k) Σ_i (R_i - R̄)²"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, eq. 5"

    type: Literal["uncertainty_weighted"]
    weight: float = Field(default=0.5, gt=0)
    """λ: penalty per unit of variance between members; the paper uses 0.5 for best-of-n and 0.1 for PPO."""


Ensemble = Annotated[Mean | WorstCase | UncertaintyWeighted, Field(discriminator="type")]
