"""Config of sampling from a language model."""

from pydantic import Field

from pedigree.configs.base.frozen import Frozen


class Sampling(Frozen):
    """Sampling parameters. Temperature 0 is greedy decoding."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold; 1 disables it."""
    max_tokens: int = Field(ge=1)
    """Maximum answer length in tokens."""
