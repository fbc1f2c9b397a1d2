"""Config of the stage that samples answers: prompts, policies, temperatures."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pedigree.configs.base.frozen import Arrived, Dtype, Frozen, Many, added
from pedigree.configs.methods.environment_programs import AnyPlayed
from pedigree.configs.methods.language_model import Sampling


class Window(Frozen):
    """A slice of a prompt pool: rows [index * count, (index + 1) * count). Rounds use fresh prompts through different indices."""

    count: int = Field(ge=1)
    """Prompts per window."""
    index: int = Field(default=0, ge=0)
    """Number of the window, from 0: in a group of rounds, `$round-1` begins with the first prompts, and `$round` leaves them unused."""


class OnPolicy(Frozen):
    """The policies of a pool that are to be trained, and the share of prompts that they answer."""

    policies: Many[str] = Field(min_length=1)
    """Labels at the input `policies`."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Share of prompts answered by one of them along with `policies_per_prompt` - 1 others, chosen by hash of (seed, prompt id); the
    remaining prompts are answered by other policies only. By default they are drawn like the others."""


Temperature = Annotated[float, Field(ge=0)]


class PoolSampling(Frozen):
    """Sampling parameters of a policy's answers to a prompt."""

    temperature: Temperature | Many[Temperature] = 1.0
    """0 is greedy decoding. With a list, a policy's answers to a prompt cycle through the temperatures by index, and each row records its
    own."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold; 1 disables it."""
    max_tokens: int = Field(ge=1)
    """Maximum answer length in tokens."""

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if isinstance(value, tuple) and (len(value) < 2 or len(set(value)) < len(value)):
            raise ValueError(f"temperature {list(value)} must list at least 2 distinct values, e.g. [0.6, 1.0], or be a single number")
        return value

    @property
    def temperatures(self) -> tuple[float, ...]:
        """In the order in which answers use them."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @property
    def first(self) -> Sampling:
        """Sampling parameters of a policy's first answer to a prompt."""
        return Sampling(temperature=self.temperatures[0], top_p=self.top_p, max_tokens=self.max_tokens)


class Sample(Frozen):
    """Samples answers to prompts from one or several policies: from all of them, or from some drawn per prompt."""

    sampling: PoolSampling
    """Sampling parameters."""
    samples_per_prompt: int = Field(ge=1)
    """Answers per prompt and policy; a multiple of the number of temperatures."""
    prompts: Window
    """The prompts to answer."""
    policies_per_prompt: int | None = Field(default=None, ge=1)
    """Number of policies that answer each prompt, drawn by hash of (seed, prompt id); all by default. Tülu 3 draws 4 of 22."""
    on_policy: OnPolicy | None = None
    """Marks the on-policy answers, through `judge` and up to the preferences from `pair`; the metrics contain their shares."""
    chunk_size: Annotated[int, Field(ge=1)] | Literal["continuous"] = 64
    """Requests submitted together: the unit of generation and resume, with results that are bit-identical after any interruption.
    `continuous`: submit all requests and store each answer as it finishes, so that none waits for the longest answer of a chunk; an
    interrupted run may then sample different tokens than an uninterrupted one, and is marked accordingly."""
    environment: AnyPlayed | None = added(None)
    """A class of the project, or a simulated user, that answers the policies between several turns. The rows are judgments then: the last
    answer of a conversation, in the conversation before it, with its score."""
    dtype: Dtype = "bf16"
    """Dtype for inference."""
    seed: int = Field(default=0, ge=0)
    """Sampling seed."""

    @model_validator(mode="after")
    def _check_together(self) -> "Sample":
        temperatures = self.sampling.temperatures
        if self.samples_per_prompt % len(temperatures):
            raise ValueError(
                f"samples_per_prompt {self.samples_per_prompt} is not divisible by the {len(temperatures)} temperatures "
                f"{', '.join(map(str, temperatures))}: make it a multiple of {len(temperatures)}, or change the temperatures"
            )
        if self.on_policy is not None and self.on_policy.share is not None and self.policies_per_prompt is None:
            raise ValueError(
                f"on_policy.share {self.on_policy.share} has no effect without policies_per_prompt, because all policies answer every "
                "prompt: set policies_per_prompt, or remove the share"
            )
        if self.environment and self.chunk_size == "continuous":
            raise ValueError("chunk_size is continuous, but the turns of conversations with an environment are chunks: set a number")
        return self


def sample_problem(config: Sample, arrived: Arrived) -> str | None:
    """Error message if the config does not fit this pool of policies, else None."""
    pool = list(arrived.get("policies", {}))
    own = config.on_policy.policies if config.on_policy else ()
    unknown = [label for label in own if label not in pool]
    if unknown:
        return f"on_policy.policies names {', '.join(unknown)}, but the input policies has {', '.join(pool)}: use one of them"
    count = config.policies_per_prompt
    if count is None:
        return None
    if count > len(pool):
        return f"policies_per_prompt is {count}, but the input policies has {len(pool)}: lower it, or add policies"
    share = config.on_policy.share if config.on_policy else None
    others, needed = len(pool) - len(set(own)), count if share != 1 else count - 1
    if share is not None and others < needed:
        return (
            f"policies_per_prompt {count} with on_policy.share {share} needs {needed} policies that are not on_policy, but the input "
            f"policies has {others}: add policies, or lower policies_per_prompt"
        )
    return None
