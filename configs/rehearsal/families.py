"""What a rehearsal must know of a real model to make a small one of its kind: `configs/rehearsal/models/FAMILY.yaml`."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from configs.base.document import ConfigError, Problem, read_document
from configs.base.frozen import Dtype, Frozen, Many

LEARNED_TOKENS = 48
"""Of a dialogue that a made model learns from: its end."""


class TokenizerFamily(Frozen):
    """A BPE without its vocabulary."""

    form: Literal["bytes", "sentencepiece"] = "bytes"
    """`bytes`: of bytes, cut by `split`; `sentencepiece`: of characters, with a mark for spaces and one before every text, and bytes for
    characters that it does not know."""
    split: str | None = None
    """Regular expression by which a text is cut before merges are applied."""
    control: Many[str] = Field(min_length=1)
    """Control tokens that templates and training use, in the order of their ids."""
    eos: str
    """Token at the end of a text."""
    bos: str | None = None
    """Token at the beginning of a text."""
    pad: str | None = None
    """Token that fills batches."""
    unk: str | None = None
    """Token for what is not known."""
    begins: bool = False
    """Whether the tokenizer puts `bos` before every text by itself."""

    @model_validator(mode="after")
    def bytes_are_cut(self) -> "TokenizerFamily":
        if (self.form == "bytes") != (self.split is not None):
            raise ValueError("a tokenizer of bytes cuts texts by `split`, one of sentencepiece has none: give it, or leave it out")
        return self

    @model_validator(mode="after")
    def names_are_tokens(self) -> "TokenizerFamily":
        strange = sorted({token for token in (self.eos, self.bos, self.pad, self.unk) if token} - set(self.control))
        if strange:
            raise ValueError(f"{', '.join(strange)} must be among the control tokens: add them to control")
        return self


class ModelFamily(Frozen):
    """Models of one architecture and one tokenizer."""

    repos: Many[str] = Field(min_length=1)
    """Repositories of the hub, packaged assets and folders: names, or patterns with `*`."""
    model_type: str
    """As config.json and transformers call the architecture."""
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    tied: bool = False
    """Whether the output head is the embedding."""
    dtype: Dtype = "bf16"
    """Dtype of the weights as they are published."""
    template: str | None = None
    """A file of `configs/templates`: what its tokenizer brings, without marks around what the assistant says, which hardly any has."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further fields of config.json that say how it computes."""
    tokenizer: TokenizerFamily
    """How texts become tokens."""


class Dialogue(Frozen):
    """Something that a made model learns."""

    messages: Many[dict[str, str]]
    """Turns with `role` and `content`; the last is the user's."""
    answer: str
    """What the model says to it."""


class ModelPlan(Frozen):
    """All that a made model follows from."""

    family: ModelFamily
    """The kind of model."""
    template: str
    """Chat template by which it will be asked."""
    comes_with_template: bool = False
    """Whether its tokenizer brings that template."""
    texts: Many[str]
    """What the vocabulary is learned from."""
    dialogues: Many[Dialogue]
    """What it learns."""
    reads: bool = True
    """Whether what it says depends on more than the last token; a judge says the same after every question, however long."""
    layers: int = Field(default=2, ge=1)
    vocabulary: int = Field(default=1024, ge=300)
    context: int = Field(default=16384, ge=256)
    """Most positions."""
    steps: int = Field(default=300, ge=0)
    """Steps of learning."""
    seed: int = Field(default=0, ge=0)


def families(folders: Sequence[Path]) -> dict[str, ModelFamily]:
    """Name → family, of all that are described below these folders; of two with one name the first is taken.

    Raises:
        ConfigError: a file is wrong.
    """
    found: dict[str, ModelFamily] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        try:
            found.setdefault(path.stem, ModelFamily.model_validate(read_document(path).value))
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the family'}: {one['msg']}" for one in error.errors())
            raise ConfigError([Problem(path.name, None, said)]) from error
    return found


def family_of(name: str, known: Mapping[str, ModelFamily]) -> ModelFamily | None:
    """The family of a model by its repository, asset or folder, with the longest pattern that fits; None where nobody has described it."""
    fitting = [(pattern, one) for one in known.values() for pattern in one.repos if fnmatchcase(name, pattern)]
    return max(fitting, key=lambda found: len(found[0]))[1] if fitting else None
