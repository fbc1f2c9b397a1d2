"""Identity of the stages that bring data and models in from outside: sources, filters, templates."""

import hashlib
import keyword
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, field_validator, model_validator

from configs.base.frozen import Dtype, Frozen, Many, canonical_json, named_once
from configs.base.hub_names import Repository, Revision
from configs.base.licenses import UNKNOWN, Licence, licence
from configs.base.packaged import ASSETS, EMBEDDER
from configs.base.paths import RelativePath
from configs.base.stores import ObjectUrl
from configs.rows.expectations import Expectation, refuse_unfit
from configs.rows.filters import Filter, Licences, Values
from configs.rows.mixing import DRAWING, Drawn, Order, When, amounts, refuse_amounts
from configs.rows.suite_forms import Form, load_form

RecordType = Literal["conversation", "prompt", "preference", "item"]
TEMPLATES = Path(__file__).parents[1] / "templates"
OWN = "own"
"""The chat template that a model comes with."""


# --- models that come from outside -------------------------------------------------------------------------------------


class Licensed(Frozen):
    """What others have made, and hand on under a licence."""

    licence: Licence = UNKNOWN
    """Under which licence it is handed on: an identifier of SPDX or of the Hugging Face hub, e.g. `cc-by-nc-4.0`. It travels with all that
    is made from it, and is no part of any stage's identity."""


class PackagedModel(Frozen):
    """A model that ships inside a registry package, converted to safetensors."""

    type: Literal["packaged"]
    asset: str
    """A name in `configs/base/packaged.py`."""

    @field_validator("asset")
    @classmethod
    def known(cls, value: str) -> str:
        return known_asset(value, model=True)

    @computed_field
    @property
    def sha256(self) -> str:
        return ASSETS[self.asset].sha256


class RandomLlama(Frozen):
    """A Llama with random weights and a byte-level BPE tokenizer trained on the stage's `corpus` input."""

    type: Literal["random_llama"]
    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    ffn: int = Field(ge=8)
    vocabulary: int = Field(ge=300)
    context: int = Field(ge=16)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def heads_divide(self) -> "RandomLlama":
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}, and that of kv_heads {self.kv_heads}")
        return self


class FolderModel(Licensed):
    """A Hugging Face folder inside the project; its files are a dependency of the stage."""

    type: Literal["folder"]
    path: RelativePath
    """Relative to the project root. An export of Pedigree is refused: name the stage that made it as input, so that its lineage goes on."""

    @field_validator("path")
    @classmethod
    def is_no_artifact(cls, value: str) -> str:
        if value.split("/")[0] == "artifacts":
            raise ValueError(f"{value!r} is an artifact of this project: name the stage that made it, RECIPE/STAGE, as input instead")
        return value


class HubModel(Licensed):
    """A model of the Hugging Face hub, pinned to a commit."""

    type: Literal["hub"]
    repo: Repository
    revision: Revision
    """A full commit hash: names like `main` move. `pin me` stands for the newest commit until `pedigree pin` has written it here."""


class SourceModel(Frozen):
    """Brings a model into the project as a tracked artifact, in safetensors, with our chat template."""

    source: Annotated[PackagedModel | RandomLlama | FolderModel | HubModel, Field(discriminator="type")]
    chat_template: str = "chatml"
    """A file `configs/templates/NAME.jinja`, or `own`: the one that the model comes with. It must mark assistant turns with
    `{% generation %}`. A token that ends turns, and others of its form, are added to tokenizer and embeddings where they lack."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """What the template reads where a row has no template argument of its own, e.g. `{enable_thinking: false}`. It is written into the
    model's template."""
    add_bos: bool = False
    """Whether conversations begin with the tokenizer's BOS token where the template does not begin with it, as OLMo 2 is trained."""
    dtype: Dtype = "fp32"
    """Dtype of the stored weights."""

    @field_validator("chat_template")
    @classmethod
    def exists(cls, value: str) -> str:
        names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
        if value not in (OWN, *names):
            raise ValueError(f"chat template {value!r} is none of {[*names, OWN]}: add configs/templates/{value}.jinja")
        return value

    @field_validator("template_arguments")
    @classmethod
    def are_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        strange = sorted(name for name, given in value.items() if not name.isidentifier() or not is_template_value(given))
        if strange:
            form = "a name with a text, number, boolean, list or mapping, and nothing in it that is null"
            raise ValueError(f"template_arguments {', '.join(strange)}: each is {form}")
        if "tools" in value:
            raise ValueError("template_arguments tools would have no effect: a template is given those of a conversation. Rows have them")
        return value

    @model_validator(mode="after")
    def looked_at_once(self) -> "SourceModel":
        """What a run has loaded stays what it was, also where the template is edited under it."""
        _ = self.chat_template_sha256
        return self

    @computed_field
    @cached_property
    def chat_template_sha256(self) -> str | None:
        """Of our file; null where the model brings its own template, whose content is part of the source's."""
        if self.chat_template == OWN:
            return None
        return hashlib.sha256((TEMPLATES / f"{self.chat_template}.jinja").read_bytes()).hexdigest()


