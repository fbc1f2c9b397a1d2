"""Config of `decontaminate`: criteria for a copy of a benchmark item, and copies to keep."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, computed_field, field_validator

from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.base.packaged import embedder_sha256
from pedigree.configs.base.shrink import Cut


def _with_users(value: tuple[str, ...]) -> tuple[str, ...]:
    if "user" not in value:
        raise ValueError(f"turns {list(value)} omit user, where copies of benchmark items occur: add user")
    return tuple(turn for turn in ("system", "user", "assistant") if turn in value)


Turns = Annotated[Many[Literal["system", "user", "assistant"]], AfterValidator(_with_users)]
"""Roles whose turns are compared with items; `user` is always included."""


class Abstracted(Frozen):
    """A second comparison with all names mapped to one token and all numbers to another. It finds copies with other names and numbers."""

    ngram: int = Field(default=8, ge=2, le=13)
    """Tokens per n-gram."""
    threshold: float = Field(default=0.95, ge=0.5, lt=1)
    """Remove a row that covers more than this share of an item's tokens in this comparison."""
    words: int = Field(default=8, ge=1)
    """Minimum number of distinct words, besides names and numbers, in an item; items with fewer, such as sums, are skipped."""


class CutShort(Frozen):
    """Truncated copies: turns that consist almost entirely of a part of an item."""

    of_item: float = Field(ge=0.3, lt=0.9)
    """Minimum share of the item's tokens that the turn covers by shared n-grams; must be below `threshold`, above which rows are removed
    anyway."""
    of_turn: float = Field(default=0.95, ge=0.5, lt=1)
    """Minimum share of the turn's own tokens in those n-grams."""


class ShortItems(Frozen):
    """Stricter rule for short items, which occur in text by chance: the turn must contain little else."""

    below: int = Field(ge=2)
    """Items with fewer tokens are short."""
    more: int = Field(ge=0)
    """Maximum number of extra tokens in the turn; in longer turns the match is not counted."""


class Embedded(Frozen):
    """A semantic comparison, by embeddings, of the rows that remain after n-gram matching. By default it only reports."""

    threshold: float = Field(default=0.85, ge=0.5, lt=1)
    """Report a row if its nearest turn has at least this cosine similarity to an item."""
    remove: bool = False
    """Whether to remove such rows."""

    @computed_field
    @property
    def embedder_sha256(self) -> dict[str, str]:
        """Hashes of WordLlama's vectors (256 dimensions) and tokenizer, which ship in a registry package."""
        return embedder_sha256()


class Waiver(Frozen):
    """Rows to keep even though they overlap with benchmark items."""

    benchmark: str
    """Label at the input `benchmarks`."""
    items: Annotated[Many[str], Field(min_length=1)] | Literal["all"]
    """Item ids, or `all`."""
    because: str = Field(pattern=r"\S")
    """Reason. The report prints it next to each score that the rows may have raised, and the model card of an exported model includes
    it."""

    def covers(self, benchmark: str, item: str) -> bool:
        """Whether it waives the item with this id."""
        return self.benchmark == benchmark and (self.items == "all" or item in self.items)


class Decontaminate(Frozen):
    """Removes training rows that share text with benchmark items, by exact n-gram coverage (Tülu 3, §3.2).

    Under any accepted settings, a complete copy of an item in the searched turns is found, except for exclusions by `short_items` and
    `common`. Look-alike letters are unified, and invisible characters are ignored.
    """

    ngram: int = Field(default=8, ge=2, le=13)
    """Tokens per n-gram; Tülu 3 uses 8, GPT-3 (Brown et al. 2020, arXiv 2005.14165, app. C) 13."""
    threshold: float = Field(default=0.5, gt=0, le=0.9)
    """Remove a row that covers more than this share of an item's tokens by shared n-grams; Tülu 3 uses 0.5, AI2's `decon` 0.8."""
    turns: Turns = ("system", "user", "assistant")
    """Roles whose turns are searched. A preference's answers and tool calls belong to the assistant; tool results are searched along with
    the user's turns. Tülu 3 searches only the user's."""
    typos: bool = False
    """Tolerate single-letter typos where a row already covers half of the required share without them."""
    abstracted: Abstracted | None = None
    """Add a second comparison with all names and all numbers unified. Off by default."""
    cut_short: CutShort | None = None
    """Also detect copies of part of an item, even if they cover at most `threshold` of it. Off by default."""
    embedded: Embedded | None = None
    """Also compare the remaining rows by embeddings, to find paraphrases without shared n-grams. Off by default. Reported separately in
    `evidence/paraphrases.jsonl`."""
    short_items: ShortItems | None = None
    """Stricter rule for short items. Off by default."""
    common: int | None = Field(default=None, ge=2)
    """Ignore n-grams that occur in at least this many items of a benchmark: a row must also cover more than `threshold` of the rest of an
    item. Off by default."""
    report: float | None = Field(default=None, gt=0, lt=1)
    """Also list in the manifest rows that are kept but cover more than this share of an item. By default, those kept only because of
    `short_items`, `common` or `waivers`."""
    max_contaminated_share: float = Field(default=1.0, gt=0, le=1)
    """The stage fails if more than this share of a benchmark's items overlaps, waived items excluded (Tülu 3 drops whole datasets above
    0.02)."""
    waivers: Many[Waiver] = ()
    """Overlaps that do not cause removal. Rows kept only by waivers are counted, and reported next to the scores of every descendant model
    and in the model card of an export. Not allowed for unseen suites."""

    @field_validator("cut_short", "report")
    @classmethod
    def _check_below_threshold(cls, value: Any, info: ValidationInfo) -> Any:
        threshold = info.data.get("threshold")
        if threshold is None:
            return value
        if isinstance(value, CutShort) and value.of_item >= threshold:
            raise ValueError(
                f"of_item {value.of_item:g} is not below threshold {threshold:g}, above which rows are removed anyway: lower it"
            )
        if isinstance(value, float) and value > threshold:
            raise ValueError(f"report {value:g} is above threshold {threshold:g}, above which rows are removed anyway: lower it")
        return value


def shrink_comparison(cut: Cut) -> None:
    """Of few rows many may be removed, and generated ones have other ids."""
    cut.set("max_contaminated_share", 1.0, "thresholds")
    cut.set("waivers", [one for one in cut.get("waivers") if one["items"] == "all"], "data")
