"""Identity of `synthesize`: how a language model is brought to write prompts, and which of them are kept."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, computed_field, model_validator

from configs.base.frozen import Arrived, Frozen
from configs.judging.asking import Speaker
from configs.judging.writing import load_writing, writing_sha256
from configs.methods.training import Sampling


class Persona(Frozen):
    """Of each persona prompts that such a person would write (Ge et al. 2024, arXiv 2406.20094; Tülu 3, arXiv 2411.15124, §3.1.2). A
    persona is what the user of a prompt at `prompts` says last, e.g. a row of Persona Hub."""

    type: Literal["persona"]
    task: str
    """File `configs/writing/persona/NAME.yaml`: what the prompts are like."""
    prompts: int = Field(default=1, ge=1, le=20)
    """Of each persona, all in one reply."""


class SelfInstruct(Frozen):
    """New prompts after the example of some that are drawn, those left out that resemble a seed or an earlier one (Wang et al. 2022, arXiv
    2212.10560, §2.2). In rounds the seeds may be what the round before has written."""

    type: Literal["self_instruct"]
    task: str = "instructions"
    """File `configs/writing/self_instruct/NAME.yaml`: what the prompts are like."""
    requests: int = Field(ge=1)
    """How often the model is asked, each time with examples of its own."""
    shots: int = Field(default=8, ge=1)
    """Examples that it is shown, drawn among the prompts at `prompts`."""
    prompts: int = Field(default=4, ge=1, le=20)
    """How many it is to write, all in one reply."""
    max_rouge_l: float = Field(default=0.7, gt=0, lt=1)
    """Prompts with a larger ROUGE-L (F1 of the longest common subsequence of words) with a seed, or with a prompt that was kept before,
    are left out."""


class Rewrite(Frozen):
    """Of each prompt another one: with demands added, deeper, or rarer, as its file says (Evol-Instruct: Xu et al. 2023, arXiv 2304.12244).
    What the user says last is rewritten, and earlier turns are left out."""

    type: Literal["rewrite"]
    task: str
    """File `configs/writing/rewrite/NAME.yaml`: what becomes of a prompt."""

    @property
    def prompts(self) -> int:
        """One."""
        return 1


Method = Annotated[Persona | SelfInstruct | Rewrite, Field(discriminator="type")]


class Synthesize(Frozen):
    """Prompts that a language model writes, without verifiers. They count as checked against no benchmark, whatever they were made of: a
    model may recite one."""

    method: Method
    """What the model is shown and asked for."""
    by: Speaker
    """Who writes."""
    sampling: Sampling = Sampling(temperature=1.0, max_tokens=1024)
    max_unusable_share: float = Field(default=0.2, ge=0, lt=1)
    """The stage fails when from more than this share of the replies no prompts can be read."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer prompts."""
    seed: int = Field(default=0, ge=0)
    """Of what the model draws, and of which examples it is shown."""

    @model_validator(mode="after")
    def words_are_there(self) -> "Synthesize":
        """What a run has loaded stays what it was, also where a file is edited under it."""
        load_writing(self.method.type, self.method.task)
        _ = self.wording_sha256
        return self

    @property
    def source(self) -> str:
        """Of the rows."""
        return f"{self.method.type}/{self.method.task}"

    @computed_field
    @cached_property
    def wording_sha256(self) -> dict[str, str]:
        """Of all words that are asked, what is shown apart."""
        return writing_sha256(self.method.type, self.method.task)


def synthesize_needs(config: Synthesize) -> frozenset[str]:
    """Inputs without which nobody could write as the config says."""
    return frozenset({"writer"} if config.by.type == "policy" else ())


def synthesize_problem(config: Synthesize, arrived: Arrived) -> str | None:
    """Why the inputs do not fit the config, or None."""
    if arrived.get("writer") and config.by.type != "policy":
        return f"writer is {', '.join(arrived['writer'])}, and an endpoint is asked: write `by: {{type: policy}}`, or leave it out"
    return None