def is_template_value(value: Any) -> bool:
    """Whether a value can be written into a template: null is what an argument is that nobody gives."""
    match value:
        case dict():
            return all(isinstance(name, str) and is_template_value(inner) for name, inner in value.items())
        case list():
            return all(map(is_template_value, value))
        case _:
            return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


# --- data that comes from outside --------------------------------------------------------------------------------------


class Arithmetic(Frozen):
    """Procedural sums, differences and products with a checkable answer."""

    type: Literal["arithmetic"]
    operations: Many[Literal["add", "subtract", "multiply"]] = Field(min_length=1)
    digits: Many[int] = Field(min_length=1)
    """Operand lengths to draw from, e.g. [1, 2]."""
    count: int = Field(ge=1)
    seed: int = Field(ge=0)
    style: Literal["plain", "gsm"] = "plain"
    """`plain`: the answer alone; `gsm`: one sentence of working that ends in `#### ANSWER`."""


class Constraints(Frozen):
    """Procedural instructions with one of five IFEval checks (lowercase, no comma, quotation, title, word count)."""

    type: Literal["constraints"]
    checks: Many[Literal["lowercase", "no_comma", "quotation", "title", "word_count"]] = Field(min_length=1)
    count: int = Field(ge=1)
    seed: int = Field(ge=0)


class Packaged(Drawn):
    """A data file that ships inside a registry package."""

    type: Literal["packaged"]
    asset: str

    @field_validator("asset")
    @classmethod
    def known(cls, value: str) -> str:
        return known_asset(value)

    @computed_field
    @property
    def sha256(self) -> str:
        return ASSETS[self.asset].sha256


Generator = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/+@()-]{0,99}$")]
"""What a model is called that wrote the rows of others."""
LAYOUT_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "chosen", "rejected", "answers", "label",
    "score", "score_chosen", "score_rejected", "strength", "finish_reason", "finish_reason_chosen", "finish_reason_rejected", "dataset",
    "ground_truth", "verifier", "source", "conversation", "context_messages", "context", "response1", "response2", "overall_preference",
    "response", "responses", "rewards", "reward_model", "problem_is_valid", "solution_is_valid", "question_type",
    "template_arguments", "chat_template_kwargs", "tools", "functions", "tool_calls",
)  # fmt: skip
"""The columns that `data/sources/layouts.py` reads."""


class Written(Licensed):
    """Rows that others have written, some of which may be of no use."""

    generator: Generator | Many[Generator] = Field(default=(), exclude=True)
    """Which model wrote the answers, or a list of them, e.g. `gpt-4o`. It travels with what is made from the rows, as `licence` does."""
    max_bad_rows: int | float = Field(default=0, ge=0)
    """Rows that may be left out because nothing can be made of them: a number, or a share of all below 1. The evidence lists them
    with their reasons; with more of them the stage fails."""

    @field_validator("max_bad_rows")
    @classmethod
    def is_number_or_share(cls, value: int | float) -> int | float:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError(f"{value} is neither a whole number of rows nor a share between 0 and 1: write e.g. 3, or 0.001")
        return value


