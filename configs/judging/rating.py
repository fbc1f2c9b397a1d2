"""Identity of ratings by a language model: who is asked, on which rubrics, how its words are drawn."""

from functools import cached_property

from pydantic import Field, computed_field, field_validator, model_validator

from configs.base.frozen import Frozen, Many
from configs.judging.asking import Speaker
from configs.judging.rubrics import load_rubric, wording_sha256
from configs.methods.training import Sampling


class Rating(Frozen):
    """Ratings from 1 to 5 by a language model: one question for each answer and rubric, each answered in words that end with a rating."""

    rubrics: Many[str] = Field(min_length=1)
    """Files `configs/rubrics/NAME.yaml`. Tülu 3 takes helpfulness, instruction_following, honesty, truthfulness."""
    by: Speaker
    """Who rates."""
    sampling: Sampling = Sampling(temperature=0.0, max_tokens=512)
    seed: int = Field(default=0, ge=0)

    @field_validator("rubrics")
    @classmethod
    def exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            load_rubric(name)
        if len(set(value)) < len(value):
            raise ValueError(f"a rubric stands twice in {', '.join(value)}: its ratings would count twice")
        return value

    @model_validator(mode="after")
    def looked_at_once(self) -> "Rating":
        """What a run has loaded stays what it was, also where a rubric is edited under it."""
        _ = self.wording_sha256
        return self

    @computed_field
    @cached_property
    def wording_sha256(self) -> dict[str, str]:
        """Of all words that are asked."""
        return wording_sha256(self.rubrics)
