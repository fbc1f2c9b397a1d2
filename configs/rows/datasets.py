"""Configs of the stages that import data and models: sources, filters, templates."""

import hashlib
import keyword
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, field_validator, model_validator

from pedigree.configs.base.frozen import Dtype, Frozen, Many, canonical_json, named_once
from pedigree.configs.base.hub_names import Repository, Revision
from pedigree.configs.base.licenses import UNKNOWN, Licence, licence
from pedigree.configs.base.packaged import ASSETS, EMBEDDER
from pedigree.configs.base.paths import RelativePath
from pedigree.configs.base.stores import ObjectUrl
from pedigree.configs.rows.expectations import Expectation, refuse_unfit
from pedigree.configs.rows.filters import Filter, Licences, Values
from pedigree.configs.rows.mixing import DRAWING, Drawn, Order, When, amounts, refuse_amounts
from pedigree.configs.rows.suite_forms import Form, load_form

RecordType = Literal["conversation", "prompt", "preference", "item"]
TEMPLATES = Path(__file__).parents[1] / "templates"
OWN = "own"
"""The model's own chat template."""


# --- external models ---------------------------------------------------------------------------------------------------


class Licensed(Frozen):
    """Third-party material under a license."""

    licence: Licence = UNKNOWN
    """License: an SPDX or Hugging Face Hub identifier, e.g. `cc-by-nc-4.0`. It is tracked through all derived artifacts, and is not part of
    any stage's identity."""


class PackagedModel(Frozen):
    """A model that ships inside a registry package, converted to safetensors."""

    type: Literal["packaged"]
    asset: str
    """Asset name, as in `configs/base/packaged.py`."""

    @field_validator("asset")
    @classmethod
    def _check_asset(cls, value: str) -> str:
        return known_asset(value, model=True)

    @computed_field
    @property
    def sha256(self) -> str:
        return ASSETS[self.asset].sha256


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
    """A Hugging Face model folder inside the project; its files are a dependency of the stage."""

    type: Literal["folder"]
    path: RelativePath
    """Relative to the project root. Artifacts and exports of Pedigree are rejected: use the stage that made the model as an input, which
    preserves its lineage."""

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


class SourceModel(Frozen):
    """Imports a model as a tracked artifact in safetensors, with a Pedigree chat template or its own."""

    source: Annotated[PackagedModel | RandomLlama | FolderModel | HubModel, Field(discriminator="type")]
    """Where the model comes from."""
    chat_template: str = "chatml"
    """Name of a file `configs/templates/NAME.jinja`, or `own` for the model's own template. It must mark assistant turns with `{%
    generation %}`. End-of-turn tokens and related tokens are added to the tokenizer and embeddings if missing."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Default template arguments for rows that do not set them, e.g. `{enable_thinking: false}`. They are written into the model's
    template."""
    add_bos: bool = False
    """Start conversations with the tokenizer's BOS token if the template does not, as in OLMo 2's training."""
    dtype: Dtype = "fp32"
    """Dtype of the stored weights."""

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, value: str) -> str:
        names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
        if value not in (OWN, *names):
            raise ValueError(f"chat template {value!r} is not one of {[*names, OWN]}: add configs/templates/{value}.jinja")
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
    def _hash_template(self) -> "SourceModel":
        """Hash the template at load time, so that edits during a run have no effect on it."""
        _ = self.chat_template_sha256
        return self

    @computed_field
    @cached_property
    def chat_template_sha256(self) -> str | None:
        """Hash of our template file; null for the model's own template, which is part of the source."""
        if self.chat_template == OWN:
            return None
        return hashlib.sha256((TEMPLATES / f"{self.chat_template}.jinja").read_bytes()).hexdigest()


def is_template_value(value: Any) -> bool:
    """Whether a value can be written into a template; null cannot, because it marks an omitted argument."""
    match value:
        case dict():
            return all(isinstance(name, str) and is_template_value(inner) for name, inner in value.items())
        case list():
            return all(map(is_template_value, value))
        case _:
            return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


# --- external data -----------------------------------------------------------------------------------------------------


