"""Config of ratings by a language model: the model, the rubrics, the sampling parameters."""

from functools import cached_property

from pydantic import Field, computed_field, field_validator, model_validator

from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.judging.language_model import Speaker
from pedigree.configs.judging.rubrics import load_rubric, wording_sha256
from pedigree.configs.methods.training import Sampling


class Rating(Frozen):
    """Ratings from 1 to 5 by a language model: one question per answer and rubric, each answered in text that ends with a rating."""

    rubrics: Many[str] = Field(min_length=1)
    """Files `configs/rubrics/NAME.yaml`. Tülu 3 uses helpfulness, instruction_following, honesty, truthfulness."""
    by: Speaker
    """The model that rates."""
    sampling: Sampling = Sampling(temperature=0.0, max_tokens=512)
    """Sampling parameters of the rater."""
    seed: int = Field(default=0, ge=0)
    """Sampling seed."""

    @field_validator("rubrics")
    @classmethod
    def _check_rubrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            load_rubric(name)
        if len(set(value)) < len(value):
            raise ValueError(f"duplicate rubric in {', '.join(value)}: its ratings would count twice")
        return value

    @model_validator(mode="after")
    def _hash_wording(self) -> "Rating":
        """Hash the rubrics at load time, so that edits during a run have no effect on it."""
        _ = self.wording_sha256
        return self

    @computed_field
    @cached_property
    def wording_sha256(self) -> dict[str, str]:
        """Hashes of the prompt's wording."""
        return wording_sha256(self.rubrics)
