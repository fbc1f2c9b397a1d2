"""Identity of the stages that make and measure data: sources, filters, decontamination, sampling, judging, evaluation."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, computed_field, field_validator, model_validator

from configs.assets import ASSETS
from configs.frozen import Arrived, Dtype, Frozen, Many
from configs.licences import UNKNOWN, Licence
from configs.paths import RelativePath
from configs.stores import ObjectUrl
from configs.training import Sampling

RecordType = Literal["conversation", "prompt", "preference", "item"]
TEMPLATES = Path(__file__).parent / "templates"


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
    """A name in `configs/assets.py`."""

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
    repo: str = Field(pattern=r"^[A-Za-z0-9_][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?$")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    """A full commit hash: names like `main` move."""


class SourceModel(Frozen):
    """Brings a model into the project as a tracked artifact, in safetensors, with our chat template."""

    source: Annotated[PackagedModel | RandomLlama | FolderModel | HubModel, Field(discriminator="type")]
    chat_template: str = "chatml"
    """A file `configs/templates/NAME.jinja`; it must mark assistant turns with `{% generation %}`."""
    dtype: Dtype = "fp32"
    """Dtype of the stored weights."""

    @field_validator("chat_template")
    @classmethod
    def exists(cls, value: str) -> str:
        names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
        if value not in names:
            raise ValueError(f"chat template {value!r} is none of {names}: add configs/templates/{value}.jinja")
        return value

    @model_validator(mode="after")
    def looked_at_once(self) -> "SourceModel":
        """What a run has loaded stays what it was, also where the template is edited under it."""
        _ = self.chat_template_sha256
        return self

    @computed_field
    @cached_property
    def chat_template_sha256(self) -> str:
        return hashlib.sha256((TEMPLATES / f"{self.chat_template}.jinja").read_bytes()).hexdigest()


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


class Packaged(Frozen):
    """A data file that ships inside a registry package."""

    type: Literal["packaged"]
    asset: str
    count: int | None = Field(default=None, ge=1)
    """Rows to keep, drawn by hash of (seed, id); all when absent."""
    seed: int = Field(default=0, ge=0)

    @field_validator("asset")
    @classmethod
    def known(cls, value: str) -> str:
        return known_asset(value)

    @computed_field
    @property
    def sha256(self) -> str:
        return ASSETS[self.asset].sha256


class Files(Licensed):
    """JSONL or parquet files inside the project; their content is a dependency of the stage."""

    type: Literal["files"]
    path: RelativePath
    """A file or folder relative to the project root."""
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)


class Stored(Licensed):
    """One JSONL, JSON or parquet file of an object store, pinned to its hash. The hash is what it is and part of the stage's identity;
    the URL only says where it lies, and may change."""

    type: Literal["stored"]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """What its rows are called: their `source`, and the beginning of their ids."""
    url: ObjectUrl
    """`s3://BUCKET/KEY`; it ends in `.jsonl`, `.json` or `.parquet`. Credentials come from the environment."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the file; another one is refused."""
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @field_validator("url")
    @classmethod
    def is_readable(cls, value: str) -> str:
        if not value.endswith((".jsonl", ".json", ".parquet")):
            raise ValueError(f"{value!r} ends in none of .jsonl, .json, .parquet: its form could not be told")
        return value


class Hub(Licensed):
    """A data set of the Hugging Face hub, pinned to a commit."""

    type: Literal["hub"]
    repo: str = Field(pattern=r"^[A-Za-z0-9_][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?$")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    split: str
    count: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)


class Leaks(Frozen):
    """Items of the stage's `leak_from` suites, planted on purpose so that a recipe proves its decontamination."""

    type: Literal["leaks"]
    count: int = Field(ge=1)
    seed: int = Field(ge=0)
    styles: Many[Literal["verbatim", "embedded", "rewrapped"]] = ("verbatim", "embedded", "rewrapped")
    """As it is; in the middle of other text; with other line breaks and case."""


DataSource = Annotated[Arithmetic | Constraints | Packaged | Files | Stored | Hub | Leaks, Field(discriminator="type")]


def title(source: Mapping[str, Any]) -> str | None:
    """What a source of a model or of data is called, from its dump; None of rows and weights that nobody else has made."""
    return source.get("repo") or source.get("asset") or source.get("path") or source.get("name")


def licences_of(config: Frozen) -> dict[str, list[str]]:
    """What a stage brings in from outside, by its title, and the licences that are stated for it."""
    sources = config.sources if isinstance(config, PrepareData) else (config.source,) if isinstance(config, SourceModel) else ()
    found: dict[str, set[str]] = {}
    for source in sources:
        named = title(source.model_dump())
        if named is not None:
            stated = ASSETS[source.asset].licence if isinstance(source, Packaged | PackagedModel) else getattr(source, "licence", UNKNOWN)
            found.setdefault(named, set()).add(stated)
    return {named: sorted(stated) for named, stated in sorted(found.items())}


