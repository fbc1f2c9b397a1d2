"""Row filters of `prepare_data`. A filter only drops rows, as stated in its first sentence; it never changes a row.

Everything that a filter depends on is in the recipe's dump and part of identity, including lists taken from `configs/wordings.yaml`.

"The assistant" means all assistant turns, and of a preference also the best answer.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from pedigree.configs.base.frozen import Frozen, Many, named_once
from pedigree.configs.base.licenses import licence
from pedigree.configs.base.wordings import ENGLISH, worded, wordings

NUMBERED_ID = re.compile(r"(.*-[0-9a-f]{16})-[0-9]+", re.DOTALL)
NAME = "{name}"
"""Placeholder in a claim for any of the names."""
GROUP = "name"
"""Regex group for that placeholder in a compiled claim."""
LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro ru sk sl so sq sv "
    "sw ta te th tl tr uk ur vi zh-cn zh-tw"
).split()
"""Languages that langdetect distinguishes: ISO 639-1 codes, with Chinese by script."""


def is_regex(value: str) -> str:
    try:
        pattern = re.compile(value.replace(NAME, "name"))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{value!r} is not a valid Python regular expression: {error}") from error
    if pattern.search(""):
        raise ValueError(f"{value!r} matches the empty string and therefore every text: make part of it required")
    return value


def is_word(value: str) -> str:
    if not value.strip():
        raise ValueError("a search text is empty or white space: remove it")
    return value


def as_text(value: Any) -> Any:
    """Convert a date, as which YAML parses an unquoted `2024-03-01`, back to text."""
    return value.isoformat() if isinstance(value, date) else value


Regex = Annotated[str, AfterValidator(is_regex)]
Word = Annotated[str, AfterValidator(is_word)]
DATE = re.compile(r"\d{4}(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d)?)?)?)?)?", re.ASCII)
"""A full or truncated ISO 8601 date: year, month, day, time."""
Bound = Annotated[int | float | str, BeforeValidator(as_text)]
Value = Annotated[bool | int | float | str, BeforeValidator(as_text)]


class MaxCharacters(Frozen):
    """Drops rows with more characters."""

    type: Literal["max_characters"]
    limit: int = Field(ge=1)
    """Maximum number of characters."""


class Tokens(Frozen):
    """Drops rows with too few or too many tokens under the model at the input `tokenizer`, and rows that its chat template rejects."""

    type: Literal["tokens"]
    min: int | None = Field(default=None, ge=1)
    """Minimum tokens of a row."""
    max: int | None = Field(default=None, ge=1)
    """Maximum tokens, counted as for `max_length` in training. A preference counts its prompt with the longest answer; a prompt counts
    itself."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "Tokens":
        if self.min is None and self.max is None:
            raise ValueError("the filter `tokens` has no bounds: set min, max or both")
        if self.min is not None and self.max is not None and self.max < self.min:
            raise ValueError(f"min {self.min} exceeds max {self.max} tokens: raise max, or lower min")
        return self


