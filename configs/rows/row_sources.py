"""Where rows come from: files, hubs, object stores, programs, generators, other stages."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, computed_field, field_validator, model_validator

from pedigree.configs.base.frozen import Frozen, Many, added, named_once
from pedigree.configs.base.hub_names import Repository, Revision
from pedigree.configs.base.licenses import UNKNOWN, Licence
from pedigree.configs.base.mistakes import not_one_of
from pedigree.configs.base.packaged import ASSETS, EMBEDDER
from pedigree.configs.base.paths import SourcePath
from pedigree.configs.base.python_files import FunctionName, PythonFile, keyword_arguments
from pedigree.configs.base.stores import ObjectUrl
from pedigree.configs.rows.mixing import Drawn

RecordType = Literal["conversation", "prompt", "preference", "item"]


class Licensed(Frozen):
    """Third-party material under a license."""

    licence: Licence = UNKNOWN
    """License: an SPDX or Hugging Face Hub identifier, e.g. `cc-by-nc-4.0`. It is tracked through all derived artifacts, and is not part of
    any stage's identity."""


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


class OfAsset(Frozen):
    """A file inside a registry package."""

    forms: ClassVar[tuple[str, ...]] = (".json", ".jsonl", ".jsonl.gz")
    """Ends of its name."""
    type: Literal["packaged"]
    asset: str
    """Asset name, as in `configs/base/packaged.py`."""

    @field_validator("asset")
    @classmethod
    def _check_asset(cls, value: str) -> str:
        fitting = sorted(name for name, asset in ASSETS.items() if asset.member.endswith(cls.forms) and name not in EMBEDDER.values())
        if value not in fitting:
            raise ValueError(f"asset {not_one_of(value, fitting)}")
        return value

    @computed_field
    @property
    def sha256(self) -> str:
        return ASSETS[self.asset].sha256


class Packaged(OfAsset, Drawn):
    """A data file that ships inside a registry package."""


Generator = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/+@()-]{0,99}$")]
"""Name of a model that wrote third-party rows."""
LAYOUT_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "chosen", "rejected", "answers", "label",
    "score", "score_chosen", "score_rejected", "strength", "finish_reason", "finish_reason_chosen", "finish_reason_rejected", "dataset",
    "ground_truth", "verifier", "source", "conversation", "context_messages", "context", "response1", "response2", "overall_preference",
    "response", "responses", "rewards", "reward_model", "problem_is_valid", "solution_is_valid", "question_type",
    "template_arguments", "chat_template_kwargs", "tools", "functions", "tool_calls", "system", "hints",
)  # fmt: skip
"""The columns that `data/sources/layouts.py` reads."""


class OutOfTurn(Frozen):
    """What becomes of conversations whose turns are in another order than user and assistant in alternation, after an optional system turn.

    `refuse` makes the row a bad row, which counts toward `max_bad_rows`; `drop` leaves it out and counts it by its fault; `keep` leaves the
    turns as they are, for which the chat template must have a form."""

    assistant_first: Literal["refuse", "drop", "cut", "keep"] = "refuse"
    """The first turn is the assistant's; `cut` leaves out what comes before the first user turn, except the system turn."""
    late_system: Literal["refuse", "drop", "cut", "join", "keep"] = "refuse"
    """A system turn is not the first one; `cut` leaves it out, `join` makes it a part of the user turn next to it."""
    same_role: Literal["refuse", "drop", "join", "keep"] = "refuse"
    """Two turns in a row have one role; `join` makes them one, with an empty line between their texts."""
    user_last: Literal["refuse", "drop", "cut"] = "refuse"
    """A conversation ends with the user's turn; `cut` leaves that turn out. Prompts do end with it."""

    @property
    def kept(self) -> frozenset[str]:
        """Faults with which rows are kept."""
        return frozenset(name for name, rule in self if rule == "keep")


class Written(Licensed):
    """Third-party rows, some of which may be unusable."""

    generator: Generator | Many[Generator] = Field(default=(), exclude=True)
    """The model, or a list of models, that wrote the answers, e.g. `gpt-4o`. Tracked through derived artifacts like `licence`."""
    max_bad_rows: int | float = Field(default=0, ge=0)
    """Maximum number of unusable rows to skip, or their maximum share of all rows if below 1. The evidence lists them with reasons; with
    more, the stage fails."""
    out_of_turn: OutOfTurn = added(OutOfTurn())
    """Conversations that begin with the assistant, have two turns of one role in a row, a system turn in the middle, or no last answer:
    refused by default. Not part of the identity while all are refused."""

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
    verifier: Literal["gsm", "gsm8k", "math", "strict_math", "exact_match", "python", "facts"] | None = None
    """Verifier that compares answers with the rows' `ground_truth`, or for `python` runs them with it; `facts` keeps it for a reward
    function of the project. By default each row's column `dataset` selects the verifier."""
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
    """JSONL (plain or gzipped), JSON or Parquet files of this machine; their content is a dependency of the stage."""

    type: Literal["files"]
    path: SourcePath
    """A file or folder: relative to the project root, or anywhere on this machine (`/data/rows.jsonl`, `~/rows`, `../rows`); links are
    followed. Hidden files in a folder are ignored; files that look like data but are not readable (`b.JSONL`, `c.csv`) are an error.
    Of a path outside the project, only the last name is part of identity."""


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
    path: PythonFile
    """A `.py` file, relative to the project root."""
    function: FunctionName = "rows"
    """Name of the function to call, with keyword arguments `count`, `seed` and the `arguments`. It returns an iterable of mappings,
    preferably a generator."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments, as JSON values."""
    count: int = Field(ge=1)
    """Rows to take; if the function produces fewer, the stage fails."""
    seed: int = Field(ge=0)
    """Passed to the function."""

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        return keyword_arguments(value, ("count", "seed"))


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