class MaxCharacters(Frozen):
    """Drops rows whose text is longer."""

    type: Literal["max_characters"]
    limit: int = Field(ge=1)


class ExactDuplicates(Frozen):
    """Keeps the first of rows with the same text (white space and case folded)."""

    type: Literal["exact_duplicates"]


class Keywords(Frozen):
    """Drops rows that contain one of the words (case folded, whole words)."""

    type: Literal["keywords"]
    words: Many[str] = Field(min_length=1)


Filter = Annotated[MaxCharacters | ExactDuplicates | Keywords, Field(discriminator="type")]


class PrepareData(Frozen):
    """Sources to one validated, filtered, shuffled set of records."""

    record: RecordType
    task: str | None = Field(default=None, pattern=r"^[a-z0-9_]+$")
    """Name of the benchmark task; required for, and only for, `record: item`."""
    split: Literal["dev", "unseen"] = "dev"
    """Of a suite (`record: item`): models are chosen by `dev` suites; an `unseen` one can only be run on the output of a `select` stage and
    on the base model, and nothing is trained, tuned or chosen by it."""
    sources: Many[DataSource] = Field(min_length=1)
    filters: Many[Filter] = ()
    seed: int = Field(default=0, ge=0)
    """Order of the rows."""

    @model_validator(mode="after")
    def items_have_a_task(self) -> "PrepareData":
        if (self.record == "item") != (self.task is not None):
            raise ValueError(f"`task` names the benchmark of `record: item` and of nothing else; this is a {self.record}")
        if self.split == "unseen" and self.record != "item":
            raise ValueError(f"split: unseen is said of a suite (`record: item`); these are rows of type {self.record}: leave it out")
        return self