class Arithmetic(Frozen):
    """Generated sums, differences and products with a checkable answer."""

    type: Literal["arithmetic"]
    operations: Many[Literal["add", "subtract", "multiply"]] = Field(min_length=1)
    """Operations to draw from."""
    digits: Many[int] = Field(min_length=1)
    """Operand lengths to draw from, e.g. [1, 2]."""
    count: int = Field(ge=1)
    """Number of rows."""
    seed: int = Field(ge=0)
    """Seed of the rows."""
    style: Literal["plain", "gsm"] = "plain"
    """`plain`: only the answer; `gsm`: one sentence of reasoning that ends with `#### ANSWER`."""


class Constraints(Frozen):
    """Generated instructions, each with one of five IFEval checks (lowercase, no comma, quotation, title, word count)."""

    type: Literal["constraints"]
    checks: Many[Literal["lowercase", "no_comma", "quotation", "title", "word_count"]] = Field(min_length=1)
    """Checks to draw from."""
    count: int = Field(ge=1)
    """Number of rows."""
    seed: int = Field(ge=0)
    """Seed of the rows."""


class Packaged(Drawn):
    """A data file that ships inside a registry package."""

    type: Literal["packaged"]
    asset: str
    """Asset name, as in `configs/base/packaged.py`."""

    @field_validator("asset")
    @classmethod
    def _check_asset(cls, value: str) -> str:
        return known_asset(value)

    @computed_field
    @property
    def sha256(self) -> str:
        return ASSETS[self.asset].sha256


Generator = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/+@()-]{0,99}$")]
"""Name of a model that wrote third-party rows."""
LAYOUT_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "chosen", "rejected", "answers", "label",
    "score", "score_chosen", "score_rejected", "strength", "finish_reason", "finish_reason_chosen", "finish_reason_rejected", "dataset",
    "ground_truth", "verifier", "source", "conversation", "context_messages", "context", "response1", "response2", "overall_preference",
    "response", "responses", "rewards", "reward_model", "problem_is_valid", "solution_is_valid", "question_type",
    "template_arguments", "chat_template_kwargs", "tools", "functions", "tool_calls",
)  # fmt: skip
"""The columns that `data/sources/layouts.py` reads."""


class Written(Licensed):
    """Third-party rows, some of which may be unusable."""

    generator: Generator | Many[Generator] = Field(default=(), exclude=True)
    """The model, or a list of models, that wrote the answers, e.g. `gpt-4o`. Tracked through derived artifacts like `licence`."""
    max_bad_rows: int | float = Field(default=0, ge=0)
    """Maximum number of unusable rows to skip, or their maximum share of all rows if below 1. The evidence lists them with reasons; with
    more, the stage fails."""

    @field_validator("max_bad_rows")
    @classmethod
    def _check_max_bad_rows(cls, value: int | float) -> int | float:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError(f"{value} is neither a whole number of rows nor a share between 0 and 1: write e.g. 3 or 0.001")
        return value


class Read(Written, Drawn):
    """Third-party rows in their native columns."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Column of the layouts (docs/layouts.md) → the dataset's column, or a dotted path such as `reward_model.ground_truth`. If given, only
    these columns are read; otherwise all columns, under their own names."""
    verifier: Literal["gsm8k", "math", "strict_math"] | None = None
    """Verifier that compares answers with the rows' `ground_truth`; by default each row's column `dataset` selects it."""
    attributes: dict[str, float] = Field(default_factory=dict)
    """For rows with one `response` each: rating column → weight. The weighted sum is the response's score, and consecutive responses to the
    same prompt are compared."""

    @field_validator("attributes")
    @classmethod
    def _check_attributes(cls, value: dict[str, float]) -> dict[str, float]:
        idle = [name for name, weight in value.items() if weight == 0]
        if idle:
            raise ValueError(f"attributes: the weight of {', '.join(idle)} is 0, which has no effect: change it, or remove the attribute")
        return value

    @model_validator(mode="after")
    def _check_columns(self) -> "Read":
        unknown = sorted(set(self.columns) - {*LAYOUT_COLUMNS, *self.attributes})
        if unknown:
            known = ", ".join((*LAYOUT_COLUMNS, *self.attributes))
            raise ValueError(f"columns {', '.join(unknown)} are not in any layout: before the colon write one of {known}")
        lacking = sorted(set(self.attributes) - set(self.columns)) if self.columns else []
        if lacking:
            raise ValueError(f"columns lack the attributes {', '.join(lacking)}: add them, or remove columns")
        return self


