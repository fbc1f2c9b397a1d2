"""Config of the optimizer, used by every stage that trains."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pedigree.configs.base.frozen import Frozen


class Optimizer(Frozen):
    """AdamW (Loshchilov & Hutter 2019) with a learning-rate schedule over the whole run."""

    learning_rate: float = Field(gt=0, le=1)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after warm-up; `linear` and `cosine` decay to zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of all planned updates spent in linear warm-up from 0, as in transformers: the first update has learning rate 0. Planned
    updates that are skipped, because an RL step has no gradient signal, still advance the schedule."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Updates in linear warm-up, instead of a fraction."""
    weight_decay: float = Field(default=0.0, ge=0)
    """λ: each update shrinks a decayed weight by the fraction learning rate · λ."""
    decayed: Literal["matrices", "all"] = "matrices"
    """`matrices` exempts norms and biases, which have fewer than two dimensions."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip gradients to this global L2 norm; `null` disables clipping."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio:
            raise ValueError(f"warmup_ratio {self.warmup_ratio} and warmup_steps {self.warmup_steps} are both set: remove one")
        return self

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _check_max_grad_norm(cls, value: Any) -> Any:
        if value == 0:
            raise ValueError(f"must be greater than 0, not {value}, which would zero every gradient: write null to disable clipping")
        return value