class Decontaminate(Frozen):
    """Removes training rows that share text with benchmark items: exact n-gram coverage (Tülu 3, §3.2).

    Under every setting that is accepted a whole copy of an item is found, in the turns that are searched. Letters that look alike are one
    letter, and what cannot be seen is not there.
    """

    ngram: int = Field(default=8, ge=2, le=13)
    """Tokens of an n-gram; Tülu 3 takes 8, GPT-3 (Brown et al. 2020, arXiv 2005.14165, app. C) 13."""
    threshold: float = Field(default=0.5, gt=0, le=0.8)
    """A row is removed when it covers more than this share of an item's tokens by shared n-grams; Tülu 3 takes 0.5, AI2's `decon` 0.8."""
    turns: Many[Literal["system", "user", "assistant"]] = ("system", "user", "assistant")
    """Whose turns of a row are searched; a preference's answers are the assistant's. Tülu 3 searches the user's only."""
    max_contaminated_share: float = Field(default=1.0, gt=0, le=1)
    """The stage fails when more than this share of a benchmark's items overlap (Tülu 3 drops whole sets above 0.02)."""

    @field_validator("turns")
    @classmethod
    def users_are_searched(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "user" not in value:
            raise ValueError(f"turns {list(value)} leave out the user's, where copies of benchmark items stand: add user")
        return tuple(turn for turn in ("system", "user", "assistant") if turn in value)


# --- data that models make ---------------------------------------------------------------------------------------------


class Window(Frozen):
    """A slice of a prompt pool: rows [index * count, (index + 1) * count). Rounds use fresh prompts by other indices."""

    count: int = Field(ge=1)
    index: int = Field(default=0, ge=0)


class Sample(Frozen):
    """Answers of one or several policies to prompts."""

    sampling: Sampling
    samples_per_prompt: int = Field(ge=1)
    """Per policy."""
    prompts: Window
    chunk_size: int = Field(default=64, ge=1)
    """Requests submitted together: the unit of generation, seeding and resume."""
    dtype: Dtype = "bf16"
    seed: int = Field(default=0, ge=0)


class Mean(Frozen):
    """The members' mean; of one reward model its own reward."""

    formula: ClassVar[str] = "R̄ = (1/k) Σ_i R_i, with R_i = (s_i - mean_i) / std_i over member i's held-out answers"
    source: ClassVar[str] = "Lakshminarayanan et al. 2017, arXiv 1612.01474; for rewards: Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["mean"]


class WorstCase(Frozen):
    """The least friendly member's opinion (WCO)."""

    formula: ClassVar[str] = "min_i R_i"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, §3"

    type: Literal["worst_case"]


class UncertaintyWeighted(Frozen):
    """The mean, less what the members disagree by (UWO)."""

    formula: ClassVar[str] = "R̄ - weight · (1/k) Σ_i (R_i - R̄)²"
    source: ClassVar[str] = "Coste et al. 2024, arXiv 2310.02743, eq. 5"

    type: Literal["uncertainty_weighted"]
    weight: float = Field(default=0.5, gt=0)
    """λ: what a variance of 1 among the members costs; the paper takes 0.5 for best-of-n and 0.1 for PPO."""


Ensemble = Annotated[Mean | WorstCase | UncertaintyWeighted, Field(discriminator="type")]


class Judge(Frozen):
    """Scores completions: score = verifier_weight * verifier(answer) + reward_weight * reward(prompt, answer)."""

    verifier_weight: float = Field(default=1.0, ge=0)
    reward_weight: float = Field(default=0.0, ge=0)
    """Needs the input `reward_models` when above zero."""
    ensemble: Ensemble = Mean(type="mean")
    """How the normalised rewards of several reward models become one."""
    dtype: Dtype = "fp32"
    """Compute dtype of the reward models."""

    @model_validator(mode="after")
    def something_is_asked(self) -> "Judge":
        if self.verifier_weight == 0 and self.reward_weight == 0:
            raise ValueError("verifier_weight and reward_weight are both 0, so that no answer gets a score: raise one of them")
        return self

    @model_validator(mode="after")
    def an_ensemble_has_weight(self) -> "Judge":
        if self.reward_weight == 0 and self.ensemble.type != "mean":
            raise ValueError(f"ensemble {self.ensemble.type} combines rewards, and reward_weight is 0: raise it, or leave ensemble out")
        return self


def judge_problem(config: Judge, arrived: Arrived) -> str | None:
    """Why these reward models cannot judge as the config says, or None."""
    given = list(arrived.get("reward_models", {}))
    if given and config.reward_weight == 0:
        return f"reward_models is {', '.join(given)}, and reward_weight is 0, so that nobody asks them: raise it, or leave the input out"
    if given and len(given) < 2 and config.ensemble.type != "mean":
        return f"ensemble {config.ensemble.type} needs 2 reward models or more, not 1 ({given[0]}): name others, or leave ensemble out"
    return None


class Pair(Frozen):
    """Judged answers of each prompt to one preference; those closer than `min_gap` (ties always) are dropped and counted."""

    strategy: Literal["best_vs_worst", "ranked"] = "best_vs_worst"
    """`best_vs_worst`: a pair; `ranked`: all different answers, best first."""
    min_gap: float = Field(default=0.0, ge=0)
    """Least difference between the scores of the best and the worst answer."""
    truncated: Literal["keep", "drop"] = "keep"
    """Answers that were cut off by `max_tokens`, which stay without an end-of-turn token: `keep`, since one that loses to an answer that
    ended is what teaches a policy to come to an end (so do TRL and open-instruct, which may punish them by a penalty); `drop` for judges
    that see no difference. Both are counted."""
    min_pairs: int = Field(default=1, ge=1)
    """The stage fails with fewer preferences."""
    label_noise: float = Field(default=0.0, ge=0, le=0.5)
    """Probability that the two answers of a pair are exchanged, by hash of (seed, id): a judge that errs, made on purpose."""
    seed: int = Field(default=0, ge=0)
    """Decides the order of equally good answers, and which pairs `label_noise` exchanges, by hash."""

    @model_validator(mode="after")
    def noise_is_of_pairs(self) -> "Pair":
        if self.label_noise and self.strategy == "ranked":
            raise ValueError(f"label_noise {self.label_noise} exchanges the answers of pairs: strategy must be best_vs_worst, not ranked")
        return self


class Overoptimization(Frozen):
    """Best-of-n by the judgments' reward models, measured by a gold reward (Gao et al. 2022, arXiv 2210.10760, §3).

    The gold reward is the verifier's score, or the reward of other judgments of the same answers at `gold`.
    """

    max_n: int | None = Field(default=None, ge=2)
    """Prompts with fewer scored answers are left out and counted; when absent, the number that every prompt has."""
    resamples: int = Field(default=2000, ge=100)
    """Bootstrap resamples of prompts behind each 95 % interval."""
    seed: int = Field(default=0, ge=0)


def overoptimization_problem(config: Overoptimization, arrived: Arrived) -> str | None:
    """Why there is nothing to measure by these judgments, or None."""
    for port in ("judgments", "gold"):
        for label, given in arrived.get(port, {}).items():
            if isinstance(given.config, Judge) and given.config.reward_weight == 0:
                return f"{port} {label} holds no rewards, its reward_weight is 0: raise it there, and give it reward models"
    return None


class Evaluate(Frozen):
    """Scores policies on suites, with one engine, item by item."""

    sampling: Sampling
    chunk_size: int = Field(default=64, ge=1)
    resamples: int = Field(default=2000, ge=100)
    """Bootstrap resamples of items behind each 95 % interval."""
    dtype: Dtype = "bf16"
    seed: int = Field(default=0, ge=0)


class Select(Frozen):
    """The candidate with the highest development score; the earlier one on equal scores."""

    task: str | None = None
    """One task's score; the mean over tasks when absent."""


def known_asset(name: str, model: bool = False) -> str:
    fitting = sorted(name for name, asset in ASSETS.items() if asset.member.endswith(".gguf") == model)
    if name not in fitting:
        raise ValueError(f"asset {name!r} is none of {fitting}")
    return name
