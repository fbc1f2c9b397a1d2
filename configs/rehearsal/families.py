"""Model families: what a rehearsal needs to build a tiny model of the same kind, `configs/rehearsal/models/FAMILY.yaml`."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pedigree.configs.base.document import read_document
from pedigree.configs.base.frozen import Dtype, Frozen, Many
from pedigree.configs.base.mistakes import validated

LEARNED_TOKENS = 48
"""Tokens, at the end of a dialogue, on which a rehearsal model is trained."""


class TokenizerFamily(Frozen):
    """A BPE tokenizer without its vocabulary."""

    form: Literal["bytes", "sentencepiece"] = "bytes"
    """`bytes`: byte-level BPE, pre-tokenized by `split`; `sentencepiece`: character-level BPE with a marker for spaces and at the start of
    each text, and byte fallback for unknown characters."""
    split: str | None = None
    """Regular expression for pre-tokenization."""
    control: Many[str] = Field(min_length=1)
    """Control tokens used by templates and training, in order of their ids."""
    eos: str
    """End-of-text token."""
    bos: str | None = None
    """Beginning-of-text token."""
    pad: str | None = None
    """Padding token."""
    unk: str | None = None
    """Unknown token."""
    begins: bool = False
    """Whether the tokenizer itself prepends `bos` to every text."""

    @model_validator(mode="after")
    def _check_split(self) -> "TokenizerFamily":
        if (self.form == "bytes") != (self.split is not None):
            raise ValueError("`split` is required for form bytes and not allowed for sentencepiece: add or remove it")
        return self

    @model_validator(mode="after")
    def _check_tokens(self) -> "TokenizerFamily":
        strange = sorted({token for token in (self.eos, self.bos, self.pad, self.unk) if token} - set(self.control))
        if strange:
            raise ValueError(f"{', '.join(strange)} must be among the control tokens: add them to control")
        return self


class ModelFamily(Frozen):
    """Models with one architecture and one tokenizer."""

    repos: Many[str] = Field(min_length=1)
    """Names or `*` patterns of Hub repositories, packaged assets and folders."""
    model_type: str
    """Architecture name in config.json and transformers."""
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    tied: bool = False
    """Whether the output head shares the embedding weights."""
    dtype: Dtype = "bf16"
    """Dtype of the published weights."""
    template: str | None = None
    """A file in `configs/templates`: the tokenizer's own chat template, without generation markers around assistant turns, which hardly any
    model has."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of config.json that affect computation."""
    tokenizer: TokenizerFamily
    """Tokenizer of the family."""


class Dialogue(Frozen):
    """A training example for a rehearsal model."""

    messages: Many[dict[str, str]]
    """Turns with `role` and `content`; the last is the user's."""
    answer: str
    """The model's answer."""


class ModelPlan(Frozen):
    """Everything that determines a rehearsal model."""

    family: ModelFamily
    """Model family."""
    template: str
    """Chat template with which it will be used."""
    comes_with_template: bool = False
    """Whether its tokenizer includes that template."""
    texts: Many[str]
    """Texts on which the vocabulary is trained."""
    dialogues: Many[Dialogue]
    """Training examples."""
    reads: bool = True
    """Whether answers depend on more than the last token; a judge gives the same answer to every question, however long."""
    layers: int = Field(default=2, ge=1)
    vocabulary: int = Field(default=1024, ge=300)
    context: int = Field(default=16384, ge=256)
    """Maximum number of positions."""
    steps: int = Field(default=300, ge=0)
    """Training steps."""
    seed: int = Field(default=0, ge=0)


def families(folders: Sequence[Path]) -> dict[str, ModelFamily]:
    """Name → family, for all files in these folders; the first folder wins.

    Raises:
        ConfigError: a file is invalid.
    """
    found: dict[str, ModelFamily] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        document = read_document(path)
        found.setdefault(path.stem, validated(ModelFamily, document, (), document.value, "a model family"))
    return found


def family_of(name: str, known: Mapping[str, ModelFamily]) -> ModelFamily | None:
    """The family of a model, by its repository, asset or folder; the longest matching pattern wins. None if no family matches."""
    fitting = [(pattern, one) for one in known.values() for pattern in one.repos if fnmatchcase(name, pattern)]
    return max(fitting, key=lambda found: len(found[0]))[1] if fitting else None
