"""Config of `synthesize`: prompting a language model to write prompts, and filters for them."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, computed_field, model_validator

from pedigree.configs.base.frozen import Frozen
from pedigree.configs.judging.language_model import Speaker
from pedigree.configs.judging.writing_prompts import load_writing, writing_sha256
from pedigree.configs.methods.training import Sampling


class Persona(Frozen):
    """Prompts that a given persona would write (Ge et al. 2024, arXiv 2406.20094; Tülu 3, arXiv 2411.15124, §3.1.2). The persona is the
    last user turn of a prompt at `prompts`, e.g. a row of Persona Hub."""

    type: Literal["persona"]
    task: str
    """File `configs/writing/persona/NAME.yaml`, which describes the prompts."""
    prompts: int = Field(default=1, ge=1, le=20)
    """Prompts per persona, all in one reply."""


class SelfInstruct(Frozen):
    """New prompts from randomly drawn examples, without those similar to a seed or an earlier prompt (Wang et al. 2022, arXiv 2212.10560,
    §2.2). In rounds, the seeds can be the prompts of the previous round."""

    type: Literal["self_instruct"]
    task: str = "instructions"
    """File `configs/writing/self_instruct/NAME.yaml`, which describes the prompts."""
    requests: int = Field(ge=1)
    """Number of requests, each with its own examples."""
    shots: int = Field(default=8, ge=1)
    """Examples per request, drawn from the prompts at `prompts`."""
    prompts: int = Field(default=4, ge=1, le=20)
    """Prompts to write per request, all in one reply."""
    max_rouge_l: float = Field(default=0.7, gt=0, lt=1)
    """Drop prompts whose ROUGE-L (F1 of the longest common subsequence of words) with a seed or an earlier kept prompt is higher."""


class Rewrite(Frozen):
    """Rewrites each prompt: with added requirements, deeper, or rarer, as described in its file (Evol-Instruct: Xu et al. 2023, arXiv
    2304.12244). Only the last user turn is rewritten; earlier turns are dropped."""

    type: Literal["rewrite"]
    task: str
    """File `configs/writing/rewrite/NAME.yaml`, which describes the rewriting."""

    @property
    def prompts(self) -> int:
        """Always 1."""
        return 1


Method = Annotated[Persona | SelfInstruct | Rewrite, Field(discriminator="type")]


class Synthesize(Frozen):
    """Prompts written by a language model, without verifiers. They always count as not decontaminated, because a model may recite a
    benchmark."""

    method: Method
    """The material shown to the model and the request."""
    by: Speaker
    """The model that writes."""
    sampling: Sampling = Sampling(temperature=1.0, max_tokens=1024)
    """Sampling parameters of the writer."""
    max_unusable_share: float = Field(default=0.2, ge=0, lt=1)
    """The stage fails if no prompts can be parsed from more than this share of the replies."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer prompts."""
    seed: int = Field(default=0, ge=0)
    """Seed for the model's sampling and the choice of examples."""

    @model_validator(mode="after")
    def _hash_wording(self) -> "Synthesize":
        """Load and hash the wording at load time, so that edits during a run have no effect on it."""
        load_writing(self.method.type, self.method.task)
        _ = self.wording_sha256
        return self

    @property
    def source(self) -> str:
        """Source name of the rows."""
        return f"{self.method.type}/{self.method.task}"

    @computed_field
    @cached_property
    def wording_sha256(self) -> dict[str, str]:
        """Hashes of the prompt's wording, without the material."""
        return writing_sha256(self.method.type, self.method.task)