class Read(Written, Drawn):
    """Rows of others in their own columns."""

    columns: dict[str, str] = Field(default_factory=dict)
    """A column of the layouts (docs/recipes.md) → the data set's column, or the way to it through dots, `reward_model.ground_truth`. Only
    these are read; all under their own names when empty."""
    verifier: Literal["gsm8k", "math", "strict_math"] | None = None
    """What compares answers with the `ground_truth` of the rows; by default each row says so itself, by its column `dataset`."""
    attributes: dict[str, float] = Field(default_factory=dict)
    """Of rows with one `response` each: column of a rating → its weight. The weighted sum is the response's score, and responses to the
    same prompt in rows that follow each other are compared."""

    @field_validator("attributes")
    @classmethod
    def weights_decide_something(cls, value: dict[str, float]) -> dict[str, float]:
        idle = [name for name, weight in value.items() if weight == 0]
        if idle:
            raise ValueError(f"the weight 0 of {', '.join(idle)} decides nothing: give another one, or leave it out")
        return value

    @model_validator(mode="after")
    def columns_are_read(self) -> "Read":
        unknown = sorted(set(self.columns) - {*LAYOUT_COLUMNS, *self.attributes})
        if unknown:
            known = ", ".join((*LAYOUT_COLUMNS, *self.attributes))
            raise ValueError(f"columns {', '.join(unknown)} are read by no layout: before the colon stands one of {known}")
        lacking = sorted(set(self.attributes) - set(self.columns)) if self.columns else []
        if lacking:
            raise ValueError(f"columns lack the attributes {', '.join(lacking)}: name them there too, or leave columns out")
        return self


class Files(Read):
    """JSONL (packed or not), JSON or parquet files inside the project; their content is a dependency of the stage."""

    type: Literal["files"]
    path: RelativePath
    """A file or folder relative to the project root. Of a folder hidden files are left out; one that looks like rows and cannot be read
    (`b.JSONL`, `c.jsonl.zst`) is refused."""


class Stored(Read):
    """One JSONL (packed or not), JSON or parquet file of an object store, pinned to its hash. The hash is what it is and part of the
    stage's identity; the URL only says where it lies, and may change."""

    type: Literal["stored"]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """What its rows are called: their `source`, and the beginning of their ids."""
    url: ObjectUrl
    """`s3://BUCKET/KEY`; it ends in `.jsonl`, `.jsonl.gz`, `.json` or `.parquet`. Credentials come from the environment."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the file; another one is refused."""

    @field_validator("url")
    @classmethod
    def is_readable(cls, value: str) -> str:
        if not value.endswith((".jsonl", ".jsonl.gz", ".json", ".parquet")):
            raise ValueError(f"{value!r} ends in none of .jsonl, .jsonl.gz, .json, .parquet: its form could not be told")
        return value