class Files(Read):
    """JSONL (plain or gzipped), JSON or Parquet files inside the project; their content is a dependency of the stage."""

    type: Literal["files"]
    path: RelativePath
    """A file or folder, relative to the project root. Hidden files in a folder are ignored; files that look like data but are not readable
    (`b.JSONL`, `c.jsonl.zst`) are an error."""


class Stored(Read):
    """One JSONL (plain or gzipped), JSON or Parquet file in an object store, pinned to its hash. The hash is part of the stage's identity;
    the URL is only a location and may change."""

    type: Literal["stored"]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Name of the rows' `source`, and prefix of their ids."""
    url: ObjectUrl
    """`s3://BUCKET/KEY`, ending in `.jsonl`, `.jsonl.gz`, `.json` or `.parquet`. Credentials come from the environment."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Expected hash of the file; a mismatch is an error."""

    @field_validator("url")
    @classmethod
    def _check_suffix(cls, value: str) -> str:
        if not value.endswith((".jsonl", ".jsonl.gz", ".json", ".parquet")):
            raise ValueError(f"{value!r} has an unknown format: it must end in .jsonl, .jsonl.gz, .json or .parquet")
        return value


class Hub(Read):
    """A dataset on the Hugging Face Hub, pinned to a commit."""

    type: Literal["hub"]
    repo: Repository
    """`OWNER/NAME`, or `NAME` alone."""
    revision: Revision
    """A full commit hash, because branches such as `main` move. `pin me` is a placeholder that `pedigree pin` replaces with the newest
    commit."""
    config: str | Many[str] | None = None
    """One configuration, or a list of configurations that are concatenated; by default the dataset's default configuration."""
    config_as: str | None = Field(default=None, min_length=1)
    """Column that receives the name of each row's configuration, if no other column distinguishes the parts of the dataset."""
    split: str | Many[str]
    """One split, or a list of splits that are concatenated."""
    split_as: str | None = Field(default=None, min_length=1)
    """Column that receives the name of each row's split, e.g. `source` if splits are the parts of a mixture."""

    @field_validator("split")
    @classmethod
    def _check_split(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return named_once(value, "split", "split", "train, or [train_sft, train_gen]")

    @field_validator("config")
    @classmethod
    def _check_config(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return None if value is None else named_once(value, "config", "configuration", "main, or [algebra, geometry]")

    @model_validator(mode="after")
    def _check_name_columns(self) -> "Hub":
        if self.config_as is not None and self.config is None:
            raise ValueError(
                f"config_as {self.config_as} receives a configuration's name, but config is not set: set config, or remove config_as"
            )
        if self.config_as is not None and self.config_as == self.split_as:
            raise ValueError(f"config_as and split_as are both {self.config_as}: rename one of them")
        for field, column in (("config_as", self.config_as), ("split_as", self.split_as)):
            if column in self.columns:
                raise ValueError(f"{field} {column} is also in columns: rename it, or remove it from columns")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,) if isinstance(self.split, str) else self.split

    @property
    def configs(self) -> tuple[str | None, ...]:
        return self.config if isinstance(self.config, tuple) else (self.config,)


class RowProgram(Written):
    """Rows generated by a Python file of the project, in the columns of the layouts (docs/layouts.md). The file is a dependency of the
    stage.

    It runs in a sandbox with only Python's standard library: no network, no files except a small `/tmp`, and 1 GiB of memory per process.
    It runs twice in parallel, and both runs must produce the same rows.
    """

    type: Literal["program"]
    path: RelativePath
    """A `.py` file, relative to the project root."""
    function: str = "rows"
    """Name of the function to call, with keyword arguments `count`, `seed` and the `arguments`. It returns an iterable of mappings,
    preferably a generator."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments, as JSON values."""
    count: int = Field(ge=1)
    """Rows to take; if the function produces fewer, the stage fails."""
    seed: int = Field(ge=0)
    """Passed to the function."""

    @field_validator("path")
    @classmethod
    def _check_path(cls, value: str) -> str:
        if not value.endswith(".py"):
            raise ValueError(f"{value!r} is not a Python file: name a file that ends in .py, or read rows with `type: files`")
        return value

    @field_validator("function")
    @classmethod
    def _check_function(cls, value: str) -> str:
        if not value.isidentifier() or keyword.iskeyword(value):
            raise ValueError(f"{value!r} is not a function name")
        return value

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if not name.isidentifier() or keyword.iskeyword(name) or name in ("count", "seed"):
                raise ValueError(
                    f"{name!r} is not a valid argument name: use an identifier other than count and seed, which are passed anyway"
                )
            try:
                canonical_json(given)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {given!r} is not a JSON value ({error}): write it as a string or a number") from error
        return value


class Leaks(Frozen):
    """Items of the stage's `leak_from` suites, planted on purpose to prove a recipe's decontamination."""

    type: Literal["leaks"]
    count: int = Field(ge=1)
    """Number of items to plant."""
    seed: int = Field(ge=0)
    """Seed of the draw."""
    styles: Many[Literal["verbatim", "embedded", "rewrapped"]] = ("verbatim", "embedded", "rewrapped")
    """Unchanged; embedded in other text; with different line breaks and case."""


class StageRows(Drawn):
    """Rows made by another stage, from this stage's input `rows`. Conversations also convert to prompts (without the last answer), and
    preferences to prompts or to conversations with the best answer."""

    type: Literal["artifact"]
    input: str
    """Label at the input `rows`, by default the name of the stage that made them."""


DataSource = Annotated[
    Arithmetic | Constraints | RowProgram | Packaged | Files | Stored | Hub | StageRows | Leaks, Field(discriminator="type")
]
RowSource = Annotated[Packaged | Files | Stored | Hub, Field(discriminator="type")]
"""Sources with stored rows in columns."""


class Shots(Frozen):
    """Worked examples for a suite, taken from rows in the benchmark's columns; rows that are items of the suite are skipped."""

    source: RowSource
    """Source of the rows."""
    seed: int | None = Field(default=None, ge=0)
    """Draw examples by hash of (seed, row), separately for each category if the form has shots by category. By default the first rows are
    used in file order, so that a file of the published examples reproduces them."""

    @field_validator("source")
    @classmethod
    def _check_source(cls, value: Any) -> Any:
        drawing = [name for name in DRAWING if getattr(value, name)]
        if drawing:
            shown = f"{drawing[0]} is {getattr(value, drawing[0])}"
            raise ValueError(f"{shown}, but the form sets the number of worked examples: remove it, or set a seed")
        return value


def title(source: Mapping[str, Any]) -> str | None:
    """Display name of a model or data source, from its dump; None for generated rows and random weights."""
    return source.get("repo") or source.get("asset") or source.get("path") or source.get("name")


def hub_sources(config: Frozen) -> "list[Hub | HubModel]":
    """The stage's sources on the Hugging Face Hub."""
    return [source for source in _sources(config) if isinstance(source, Hub | HubModel)]


def _sources(config: Frozen) -> tuple[Any, ...]:
    """All external sources of a stage, including worked examples."""
    if isinstance(config, PrepareData):
        return (*config.sources, *([config.shots.source] if config.shots else []))
    return (config.source,) if isinstance(config, SourceModel) else ()


def licences_of(config: Frozen) -> dict[str, list[str]]:
    """Title → stated licenses, for the external sources of a stage."""
    found: dict[str, set[str]] = {}
    for source in _sources(config):
        named = title(source.model_dump())
        if named is not None:
            stated = ASSETS[source.asset].licence if isinstance(source, Packaged | PackagedModel) else getattr(source, "licence", UNKNOWN)
            found.setdefault(named, set()).add(stated)
    return {named: sorted(stated) for named, stated in sorted(found.items())}


def generators_of(config: Frozen) -> dict[str, list[str]]:
    """Title → models that wrote the rows, for external sources that state them."""
    found: dict[str, set[str]] = {}
    for source in _sources(config):
        if isinstance(source, Written) and source.generator:
            named = [source.generator] if isinstance(source.generator, str) else source.generator
            found.setdefault(str(title(source.model_dump())), set()).update(named)
    return {named: sorted(stated) for named, stated in sorted(found.items())}


def is_of(given: Any, kind: str) -> bool:
    """Whether a raw config part has this type."""
    return isinstance(given, dict) and given.get("type") == kind


def stated_licence(source: Any) -> str | None:
    """License stated by a raw source; None for rows that Pedigree generates."""
    if is_of(source, "packaged"):
        return ASSETS[source["asset"]].licence if source.get("asset") in ASSETS else UNKNOWN
    if not any(is_of(source, kind) for kind in ("program", "files", "stored", "hub")):
        return None
    try:
        return licence(str(source.get("licence", UNKNOWN)))
    except ValueError:  # the source reports it with more detail
        return UNKNOWN


class PrepareData(Frozen):
    """Builds one validated, filtered, mixed dataset from sources."""

    record: RecordType
    """Type of the rows."""
    task: str | None = Field(default=None, pattern=r"^[a-z0-9_]+$")
    """Name of the benchmark task; required for `record: item` and not allowed otherwise."""
    split: Literal["dev", "unseen"] = "dev"
    """For suites (`record: item`): models are chosen on `dev` suites. An `unseen` suite may only evaluate the output of a `select` stage
    and the base model; nothing is trained, tuned or chosen on it. Defaults to the form's split, if there is a form."""
    form: str | None = None
    """For `record: item`: how rows in the benchmark's own columns are asked and scored, as the name of a file `configs/forms/NAME.yaml`.
    Without a form, rows are prompts with verifiers, and `evaluate` sets the sampling parameters."""
    shots: Shots | None = None
    """Worked examples to use instead of the form's own."""
    sources: Many[DataSource] = Field(min_length=1)
    """Where the rows come from."""
    total: int | None = Field(default=None, ge=1)
    """Rows in the mixture; sources take shares of it. Each source must then set `share` or `count`, and they must add up."""
    filters: Many[Filter] = ()
    """Filters, applied in order."""
    expectations: Many[Expectation] = ()
    """Requirements on the finished dataset (after filters, draws and repetitions), beyond being well-formed."""
    draw: When = "before_filters"
    """Whether the amounts of sources count rows before or after filtering."""
    order: Order = "shuffled"
    """Row order: `shuffled`; `by_source`, sources one after another, each shuffled; `interleaved`, each source spread evenly over the
    dataset; or sorted by a property of the rows. Training reshuffles them unless its own `order` is `given`."""
    seed: int = Field(default=0, ge=0)
    """Seed of the row order; with a sorted `order`, only of ties."""

    @model_validator(mode="after")
    def _check_amounts(self) -> "PrepareData":
        refuse_amounts(self.total, self.draw, self.record, self.sources)
        return self

    @property
    def brings_in(self) -> bool:
        """Whether some rows are external or generated here, so that no other stage can have checked them."""
        return not all(isinstance(source, StageRows) for source in self.sources)

    @property
    def amounts(self) -> list[int | None]:
        """Rows to take from each source; None where it depends on the size of the source."""
        return amounts(self.total, self.sources)

    @model_validator(mode="after")
    def _check_expectations(self) -> "PrepareData":
        refuse_unfit(self.expectations, self.record)
        return self

    @model_validator(mode="after")
    def _check_record(self) -> "PrepareData":
        if (self.record == "item") != (self.task is not None):
            raise ValueError(f"`task` is required for `record: item` and not allowed otherwise; the record is {self.record}")
        if self.split == "unseen" and self.record != "item":
            raise ValueError(f"split: unseen is only for suites (`record: item`), but the record is {self.record}: remove it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in_licences(cls, value: Any) -> Any:
        """Copy the licenses of the sources, which are excluded from their dumps, into license filters."""
        filters, sources = (value.get(name) for name in ("filters", "sources")) if isinstance(value, dict) else (None, None)
        if not isinstance(filters, (list, tuple)) or not isinstance(sources, (list, tuple)):
            return value
        stated = [stated_licence(source) for source in sources]
        filled = [one | {"stated": one.get("stated") or stated} if is_of(one, "licences") else one for one in filters]
        return {**value, "filters": filled}

    @model_validator(mode="after")
    def _check_filters(self) -> "PrepareData":
        for one in self.filters:
            if isinstance(one, Values):
                self._refuse_columns(one)
            if isinstance(one, Licences):
                self._refuse_licences(one)
        return self

    def _refuse_columns(self, one: Values) -> None:
        """Raise ValueError if rows have no source columns, or one row combines several source rows."""
        if self.form is not None:
            raise ValueError(f"form {self.form} reads a benchmark as published: remove the filter `values`")
        if not any(isinstance(source, Packaged | Written) for source in self.sources):
            named = ", ".join(one.columns)
            raise ValueError(f"a filter reads {named}, but no source has columns: remove it, or move it to the stage that imports the rows")
        rated = next((source for source in self.sources if isinstance(source, Read) and source.attributes), None)
        if rated:
            raise ValueError(f"source {title(rated.model_dump())} combines rows by `attributes`: remove the filter `values`")

    def _refuse_licences(self, one: Licences) -> None:
        """Raise ValueError if this stage cannot know the rows' licenses, or the filter disagrees with the sources."""
        made = next((source.input for source in self.sources if isinstance(source, StageRows)), None)
        if made:
            raise ValueError(f"rows of {made} are imported by other stages, which know their licenses: move the filter `licences` there")
        rated = any(isinstance(source, Read) and source.attributes for source in self.sources)
        if one.columns and (rated or self.form is not None):
            why = f"form {self.form} reads a benchmark as published" if self.form else "`attributes` combine rows"
            raise ValueError(f"{why}, so the filter `licences` can only use the licenses of sources: set `columns: []` in it")
        declared = [getattr(source, "licence", None) for source in self.sources]
        if len(one.stated) != len(declared) or any(
            own not in (None, UNKNOWN, filled) for own, filled in zip(declared, one.stated, strict=True)
        ):
            raise ValueError(f"the filter `licences` has stated {list(one.stated)}, but the sources state {declared}: remove `stated`")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_split(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("form"), str) and value.get("split") is None:
            return {**value, "split": load_form(value["form"]).split}
        return value

    @model_validator(mode="after")
    def _check_form(self) -> "PrepareData":
        form = self.the_form
        if form is None:
            if self.shots is not None:
                raise ValueError("`shots` requires a form: set `form`, or remove `shots`")
            return self
        if self.record != "item":
            raise ValueError(f"`form` is only for suites (`record: item`), but the record is {self.record}: remove it")
        made = [source.type for source in self.sources if not isinstance(source, Packaged | Files | Stored | Hub)]
        if made:
            raise ValueError(f"form {self.form} reads benchmark rows, which a source of type {made[0]} does not have: remove one of them")
        scoring = [source.type for source in self.sources if isinstance(source, Read) and (source.verifier or source.attributes)]
        if scoring:
            raise ValueError(f"form {self.form} defines the scoring: remove verifier and attributes from the source of type {scoring[0]}")
        if self.shots is not None and not form.prompt.shots:
            raise ValueError(f"form {self.form} has no worked examples: remove `shots`")
        if self.shots is None and len(form.examples) < form.prompt.shots:
            raise ValueError(
                f"form {self.form} needs {form.prompt.shots} worked examples, which it does not include: provide rows with them, "
                "`shots: {source: {type: files, path: ...}}`"
            )
        return self

    @property
    def the_form(self) -> Form | None:
        return load_form(self.form) if self.form else None

    @computed_field
    @cached_property
    def form_sha256(self) -> str | None:
        """Hash of the form's content; null without a form."""
        return self.the_form.sha256 if self.the_form else None


ROWS = "rows"
"""The port of `prepare_data` for rows of other stages."""
TOKENIZER = "tokenizer"
"""The port for the model whose tokenizer counts tokens."""


def known_asset(name: str, model: bool = False) -> str:
    forms = (".gguf",) if model else (".json", ".jsonl", ".jsonl.gz")
    fitting = sorted(name for name, asset in ASSETS.items() if asset.member.endswith(forms) and name not in EMBEDDER.values())
    if name not in fitting:
        raise ValueError(f"asset {name!r} is not one of {fitting}")
    return name


def form_of(config: Frozen) -> Form | None:
    """How a suite is asked and scored; None where its items are prompts with verifiers and no more."""
    return config.the_form if isinstance(config, PrepareData) else None