class Turns(Frozen):
    """Drops rows with too few or too many user and assistant turns. The answers of a preference count as one turn; system messages do not
    count."""

    type: Literal["turns"]
    min: int = Field(default=1, ge=1)
    """Minimum turns of a row."""
    max: int | None = Field(default=None, ge=1)
    """Maximum turns; no limit by default."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "Turns":
        if self.max is not None and self.max < self.min:
            raise ValueError(f"min {self.min} exceeds max {self.max} turns: raise max, or lower min")
        if self.min == 1 and self.max is None:
            raise ValueError("min is 1 and max is not set, so no row is dropped: raise min, or set max")
        return self


class Values(Frozen):
    """Drops rows by the value of a dataset column: a score, a pass rate, a date, a category."""

    type: Literal["values"]
    column: str | Many[str]
    """The dataset's own column name, regardless of `columns`, or a dotted path. With a list, the first column in which a row has a value. A
    column that no row of any source has is an error."""
    min: Bound | None = None
    """Minimum value: a number, compared with numbers or numeric text (`0.75`, `3/8`), or a quoted date, `'2023-10'`."""
    max: Bound | None = None
    """Maximum value. Dates are compared at the precision of the bound: `'2023'` includes the whole year."""
    one_of: Many[Value] | None = Field(default=None, min_length=1)
    """Values to keep: exact strings, numbers, true or false."""
    none_of: Many[Value] | None = Field(default=None, min_length=1)
    """Values to drop."""
    missing: Literal["keep", "drop"] = "keep"
    """Whether to keep or drop rows without such a value: the column is missing, null, or not a number under numeric bounds."""

    @field_validator("column")
    @classmethod
    def _check_column(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return named_once(value, "column", "column", "pass_rate, or [pass_rate, solve_rate]")

    @model_validator(mode="after")
    def _check_criterion(self) -> "Values":
        bounds = [bound for bound in (self.min, self.max) if bound is not None]
        if sum([bool(bounds), self.one_of is not None, self.none_of is not None]) != 1:
            raise ValueError("set exactly one of: bounds (min, max or both), one_of, none_of")
        others = [bound for bound in bounds if isinstance(bound, str) and not DATE.fullmatch(bound)]
        if others:
            raise ValueError(f"{others[0]!r} is neither a number nor a date: write e.g. 0.5 or '2023-10-01'")
        if len({isinstance(bound, str) for bound in bounds}) > 1:
            raise ValueError(f"min {self.min!r} and max {self.max!r} mix a number and a date: use the same type, with years in quotes")
        least = [bound[: len(bounds[-1])] if isinstance(bound, str) and isinstance(bounds[-1], str) else bound for bound in bounds]
        if sorted(least) != least:  # compared at the precision of the upper bound
            raise ValueError(f"min {self.min!r} exceeds max {self.max!r}: swap them")
        return self

    @property
    def has_bounds(self) -> bool:
        return self.one_of is None and self.none_of is None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if isinstance(self.column, str) else self.column


class Licences(Frozen):
    """Drops rows under other licenses. A row's license is read from its own column, else from its source. Rows generated by Pedigree have
    no license and are kept."""

    type: Literal["licences"]
    allow: Many[Annotated[str, AfterValidator(licence)]] = Field(min_length=1)
    """Allowed identifiers, as in `licence` of a source; `unknown` matches rows and sources without a license."""
    columns: Many[str] = ("license", "licence")
    """Columns or dotted paths that may contain a row's license: the first that has a string, or a list of strings, all of which must be
    allowed."""
    stated: Many[str | None] = ()
    """License of each source, filled in automatically. So licenses are part of identity only for stages that filter by them."""


class EmptyOrRepeatedTurns(Frozen):
    """Drops rows with an empty turn, an answer that repeats its question, or an answer that repeats the previous one (ignoring white space
    and case)."""

    type: Literal["empty_or_repeated_turns"]


class ExactDuplicates(Frozen):
    """Drops duplicates: rows with the same text (ignoring white space and case) and template arguments as an earlier row."""

    type: Literal["exact_duplicates"]


class NearDuplicates(Frozen):
    """Drops near-duplicates of an earlier row, directly or through a chain of near-duplicates: nearly the same text (ignoring white space
    and case) and the same template arguments."""

    type: Literal["near_duplicates"]
    threshold: float = Field(default=0.7, ge=0.5, le=1)
    """Minimum Jaccard index (shared shingles over all shingles) of near-duplicates. MinHash proposes candidate pairs, which are compared
    exactly."""
    shingle: int = Field(default=5, ge=1, le=50)
    """Words per shingle. Shorter texts are compared whole."""


def base_id(name: str) -> str:
    """A row's id without its copy number: the common part of `SOURCE-HASH` and `SOURCE-HASH-2`."""
    found = NUMBERED_ID.fullmatch(name)
    return found[1] if found else name