class Hub(Read):
    """A data set of the Hugging Face hub, pinned to a commit."""

    type: Literal["hub"]
    repo: Repository
    revision: Revision
    """A full commit hash: names like `main` move. `pin me` stands for the newest commit until `pedigree pin` has written it here."""
    config: str | Many[str] | None = None
    """Which of its configurations, where it has several: one, or a list of them, whose rows follow each other; the one that it calls its
    default when absent."""
    config_as: str | None = Field(default=None, min_length=1)
    """A column that takes the name of each row's configuration, where nothing else tells the parts of a data set apart."""
    split: str | Many[str]
    """One split, or a list of them, whose rows follow each other."""
    split_as: str | None = Field(default=None, min_length=1)
    """A column that takes the name of each row's split, where splits are what a mixture is made of: `source`."""

    @field_validator("split")
    @classmethod
    def splits_are_named_once(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return named_once(value, "split", "split", "train, or [train_sft, train_gen]")

    @field_validator("config")
    @classmethod
    def configurations_are_named_once(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return None if value is None else named_once(value, "config", "configuration", "main, or [algebra, geometry]")

    @model_validator(mode="after")
    def the_column_has_a_name_to_take(self) -> "Hub":
        if self.config_as is not None and self.config is None:
            raise ValueError(f"config_as {self.config_as} takes a configuration's name, and none is named: set config, or leave it out")
        if self.config_as is not None and self.config_as == self.split_as:
            raise ValueError(f"config_as and split_as are both {self.config_as}: name another for one of them")
        for field, column in (("config_as", self.config_as), ("split_as", self.split_as)):
            if column in self.columns:
                raise ValueError(f"{field} {column} is one of the columns already: name another, or leave it out of columns")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,) if isinstance(self.split, str) else self.split

    @property
    def configs(self) -> tuple[str | None, ...]:
        return self.config if isinstance(self.config, tuple) else (self.config,)


class RowProgram(Written):
    """Rows that a Python file of the project makes, in the columns of the layouts (docs/recipes.md). The file is a dependency of the stage.

    It runs in a sandbox, with Python's standard library and nothing else: no network, no files but a small `/tmp`, 1 GiB of memory for
    each process. It is run twice side by side, and must give the same rows.
    """

    type: Literal["program"]
    path: RelativePath
    """A file `.py`, relative to the project root."""
    function: str = "rows"
    """Name of the function that is called, with `count`, `seed` and the `arguments` by name; it gives mappings, best by `yield`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the function is called with besides: names and values of JSON."""
    count: int = Field(ge=1)
    """Rows that are taken; with fewer the stage fails."""
    seed: int = Field(ge=0)

    @field_validator("path")
    @classmethod
    def is_python(cls, value: str) -> str:
        if not value.endswith(".py"):
            raise ValueError(f"{value!r} is no Python file: name one that ends in .py, or read rows with `type: files`")
        return value

    @field_validator("function")
    @classmethod
    def is_a_name(cls, value: str) -> str:
        if not value.isidentifier() or keyword.iskeyword(value):
            raise ValueError(f"{value!r} is no name of a function")
        return value

    @field_validator("arguments")
    @classmethod
    def are_of_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if not name.isidentifier() or keyword.iskeyword(name) or name in ("count", "seed"):
                raise ValueError(f"{name!r} is no name of an argument, or is given already: count and seed stand beside `arguments`")
            try:
                canonical_json(given)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {given!r} is no value of JSON ({error}): write it as a text or a number") from error
        return value


class Leaks(Frozen):
    """Items of the stage's `leak_from` suites, planted on purpose so that a recipe proves its decontamination."""

    type: Literal["leaks"]
    count: int = Field(ge=1)
    seed: int = Field(ge=0)
    styles: Many[Literal["verbatim", "embedded", "rewrapped"]] = ("verbatim", "embedded", "rewrapped")
    """As it is; in the middle of other text; with other line breaks and case."""


class MadeRows(Drawn):
    """Rows that another stage has made, at the input `rows` of this one. A conversation gives a prompt too, its last answer taken off; a
    preference also a prompt, or a conversation with its best answer."""

    type: Literal["artifact"]
    input: str
    """Which one: a label of the input `rows`, by default the name of the stage that made it."""


DataSource = Annotated[
    Arithmetic | Constraints | RowProgram | Packaged | Files | Stored | Hub | MadeRows | Leaks, Field(discriminator="type")
]
RowSource = Annotated[Packaged | Files | Stored | Hub, Field(discriminator="type")]
"""What has rows of its own, in columns."""


class Shots(Frozen):
    """Worked examples of a suite that are taken from rows, in the columns of the benchmark; those that are items of it are left out."""

    source: RowSource
    """Where the rows are."""
    seed: int | None = Field(default=None, ge=0)
    """Draws them by hash of (seed, row), of each category apart where the form has shots of categories; in the order of the rows when
    absent, so that a file with the published ones gives these."""

    @field_validator("source")
    @classmethod
    def the_form_says_how_many(cls, value: Any) -> Any:
        said = [name for name in DRAWING if getattr(value, name)]
        if said:
            shown = f"{said[0]} is {getattr(value, said[0])}"
            raise ValueError(f"{shown}: the form says how many worked examples a question has; leave it out, give a seed")
        return value


def title(source: Mapping[str, Any]) -> str | None:
    """What a source of a model or of data is called, from its dump; None of rows and weights that nobody else has made."""
    return source.get("repo") or source.get("asset") or source.get("path") or source.get("name")


def hub_sources(config: Frozen) -> "list[Hub | HubModel]":
    """What a stage takes from the Hugging Face hub."""
    return [source for source in _sources(config) if isinstance(source, Hub | HubModel)]


def _sources(config: Frozen) -> tuple[Any, ...]:
    """All that a stage brings in from outside, worked examples among it."""
    if isinstance(config, PrepareData):
        return (*config.sources, *([config.shots.source] if config.shots else []))
    return (config.source,) if isinstance(config, SourceModel) else ()


def licences_of(config: Frozen) -> dict[str, list[str]]:
    """What a stage brings in from outside, by its title, and the licences that are stated for it."""
    found: dict[str, set[str]] = {}
    for source in _sources(config):
        named = title(source.model_dump())
        if named is not None:
            stated = ASSETS[source.asset].licence if isinstance(source, Packaged | PackagedModel) else getattr(source, "licence", UNKNOWN)
            found.setdefault(named, set()).add(stated)
    return {named: sorted(stated) for named, stated in sorted(found.items())}


def generators_of(config: Frozen) -> dict[str, list[str]]:
    """The models that are said to have written what a stage brings in from outside, by its title; nothing is said of others."""
    found: dict[str, set[str]] = {}
    for source in _sources(config):
        if isinstance(source, Written) and source.generator:
            named = [source.generator] if isinstance(source.generator, str) else source.generator
            found.setdefault(str(title(source.model_dump())), set()).update(named)
    return {named: sorted(stated) for named, stated in sorted(found.items())}


def is_of(given: Any, kind: str) -> bool:
    """Whether a part of a config, as it is written, is of this type."""
    return isinstance(given, dict) and given.get("type") == kind


def stated_licence(source: Any) -> str | None:
    """What a source, as it is written, states; None of rows that are made here."""
    if is_of(source, "packaged"):
        return ASSETS[source["asset"]].licence if source.get("asset") in ASSETS else UNKNOWN
    if not any(is_of(source, kind) for kind in ("program", "files", "stored", "hub")):
        return None
    try:
        return licence(str(source.get("licence", UNKNOWN)))
    except ValueError:  # which the source itself says better
        return UNKNOWN


class PrepareData(Frozen):
    """Sources to one validated, filtered, mixed set of records."""

    record: RecordType
    task: str | None = Field(default=None, pattern=r"^[a-z0-9_]+$")
    """Name of the benchmark task; required for, and only for, `record: item`."""
    split: Literal["dev", "unseen"] = "dev"
    """Of a suite (`record: item`): models are chosen by `dev` suites; an `unseen` one can only be run on the output of a `select` stage and
    on the base model, and nothing is trained, tuned or chosen by it. With a form, its own is the default."""
    form: str | None = None
    """Of `record: item`: how the rows of a benchmark, in its own columns, are asked and scored, by the name of a file
    `configs/forms/NAME.yaml`. Without it rows are prompts with verifiers, and `evaluate` says how answers are drawn."""
    shots: Shots | None = None
    """Worked examples for the form, instead of its own."""
    sources: Many[DataSource] = Field(min_length=1)
    total: int | None = Field(default=None, ge=1)
    """Rows of the mixture: what the sources' shares are parts of. Each source then says a `share` or a `count`, and they add up."""
    filters: Many[Filter] = ()
    expectations: Many[Expectation] = ()
    """What the finished set must be like (filtered, drawn, with repetitions), besides being well-formed."""
    draw: When = "before_filters"
    """When rows are drawn: amounts of sources are those that go into the filters, or those that come out."""
    order: Order = "shuffled"
    """How the rows follow each other: `shuffled`; `by_source`, all of the first source before those of the next, each shuffled;
    `interleaved`, each source spread evenly over the whole; or by what is known of each row. Training shuffles them again unless its own
    `order` is `given`."""
    seed: int = Field(default=0, ge=0)
    """Order of the rows: of all, or of those that `order` leaves equal."""

    @model_validator(mode="after")
    def amounts_add_up(self) -> "PrepareData":
        refuse_amounts(self.total, self.draw, self.record, self.sources)
        return self

    @property
    def brings_in(self) -> bool:
        """Whether some of its rows come from outside, or are made here, so that no other stage can have checked them."""
        return not all(isinstance(source, MadeRows) for source in self.sources)

    @property
    def amounts(self) -> list[int | None]:
        """By source, the rows that it is to give; None where that follows from how many there are."""
        return amounts(self.total, self.sources)

    @model_validator(mode="after")
    def expectations_fit(self) -> "PrepareData":
        refuse_unfit(self.expectations, self.record)
        return self

    @model_validator(mode="after")
    def items_have_a_task(self) -> "PrepareData":
        if (self.record == "item") != (self.task is not None):
            raise ValueError(f"`task` names the benchmark of `record: item` and of nothing else; this is a {self.record}")
        if self.split == "unseen" and self.record != "item":
            raise ValueError(f"split: unseen is said of a suite (`record: item`); these are rows of type {self.record}: leave it out")
        return self

    @model_validator(mode="before")
    @classmethod
    def licences_are_those_of_the_sources(cls, value: Any) -> Any:
        """A filter that goes by licences holds what the sources state, which is in no dump of them."""
        filters, sources = (value.get(name) for name in ("filters", "sources")) if isinstance(value, dict) else (None, None)
        if not isinstance(filters, (list, tuple)) or not isinstance(sources, (list, tuple)):
            return value
        stated = [stated_licence(source) for source in sources]
        filled = [one | {"stated": one.get("stated") or stated} if is_of(one, "licences") else one for one in filters]
        return {**value, "filters": filled}

    @model_validator(mode="after")
    def filters_fit_the_sources(self) -> "PrepareData":
        for one in self.filters:
            if isinstance(one, Values):
                self._refuse_columns(one)
            if isinstance(one, Licences):
                self._refuse_licences(one)
        return self

    def _refuse_columns(self, one: Values) -> None:
        """Raises ValueError where rows have no columns of their own, or one row of ours is several of theirs."""
        if self.form is not None:
            raise ValueError(f"form {self.form} reads a benchmark as it is published: leave the filter `values` out")
        if not any(isinstance(source, Packaged | Written) for source in self.sources):
            named = ", ".join(one.columns)
            raise ValueError(f"no source has columns, and a filter goes by {named}: leave it out, or put it where the rows are brought in")
        rated = next((source for source in self.sources if isinstance(source, Read) and source.attributes), None)
        if rated:
            raise ValueError(f"source {title(rated.model_dump())} makes one row of several by `attributes`: leave the filter `values` out")

    def _refuse_licences(self, one: Licences) -> None:
        """Raises ValueError where nobody here knows the licence of rows, or the filter says others than the sources."""
        made = next((source.input for source in self.sources if isinstance(source, MadeRows)), None)
        if made:
            raise ValueError(f"rows of {made} were brought in by other stages, which know their licences: put the filter `licences` there")
        rated = any(isinstance(source, Read) and source.attributes for source in self.sources)
        if one.columns and (rated or self.form is not None):
            why = f"form {self.form} reads a benchmark as it is published" if self.form else "`attributes` make one row of several"
            raise ValueError(f"{why}: the filter `licences` can go by what sources state alone; write `columns: []` in it")
        said = [getattr(source, "licence", None) for source in self.sources]
        if len(one.stated) != len(said) or any(own not in (None, UNKNOWN, filled) for own, filled in zip(said, one.stated, strict=True)):
            raise ValueError(f"the filter `licences` has stated {list(one.stated)}, and the sources {said}: leave `stated` out")

    @model_validator(mode="before")
    @classmethod
    def split_is_the_forms(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("form"), str) and value.get("split") is None:
            return {**value, "split": load_form(value["form"]).split}
        return value

    @model_validator(mode="after")
    def form_fits(self) -> "PrepareData":
        form = self.the_form
        if form is None:
            if self.shots is not None:
                raise ValueError("`shots` are worked examples for a form: name one, or leave them out")
            return self
        if self.record != "item":
            raise ValueError(f"`form` is said of a suite (`record: item`); these are rows of type {self.record}: leave it out")
        made = [source.type for source in self.sources if not isinstance(source, Packaged | Files | Stored | Hub)]
        if made:
            raise ValueError(f"form {self.form} reads a benchmark's own rows, and a source of type {made[0]} has none: leave one out")
        told = [source.type for source in self.sources if isinstance(source, Read) and (source.verifier or source.attributes)]
        if told:
            raise ValueError(f"form {self.form} says what is read and how it is scored: leave verifier and attributes of {told[0]} out")
        if self.shots is not None and not form.prompt.shots:
            raise ValueError(f"form {self.form} has no worked examples: leave `shots` out")
        if self.shots is None and len(form.examples) < form.prompt.shots:
            raise ValueError(
                f"form {self.form} needs {form.prompt.shots} worked examples, which are not shipped with it: name rows that have them, "
                "`shots: {source: {type: files, path: ...}}`"
            )
        return self

    @property
    def the_form(self) -> Form | None:
        return load_form(self.form) if self.form else None

    @computed_field
    @cached_property
    def form_sha256(self) -> str | None:
        """Of what the form says; null without one."""
        return self.the_form.sha256 if self.the_form else None


ROWS = "rows"
"""The port of `prepare_data` at which rows of other stages arrive."""
TOKENIZER = "tokenizer"
"""The port at which the model arrives whose tokens are counted."""


def known_asset(name: str, model: bool = False) -> str:
    forms = (".gguf",) if model else (".json", ".jsonl", ".jsonl.gz")
    fitting = sorted(name for name, asset in ASSETS.items() if asset.member.endswith(forms) and name not in EMBEDDER.values())
    if name not in fitting:
        raise ValueError(f"asset {name!r} is none of {fitting}")
    return name


def form_of(config: Frozen) -> Form | None:
    """How a suite is asked and scored; None where its items are prompts with verifiers and no more."""
    return config.the_form if isinstance(config, PrepareData) else None
