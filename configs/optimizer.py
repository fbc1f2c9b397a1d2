"""Identity of an optimizer, for every model that is trained."""

from typing import Literal

from pydantic import Field

from configs.frozen import Frozen


class Optimizer(Frozen):
    """AdamW (Loshchilov & Hutter 2019) with a learning-rate schedule over the whole run."""

    learning_rate: float = Field(gt=0, le=1)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after warm-up; linear and cosine end at zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of all optimizer steps spent in linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global L2 norm."""
