"""Identity of ratings by a language model: who is asked, on which rubrics, how its words are drawn."""

import re
from functools import cached_property
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, computed_field, field_validator, model_validator

from configs.frozen import Dtype, Frozen, Many
from configs.rubrics import load_rubric, wording_sha256
from configs.training import Sampling


def endpoint_url(value: str) -> str:
    """`http(s)://HOST[:PORT][/PATH]`, without a slash at its end."""
    parts = urlsplit(value)
    if "@" in parts.netloc or parts.query or parts.fragment:  # the value is not repeated: it may hold a password
        raise ValueError("a URL holds no credentials and no options: give the key in the environment (see docs/recipes.md)")
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", value):
        raise ValueError(f"{value!r} is not http://HOST:PORT/PATH or https://HOST/PATH, e.g. https://api.openai.com/v1")
    _ = parts.port  # raises where it is no number
    return value.rstrip("/")


def key_variable(base_url: str) -> str:
    """Name of the environment variable with the key for a server: it is sent to the host in its name and to no other, whatever a recipe
    says. `https://api.openai.com/v1` → `PEDIGREE_API_OPENAI_COM_KEY`; a hyphen becomes two underscores, an underscore three."""
    host = (urlsplit(base_url).hostname or "").upper().replace("_", "___").replace("-", "__")
    return f"PEDIGREE_{re.sub('[^A-Z0-9_]', '_', host)}_KEY"


class PolicyJudge(Frozen):
    """A policy at the input `judge`, run by vLLM inside the job."""

    type: Literal["policy"]
    chunk_size: int = Field(default=64, ge=1)
    """Requests submitted together: the unit of generation and resume."""
    dtype: Dtype = "bf16"


class EndpointJudge(Frozen):
    """A server that speaks OpenAI's chat completions: OpenAI's own, vLLM's, or any other."""

    type: Literal["endpoint"]
    base_url: Annotated[str, AfterValidator(endpoint_url)]
    """Up to where `/chat/completions` begins, e.g. `https://api.openai.com/v1`. Part of what the result is: behind another one may be
    another model."""
    model: str = Field(min_length=1)
    """As the server calls it; a dated name where it has one. What the server says that it was is recorded."""
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls the longest answer; OpenAI's reasoning models want the second."""


class Rating(Frozen):
    """Ratings from 1 to 5 by a language model: one question for each answer and rubric, each answered in words that end with a rating."""

    rubrics: Many[str] = Field(min_length=1)
    """Files `configs/rubrics/NAME.yaml`. Tülu 3 takes helpfulness, instruction_following, honesty, truthfulness."""
    by: Annotated[PolicyJudge | EndpointJudge, Field(discriminator="type")]
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
