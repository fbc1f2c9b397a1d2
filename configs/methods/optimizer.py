"""Identity of an optimizer, for every model that is trained."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.base.frozen import Frozen


class Optimizer(Frozen):
    """AdamW (Loshchilov & Hutter 2019) with a learning-rate schedule over the whole run."""

    learning_rate: float = Field(gt=0, le=1)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after warm-up; linear and cosine end at zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of all planned updates spent in linear warm-up. A planned update that is not made, because a step of reinforcement learning has
    nothing to learn from, still moves the schedule."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Updates in linear warm-up, instead of a share of all."""
    weight_decay: float = Field(default=0.0, ge=0)
    """λ: each update takes learning rate · λ off a decayed weight, as a share of it."""
    decayed: Literal["matrices", "all"] = "matrices"
    """`matrices` spares norms and biases, which have fewer than two dimensions."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are clipped to this global L2 norm; `null` for none."""

    @model_validator(mode="after")
    def warmup_is_said_once(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio:
            raise ValueError(f"warmup_ratio {self.warmup_ratio} and warmup_steps {self.warmup_steps} are both given: leave one out")
        return self

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def zero_is_not_none(cls, value: Any) -> Any:
        if value == 0:
            raise ValueError("max_grad_norm is 0, which would clip every gradient to nothing: it must be above 0, or null for no clipping")
        return value
