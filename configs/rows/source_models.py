"""Config of the stage that imports a model."""

import hashlib
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, field_validator, model_validator

from pedigree.configs.base.frozen import Dtype, Frozen
from pedigree.configs.base.hub_names import Repository, Revision
from pedigree.configs.base.jinja import jinja_problem
from pedigree.configs.base.mistakes import not_one_of
from pedigree.configs.base.paths import SourcePath, relative_path
from pedigree.configs.rows.row_sources import Licensed, OfAsset

TEMPLATES = Path(__file__).parents[1] / "templates"
JINJA = ".jinja"
"""End of the path of a template in the project; packaged ones have names."""
OWN, CHATML = "own", "chatml"
"""The model's own chat template, and that of a model with random weights, which has none."""


def shipped_templates() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


class PackagedModel(OfAsset):
    """A model that ships inside a registry package, converted to safetensors."""

    forms = (".gguf",)


class RandomLlama(Frozen):
    """A Llama with random weights and a byte-level BPE tokenizer trained on the stage's `corpus` input."""

    type: Literal["random_llama"]
    layers: int = Field(ge=1)
    """Number of layers."""
    hidden: int = Field(ge=8)
    """Hidden size; a multiple of `heads`."""
    heads: int = Field(ge=1)
    """Attention heads; a multiple of `kv_heads`."""
    kv_heads: int = Field(ge=1)
    """Key-value heads."""
    ffn: int = Field(ge=8)
    """Intermediate size of the MLP."""
    vocabulary: int = Field(ge=300)
    """Vocabulary size of the tokenizer."""
    context: int = Field(ge=16)
    """Maximum sequence length."""
    seed: int = Field(default=0, ge=0)
    """Seed of the weights."""

    @model_validator(mode="after")
    def _check_heads(self) -> "RandomLlama":
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}, and heads of kv_heads {self.kv_heads}")
        return self


class FolderModel(Licensed):
    """A Hugging Face model folder of this machine; its files are a dependency of the stage."""

    type: Literal["folder"]
    path: SourcePath
    """Relative to the project root, or anywhere on this machine (`/models/base`, `~/base`, `../base`); links are followed, as in the cache
    of the Hub. Of a path outside the project, only the last name is part of identity. The lineage of a folder that `pedigree export` wrote
    is adopted with the model."""

    @field_validator("path")
    @classmethod
    def _check_path(cls, value: str) -> str:
        if value.split("/")[0] == "artifacts":
            raise ValueError(f"{value!r} is an artifact of this project: use the stage that made it, RECIPE/STAGE, as an input instead")
        return value


class HubModel(Licensed):
    """A model on the Hugging Face Hub, pinned to a commit."""

    type: Literal["hub"]
    repo: Repository
    """`OWNER/NAME`, or `NAME` alone."""
    revision: Revision
    """A full commit hash, because branches such as `main` move. `pin me` is a placeholder that `pedigree pin` replaces with the newest
    commit."""


def named(source: PackagedModel | RandomLlama | FolderModel | HubModel) -> str | None:
    """The repository, asset or folder of a source; None if it is made by a rule."""
    return next((str(getattr(source, place)) for place in ("repo", "path", "asset") if hasattr(source, place)), None)


class SourceModel(Frozen):
    """Imports a model as a tracked artifact in safetensors, with a Pedigree chat template or its own."""

    source: Annotated[PackagedModel | RandomLlama | FolderModel | HubModel, Field(discriminator="type")]
    """Where the model comes from."""
    chat_template: str = OWN
    """`own` for the model's own template, or one that replaces it: the name of a packaged template, or the path of a `.jinja` file relative
    to the project root, whose content is a dependency of the stage. `chatml` is the default of `random_llama`. End-of-turn tokens and
    related tokens of a template that replaces another are added to the tokenizer and embeddings if missing."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Default template arguments for rows that do not set them, e.g. `{enable_thinking: false}`. They are written into the model's
    template."""
    add_bos: bool = False
    """Start conversations with the tokenizer's BOS token if the template does not, as in OLMo 2's training."""
    dtype: Dtype = "fp32"
    """Dtype of the stored weights."""

    @model_validator(mode="before")
    @classmethod
    def _choose_template(cls, given: Any) -> Any:
        source = given.get("source") if isinstance(given, dict) else None
        if getattr(source, "type", source.get("type") if isinstance(source, dict) else None) == "random_llama":
            return {"chat_template": CHATML, **given}
        return given

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, value: str) -> str:
        if value.endswith(JINJA):
            return relative_path(value)
        if value not in (names := (OWN, *shipped_templates())):
            remedy = f"for a template of your own write its path in the project, such as configs/templates/{value}{JINJA}"
            raise ValueError(f"chat template {not_one_of(value, names, remedy)}")
        if value != OWN:
            template_text(value, {})
        return value

    @field_validator("template_arguments")
    @classmethod
    def _check_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        strange = sorted(name for name, given in value.items() if not name.isidentifier() or not is_template_value(given))
        if strange:
            form = "an identifier with a string, number, boolean, list or mapping without nulls"
            raise ValueError(f"template_arguments {', '.join(strange)}: each must be {form}")
        if "tools" in value:
            raise ValueError(
                "template_arguments.tools has no effect, because templates receive each conversation's tools: put them in the rows"
            )
        return value

    @model_validator(mode="after")
    def _check_own(self) -> "SourceModel":
        if self.chat_template == OWN and isinstance(self.source, RandomLlama):
            raise ValueError(f"chat_template is {OWN}, but a random_llama has none: name one of {', '.join(shipped_templates())}")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """The template, if it is a file of the project."""
        return (self.chat_template,) if self.chat_template.endswith(JINJA) else ()

    @property
    def replaces(self) -> bool:
        """Whether it replaces the template of a model that may have one."""
        return self.chat_template != OWN and not isinstance(self.source, RandomLlama)

    @computed_field
    @cached_property
    def chat_template_sha256(self) -> str | None:
        """Hash of a packaged template; null for the model's own, which is part of the source, and for a file, a dependency of the stage."""
        if self.chat_template == OWN or self.files:
            return None
        return hashlib.sha256((TEMPLATES / f"{self.chat_template}.jinja").read_bytes()).hexdigest()


def template_text(name: str, files: Mapping[str, Path]) -> str:
    """Text of a packaged template, or of one of the project's `files`: path in the project → file.

    Raises:
        ValueError: it is not a Jinja template.
    """
    path, shown_as = (files[name], name) if name.endswith(JINJA) else (TEMPLATES / f"{name}{JINJA}", f"configs/templates/{name}{JINJA}")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown_as} is not UTF-8: {error}") from error
    problem = jinja_problem(text)
    if problem:
        raise ValueError(f"{shown_as} is not a Jinja template, {problem}")
    return text


def is_template_value(value: Any) -> bool:
    """Whether a value can be written into a template; null cannot, because it marks an omitted argument."""
    match value:
        case dict():
            return all(isinstance(name, str) and is_template_value(inner) for name, inner in value.items())
        case list():
            return all(map(is_template_value, value))
        case _:
            return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
