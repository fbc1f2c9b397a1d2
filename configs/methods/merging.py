"""Config of `merge`: combine the weights of several policies without training."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from pedigree.configs.base.frozen import Arrived, Frozen


class LinearMerge(Frozen):
    """Weighted average of the weights: model soups, averaging over rounds, interpolation toward an earlier policy."""

    formula: ClassVar[str] = "W = Σ_i w_i W_i / Σ_i w_i"
    source: ClassVar[str] = "Wortsman et al. 2022, arXiv 2203.05482, §2"

    type: Literal["linear"]
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each input by label, at least 0; they need not sum to 1. Equal weights by default."""

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: dict[str, float]) -> dict[str, float]:
        for label, weight in value.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weight of {label} is {weight}, but must be a finite number of at least 0")
        if value and not sum(value.values()) > 0:
            raise ValueError("all weights are 0: give at least one a weight above 0")
        return value


class SlerpMerge(Frozen):
    """Spherical interpolation of two policies, tensor by tensor: angle and norm change uniformly from one to the other."""

    formula: ClassVar[str] = "W = sin((1-t)Ω)/sin Ω · W_1 + sin(tΩ)/sin Ω · W_2, Ω the angle between W_1 and W_2"
    source: ClassVar[str] = "Shoemake 1985, Animating rotation with quaternion curves"

    type: Literal["slerp"]
    t: float = Field(default=0.5, ge=0, le=1)
    """Position between the first policy (0) and the second (1)."""


MergeMethod = Annotated[LinearMerge | SlerpMerge, Field(discriminator="type")]


class Merge(Frozen):
    """Merges policies with the same architecture, vocabulary and chat template into one. Tokenizer and dtype are taken from the first."""

    method: MergeMethod = LinearMerge(type="linear")
    """How to combine weights of the same name."""


def merge_problem(config: Merge, arrived: Arrived) -> str | None:
    """Error message if these inputs cannot be merged under the config, else None."""
    given = list(arrived.get("policies", {}))
    if len(given) < 2:
        return f"merge takes at least 2 policies, not {len(given)}: add more under `policies`"
    match config.method:
        case SlerpMerge() if len(given) != 2:
            return f"slerp takes exactly 2 policies, not {len(given)}: remove some, or use `method: {{type: linear}}`"
        case LinearMerge(weights=weights) if weights and set(weights) != set(given):
            unknown, without = sorted(set(weights) - set(given)), [label for label in given if label not in weights]
            wrong = [f"names {', '.join(map(repr, unknown))}, which is not an input"] if unknown else []
            wrong += [f"lacks {', '.join(without)}"] if without else []
            return f"method.weights {' and '.join(wrong)}: the policies are {', '.join(given)}; give each a weight (0 excludes it)"
    return None
