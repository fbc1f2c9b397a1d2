"""Identity of a merge: one policy made of the weights of several, without training."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from configs.base.frozen import Arrived, Frozen


class LinearMerge(Frozen):
    """Weighted average of the weights: model soups, averaged rounds, interpolation towards an earlier policy."""

    formula: ClassVar[str] = "W = Σ_i w_i W_i / Σ_i w_i"
    source: ClassVar[str] = "Wortsman et al. 2022, arXiv 2203.05482, §2"

    type: Literal["linear"]
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each input by its label, at least 0; they need not sum to 1. Without them all inputs count alike."""

    @field_validator("weights")
    @classmethod
    def can_be_normalised(cls, value: dict[str, float]) -> dict[str, float]:
        for label, weight in value.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weight of {label} is {weight}: it must be a finite number of at least 0")
        if value and not sum(value.values()) > 0:
            raise ValueError("all weights are 0: give at least one a weight above 0")
        return value


class SlerpMerge(Frozen):
    """Spherical interpolation of two policies, tensor by tensor: the angle and the length change evenly from one to the other."""

    formula: ClassVar[str] = "W = sin((1-t)Ω)/sin Ω · W_1 + sin(tΩ)/sin Ω · W_2, Ω the angle between W_1 and W_2"
    source: ClassVar[str] = "Shoemake 1985, Animating rotation with quaternion curves"

    type: Literal["slerp"]
    t: float = Field(default=0.5, ge=0, le=1)
    """Way from the first policy (0) to the second (1)."""


MergeMethod = Annotated[LinearMerge | SlerpMerge, Field(discriminator="type")]


class Merge(Frozen):
    """Several policies of one architecture, vocabulary and chat template to one; tokenizer and dtype are those of the first."""

    method: MergeMethod = LinearMerge(type="linear")
    """How weights of one name become one."""


def merge_problem(config: Merge, arrived: Arrived) -> str | None:
    """Why these inputs cannot be merged as the config says, or None."""
    given = list(arrived.get("policies", {}))
    if len(given) < 2:
        return f"a merge takes at least 2 policies, not {len(given)}: name more under `policies`"
    match config.method:
        case SlerpMerge() if len(given) != 2:
            return f"slerp takes exactly 2 policies, not {len(given)}: leave some out, or take `method: {{type: linear}}`"
        case LinearMerge(weights=weights) if weights and set(weights) != set(given):
            unknown, without = sorted(set(weights) - set(given)), [label for label in given if label not in weights]
            wrong = [f"names {', '.join(map(repr, unknown))}, which is no policy here"] if unknown else []
            wrong += [f"lacks {', '.join(without)}"] if without else []
            return f"method.weights {' and '.join(wrong)}: the policies are {', '.join(given)}; give each a weight (0 leaves one out)"
    return None
