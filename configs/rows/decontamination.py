"""Identity of `decontaminate`: what counts as a copy of a benchmark's item, and which copies are kept."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, computed_field, field_validator

from configs.base.frozen import Frozen, Many
from configs.base.packaged import embedder_sha256
from configs.base.shrink import Cut


def _with_users(value: tuple[str, ...]) -> tuple[str, ...]:
    if "user" not in value:
        raise ValueError(f"turns {list(value)} leave out the user's, where copies of benchmark items stand: add user")
    return tuple(turn for turn in ("system", "user", "assistant") if turn in value)


Turns = Annotated[Many[Literal["system", "user", "assistant"]], AfterValidator(_with_users)]
"""Whose turns of a row are compared with items, the user's among them."""


class Abstracted(Frozen):
    """A second comparison, in which all names are one word and all numbers another: copies with other people and other numbers."""

    ngram: int = Field(default=8, ge=2, le=13)
    """Tokens of an n-gram."""
    threshold: float = Field(default=0.95, ge=0.5, lt=1)
    """A row is removed when it covers more than this share of an item's tokens so."""
    words: int = Field(default=8, ge=1)
    """Different words, names and numbers apart, that an item must have to be compared: a sum has next to none."""


class CutShort(Frozen):
    """Copies that end early or begin late: turns that say little but a part of an item."""

    of_item: float = Field(ge=0.3, lt=0.9)
    """Such a turn covers more than this share of the item's tokens by shared n-grams; below `threshold`, from where on rows are removed
    anyway."""
    of_turn: float = Field(default=0.95, ge=0.5, lt=1)
    """And more than this share of its own tokens are in them."""


class ShortItems(Frozen):
    """What items that are said by chance ask for: a turn that is little else."""

    below: int = Field(ge=2)
    """Items of fewer tokens are short."""
    more: int = Field(ge=0)
    """Tokens that a row's turn may have more than the item; in a longer one the item is no evidence."""


class Embedded(Frozen):
    """A comparison of what n-grams leave: by what a turn is about, whatever its words. Only told, where nothing else is said."""

    threshold: float = Field(default=0.85, ge=0.5, lt=1)
    """A row is told whose nearest turn has at least this cosine with an item."""
    remove: bool = False
    """Whether such rows are removed."""

    @computed_field
    @property
    def embedder_sha256(self) -> dict[str, str]:
        """Of WordLlama's vectors (256 numbers each) and its tokenizer, which ship in a registry package."""
        return embedder_sha256()


class Waiver(Frozen):
    """Rows that are kept though they overlap with items of a benchmark."""

    benchmark: str
    """Its name at the input `benchmarks`."""
    items: Annotated[Many[str], Field(min_length=1)] | Literal["all"]
    """Ids of the items, or all of them."""
    because: str = Field(pattern=r"\S")
    """Why; the report shows it beside each score that the rows may have helped, and the card of an exported model has it."""

    def covers(self, benchmark: str, item: str) -> bool:
        """Whether an item, by its id, is waived."""
        return self.benchmark == benchmark and (self.items == "all" or item in self.items)


class Decontaminate(Frozen):
    """Removes training rows that share text with benchmark items: exact n-gram coverage (Tülu 3, §3.2).

    Under every setting that is accepted a whole copy of an item is found, in the turns that are searched, but for what `short_items` and
    `common` leave. Letters that look alike are one letter, and what cannot be seen is not there.
    """

    ngram: int = Field(default=8, ge=2, le=13)
    """Tokens of an n-gram; Tülu 3 takes 8, GPT-3 (Brown et al. 2020, arXiv 2005.14165, app. C) 13."""
    threshold: float = Field(default=0.5, gt=0, le=0.9)
    """A row is removed when it covers more than this share of an item's tokens by shared n-grams; Tülu 3 takes 0.5, AI2's `decon` 0.8."""
    turns: Turns = ("system", "user", "assistant")
    """Whose turns of a row are searched; a preference's answers and calls of tools are the assistant's, results of tools are searched with
    the user's. Tülu 3 searches the user's only."""
    typos: bool = False
    """Whether words with a letter wrong are read as an item's, where a row covers half of what is asked for without."""
    abstracted: Abstracted | None = None
    """Compares a second time, with all names and all numbers taken for one; not where nothing is given."""
    cut_short: CutShort | None = None
    """Which turns are copies of a part of an item, though they cover no more than `threshold` of it; none where nothing is given."""
    embedded: Embedded | None = None
    """Compares what is left by vectors: paraphrases that share no n-grams; not where nothing is given. Reported apart, in
    `evidence/paraphrases.jsonl`."""
    short_items: ShortItems | None = None
    """Which items ask for a turn that is little else; none where nothing is given."""
    common: int | None = Field(default=None, ge=2)
    """N-grams that so many items of a benchmark have are no part of them: of what is left, too, a row must cover more than `threshold`. Not
    asked where nothing is given."""
    report: float | None = Field(default=None, gt=0, lt=1)
    """The manifest also has what stays though it covers more than this share of an item; where nothing is given, what would be removed
    but for `short_items`, `common` and `waivers`."""
    max_contaminated_share: float = Field(default=1.0, gt=0, le=1)
    """The stage fails when more than this share of a benchmark's items overlap (Tülu 3 drops whole sets above 0.02); waived ones aside."""
    waivers: Many[Waiver] = ()
    """Overlaps for which no row is removed. Rows are kept that have no other, counted, and told in the report beside the scores of every
    model below, and in the card of one that is exported. Unseen suites have none."""

    @field_validator("cut_short")
    @classmethod
    def less_than_a_copy(cls, value: CutShort | None, info: ValidationInfo) -> CutShort | None:
        threshold = info.data.get("threshold")
        if value is not None and threshold is not None and value.of_item >= threshold:
            raise ValueError(f"of_item {value.of_item:g} is not below threshold {threshold:g}, from where on rows are removed: lower it")
        return value

    @field_validator("report")
    @classmethod
    def told_is_more_than_removed(cls, value: float | None, info: ValidationInfo) -> float | None:
        threshold = info.data.get("threshold")
        if value is not None and threshold is not None and value > threshold:
            raise ValueError(f"report {value:g} is above threshold {threshold:g}, from where on rows are removed: lower it")
        return value


def shrink_comparison(cut: Cut) -> None:
    """Of few rows many may be removed, and generated ones have other ids."""
    cut.set("max_contaminated_share", 1.0, "thresholds")
    cut.set("waivers", [one for one in cut.get("waivers") if one["items"] == "all"], "data")