class Ids(Frozen):
    """Drops rows by id, each with all rows of the same content; `pedigree forget` lists the ids. Put this filter last: a copy in other case
    or white space that `exact_duplicates` dropped in favor of such a row then stays dropped."""

    type: Literal["ids"]
    ids: Many[str] = Field(min_length=1)
    """Ids as printed by `pedigree trace`. An id that no row has is an error, because a typo would keep a row that should be dropped."""

    @field_validator("ids")
    @classmethod
    def _check_ids(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        numbered = [name for name in value if base_id(name) != name]
        if numbered:
            raise ValueError(f"{numbered[0]!r} ends in a copy number, but all copies are dropped: write {base_id(numbered[0])!r}")
        return value


class Keywords(Frozen):
    """Drops rows that contain one of the words (whole words, ignoring case; anywhere in scripts without spaces between words)."""

    type: Literal["keywords"]
    words: Many[Word] = Field(min_length=1)
    """Words to search for."""


class Pattern(Frozen):
    """Drops rows in which a turn matches a regular expression; with `keep: matching`, rows in which none does."""

    type: Literal["pattern"]
    regex: Regex
    """Python `re` pattern, searched anywhere in a turn; prefix `(?i)` to ignore case, `(?s)` to let `.` match newlines."""
    roles: Many[Literal["system", "user", "assistant", "call", "tool"]] = Field(default=("system", "user", "assistant"), min_length=1)
    """Turns to search. Answers of a preference belong to `assistant`, texts in template arguments to `system`. `call` is a tool call as
    JSON, `tool` its result."""
    keep: Literal["others", "matching"] = "others"
    """Rows to keep."""


class ControlTokens(Frozen):
    """Drops rows that contain the text of a chat-template control token, which could end a turn prematurely."""

    type: Literal["control_tokens"]
    tokens: Many[Word] = Field(default_factory=lambda: wordings("control_tokens"), min_length=1)
    """Default: the control tokens of common chat templates."""


class Spoken(Frozen):
    """A filter with default lists by language."""

    LISTS: ClassVar[Mapping[str, str]]
    """Field → its list in `configs/wordings.yaml`."""
    languages: Many[str] = Field(default=(ENGLISH,), min_length=1, exclude=True)
    """Languages whose lists in `configs/wordings.yaml` are the defaults: `ar`, `de`, `en`, `es`, `fr`, `it`, `ja`, `ko`, `pt`, `ru`,
    `zh-cn`, `zh-tw`. Only the resulting lists are part of identity."""

    @field_validator("languages")
    @classmethod
    def _check_languages(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        others = [one for one in value if one not in worded()]
        if others:
            raise ValueError(
                f"configs/wordings.yaml has no lists for {', '.join(others)}: use {', '.join(worded())}, or provide your own lists"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_in_lists(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("languages"), (list, tuple)):
            return value
        if cls.LISTS.keys() <= value.keys():
            raise ValueError(f"languages has no effect together with {' and '.join(cls.LISTS)}: remove one of them")
        known = tuple(one for one in value["languages"] if one in worded())
        return {field: wordings(name, known) for field, name in cls.LISTS.items()} | value if known else value


class Refusals(Spoken):
    """Drops rows in which an assistant turn begins with a refusal (ignoring case, quotation marks and apostrophe style)."""

    LISTS: ClassVar = {"phrases": "refusals"}
    type: Literal["refusals"]
    phrases: Many[Word] = Field(default_factory=lambda: wordings("refusals"), min_length=1)
    """Beginnings of refusals; matched as whole words in scripts with spaces."""


class Identity(Spoken):
    """Drops rows in which the assistant claims to be another model or made by another company. Merely mentioning them is not a claim."""

    LISTS: ClassVar = {"names": "names", "claims": "claims"}
    type: Literal["identity"]
    names: Many[Word] = Field(default_factory=lambda: wordings("names"), min_length=1)
    """Names of models and makers, ignoring case."""
    claims: Many[Regex] = Field(default_factory=lambda: wordings("claims"), min_length=1)
    """Regular expressions that contain `{name}`, ignoring case and apostrophe style."""
    allow: Many[str] = ()
    """Names that the model may claim, i.e. its own."""

    @field_validator("claims")
    @classmethod
    def _check_claims(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        others = [claim for claim in value if claim.count(NAME) != 1]
        if others:
            raise ValueError(f"{others[0]!r} must contain {NAME} exactly once: add it in place of the name, or use the filter `pattern`")
        for claim in value:
            try:
                re.compile(claim.replace(NAME, f"(?P<{GROUP}>a|name)"))
            except re.error as error:
                raise ValueError(
                    f"{claim!r} does not compile with the group {GROUP!r}, which has alternatives of several lengths, at {NAME}: {error}"
                ) from error
        return value

    @model_validator(mode="after")
    def _check_allow(self) -> "Identity":
        unknown = sorted(set(self.allow) - set(self.names))
        if unknown:
            raise ValueError(f"allow {', '.join(unknown)} is not one of the names: {', '.join(self.names)}")
        if set(self.allow) == set(self.names):
            raise ValueError("allow contains all of the names, so the filter has no effect: remove it")
        return self


class CutoffDates(Frozen):
    """Drops rows in which the assistant mentions its knowledge cutoff, such as a last update in September 2021."""

    type: Literal["cutoff_dates"]
    patterns: Many[Regex] = Field(default_factory=lambda: wordings("cutoff_dates"), min_length=1)
    """Regular expressions, ignoring case and apostrophe style."""


class Repetition(Frozen):
    """Drops rows in which an assistant text is repetitive, by the rules of Gopher (Rae et al. 2021, arXiv 2112.11446, table A1)."""

    type: Literal["repetition"]
    lines: float = Field(default=0.2, gt=0, le=1)
    """Maximum share of a text's characters in repeated lines."""
    paragraphs: float = Field(default=0.2, gt=0, le=1)
    """Maximum share of characters in repeated paragraphs."""
    ngrams: Many[float] = Field(default=(0.2, 0.18, 0.16), min_length=1, max_length=9)
    """Maximum share of characters in the most frequent word 2-gram, 3-gram, 4-gram, and so on, if it occurs more than once."""
    min_words: int = Field(default=50, ge=2)
    """Ignore shorter texts: Gopher's thresholds are for documents of at least 50 words."""

    @field_validator("ngrams")
    @classmethod
    def _check_ngrams(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        outside = [bound for bound in value if not 0 < bound <= 1]
        if outside:
            raise ValueError(f"ngrams {outside[0]} must be above 0 and at most 1 (1 drops nothing)")
        return value


class Language(Frozen):
    """Drops rows in other languages, as detected by langdetect in user and assistant turns without code blocks."""

    type: Literal["language"]
    codes: Many[str] = Field(min_length=1)
    """Languages to keep: ISO 639-1 codes, e.g. `en`; Chinese is `zh-cn` or `zh-tw`."""
    certainty: float = Field(default=0.9, gt=0, le=1)
    """Minimum probability of a detected language."""
    characters: int = Field(default=500, ge=20)
    """Number of characters to examine at the beginning of a row."""
    unknown: Literal["keep", "drop"] = "keep"
    """Whether to keep or drop rows with no detected language: sums, lists of names, very short rows."""

    @field_validator("codes")
    @classmethod
    def _check_codes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        others = sorted(set(value) - set(LANGUAGES))
        if others:
            raise ValueError(f"unsupported language {', '.join(others)}; supported: {', '.join(LANGUAGES)}")
        return value


RowFilter = (
    MaxCharacters | Turns | EmptyOrRepeatedTurns | Keywords | Pattern | ControlTokens | Refusals | Identity | CutoffDates | Repetition
)
"""Filters that examine each row on its own."""
Filter = Annotated[RowFilter | Tokens | Values | Licences | Ids | ExactDuplicates | NearDuplicates | Language, Field(discriminator="type")]


def columns_named(filters: Iterable[Filter]) -> tuple[str, ...]:
    """Dataset columns that filters read, each once."""
    return tuple(dict.fromkeys(column for one in filters if isinstance(one, Values | Licences) for column in one.columns))


def without(filters: Sequence[Filter], ids: Collection[str]) -> tuple[Mapping[str, Any], ...]:
    """These filters extended to drop rows with these ids, as a recipe writes them; the filter by ids comes last."""
    others = [one for one in filters if not isinstance(one, Ids)]
    named = {name for one in filters if isinstance(one, Ids) for name in one.ids}
    return tuple(_written(one) for one in [*others, Ids(type="ids", ids=tuple(sorted(named.union(ids))))])


def _written(one: Filter) -> dict[str, Any]:
    """A filter without unset fields, values stated by sources, and lists implied by its languages, which are written instead."""
    written = one.model_dump(mode="json", exclude={"stated"}, exclude_unset=True)
    if not isinstance(one, Spoken) or "languages" not in one.model_fields_set:
        return written
    theirs = {field for field, name in one.LISTS.items() if getattr(one, field) == wordings(name, one.languages)}
    return {field: value for field, value in written.items() if field not in theirs} | {"languages": list(one.languages)}
