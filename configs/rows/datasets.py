"""Configs of the stages that import data and models: sources, filters, templates."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, computed_field, field_validator, model_validator

from pedigree.configs.base.frozen import Arrived, Frozen, Many
from pedigree.configs.base.licenses import UNKNOWN, licence
from pedigree.configs.base.packaged import ASSETS
from pedigree.configs.rows.expectations import Expectation, refuse_unfit
from pedigree.configs.rows.filters import Filter, Licences, Values
from pedigree.configs.rows.mixing import DRAWING, Order, When, amounts, refuse_amounts
from pedigree.configs.rows.row_sources import DataSource, Files, Hub, Packaged, Read, RecordType, RowSource, StageRows, Stored, Written
from pedigree.configs.rows.source_models import SourceModel
from pedigree.configs.rows.suite_forms import Form, load_form


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


def is_of(given: Any, kind: str) -> bool:
    """Whether a raw config part has this type."""
    return isinstance(given, dict) and given.get("type") == kind


def stated_licence(source: Any) -> str | None:
    """License stated by a raw source; None for rows that Pedigree generates."""
    if is_of(source, "packaged"):
        return ASSETS[asset].licence if (asset := str(source.get("asset"))) in ASSETS else UNKNOWN
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
    form: str | Form | None = None
    """For `record: item`: how rows in the benchmark's own columns are asked and scored, as the name of a file `configs/forms/NAME.yaml`,
    or the fields of a form of your own. Without a form, rows are prompts with verifiers, and `evaluate` sets the sampling parameters."""
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

    @property
    def amounts(self) -> list[int | None]:
        """Rows to take from each source; None where it depends on the size of the source."""
        return amounts(self.total, self.sources)

    @model_validator(mode="after")
    def _check_fields(self) -> "PrepareData":
        refuse_amounts(self.total, self.draw, self.record, self.sources)
        refuse_unfit(self.expectations, self.record)
        if (self.record == "item") != (self.task is not None):
            raise ValueError(f"`task` is required for `record: item` and not allowed otherwise; the record is {self.record}")
        if self.task == "mean":
            raise ValueError("task 'mean' would have the name of the mean over tasks in the metrics of an evaluation: give it another")
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
            raise ValueError(f"form {self.form_name} reads a benchmark as published: remove the filter `values`")
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
            why = f"form {self.form_name} reads a benchmark as published" if self.form else "`attributes` combine rows"
            raise ValueError(f"{why}, so the filter `licences` can only use the licenses of sources: set `columns: []` in it")
        declared = [getattr(source, "licence", None) for source in self.sources]
        if len(one.stated) != len(declared) or any(
            own not in (None, UNKNOWN, filled) for own, filled in zip(declared, one.stated, strict=True)
        ):
            raise ValueError(f"the filter `licences` has stated {list(one.stated)}, but the sources state {declared}: remove `stated`")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_split(cls, value: Any) -> Any:
        form = value.get("form") if isinstance(value, dict) else None
        if form is None or value.get("split") is not None:
            return value
        split = load_form(form).split if isinstance(form, str) else form.get("split") if isinstance(form, dict) else None
        return {**value, "split": split} if split else value

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
            raise ValueError(
                f"form {self.form_name} reads benchmark rows, which a source of type {made[0]} does not have: remove one of them"
            )
        scoring = [source.type for source in self.sources if isinstance(source, Read) and (source.verifier or source.attributes)]
        if scoring:
            raise ValueError(
                f"form {self.form_name} defines the scoring: remove verifier and attributes from the source of type {scoring[0]}"
            )
        if self.shots is not None and not form.prompt.shots:
            raise ValueError(f"form {self.form_name} has no worked examples: remove `shots`")
        if self.shots is None and len(form.examples) < form.prompt.shots:
            raise ValueError(
                f"form {self.form_name} needs {form.prompt.shots} worked examples, which it does not include: provide rows with them, "
                "`shots: {source: {type: files, path: ...}}`"
            )
        return self

    @property
    def the_form(self) -> Form | None:
        return load_form(self.form) if isinstance(self.form, str) else self.form

    @property
    def form_name(self) -> str:
        return self.form if isinstance(self.form, str) else "in this stage"

    @computed_field
    @cached_property
    def form_sha256(self) -> str | None:
        """Hash of the form's content; null without a form."""
        return self.the_form.sha256 if self.the_form else None


ROWS = "rows"
"""The port of `prepare_data` for rows of other stages."""
TOKENIZER = "tokenizer"
"""The port for the model whose tokenizer counts tokens."""
FROM = {"conversation": ("conversation", "preference"), "prompt": ("prompt", "conversation", "preference"), "preference": ("preference",)}
"""Record → types that convert to it."""


def form_of(config: Frozen) -> Form | None:
    """How a suite is asked and scored; None where its items are prompts with verifiers and no more."""
    return config.the_form if isinstance(config, PrepareData) else None


def needs_of(config: PrepareData) -> frozenset[str]:
    """Inputs that the sources and filters require."""
    types = {part.type for part in (*config.sources, *config.filters)}
    return frozenset(port for kind, port in (("leaks", "leak_from"), ("artifact", ROWS), ("tokens", TOKENIZER)) if kind in types)


def inputs_problem(config: PrepareData, arrived: Arrived) -> str | None:
    """Error message if the inputs do not match the config, else None."""
    given = arrived.get(ROWS, {})
    named = [source.input for source in config.sources if isinstance(source, StageRows)]
    for name in named:
        if name not in given:
            return f"a source reads the input {name!r}, but `rows` has {', '.join(given)}: use one of them, or add it to `rows`"
        if given[name].type not in FROM.get(config.record, ()):
            what = " or ".join(FROM.get(config.record, ())) or "no rows of other stages"
            return f"{name} is of type {given[name].type}, but record {config.record} requires {what}: change the record or the input"
    idle = [name for name in given if name not in named]
    if idle:
        return f"`rows` has {idle[0]}, which no source reads: add {{type: artifact, input: {idle[0]}}} to sources, or remove it"
    for name, model in arrived.get(TOKENIZER, {}).items():
        if config.record == "item":
            return f"`{TOKENIZER}` counts tokens as in training, which a suite is not used for: remove it"
        if not isinstance(model.config, SourceModel):
            return f"{name} has the tokenizer of its base model: use that `source_model` as `{TOKENIZER}` instead"
    return None
