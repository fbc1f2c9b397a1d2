"""Which rows `prepare_data` keeps. Every filter drops rows, and says in its first sentence which; the others stay as they are.

All that a filter goes by stands in the dump of the recipe, lists that it takes from `configs/wordings.yaml` too, and is identity.

"The assistant" is its turns, and of a preference the best answer besides: what a model is taught to say.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from configs.base.frozen import Frozen, Many, named_once
from configs.base.licenses import licence
from configs.base.wordings import ENGLISH, worded, wordings

NUMBERED_ID = re.compile(r"(.*-[0-9a-f]{16})-[0-9]+", re.DOTALL)
NAME = "{name}"
"""Stands in a claim for any of the names."""
GROUP = "name"
"""Of the regular expression that a claim becomes: what stands there."""
LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro ru sk sl so sq sv "
    "sw ta te th tl tr uk ur vi zh-cn zh-tw"
).split()
"""What langdetect tells apart: codes of ISO 639-1, Chinese by its script."""


def is_regex(value: str) -> str:
    try:
        pattern = re.compile(value.replace(NAME, "name"))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{value!r} is no regular expression of Python: {error}") from error
    if pattern.search(""):
        raise ValueError(f"{value!r} matches a text without any character, and so every text: make something of it required")
    return value


def is_word(value: str) -> str:
    if not value.strip():
        raise ValueError("a text without any letter or sign is looked for: leave it out")
    return value


def as_text(value: Any) -> Any:
    """A date, for which YAML takes `2024-03-01` without quotes, as it was written."""
    return value.isoformat() if isinstance(value, date) else value


Regex = Annotated[str, AfterValidator(is_regex)]
Word = Annotated[str, AfterValidator(is_word)]
DATE = re.compile(r"\d{4}(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d)?)?)?)?)?", re.ASCII)
"""As ISO 8601 writes it, whole or its beginning: a year, a month, a day, a time."""
Bound = Annotated[int | float | str, BeforeValidator(as_text)]
Value = Annotated[bool | int | float | str, BeforeValidator(as_text)]


class MaxCharacters(Frozen):
    """Drops rows whose text is longer."""

    type: Literal["max_characters"]
    limit: int = Field(ge=1)


class Tokens(Frozen):
    """Drops rows that are shorter or longer in tokens of the model at the input `tokenizer`, and those that its chat template refuses."""

    type: Literal["tokens"]
    min: int | None = Field(default=None, ge=1)
    """The fewest tokens of a row that stays."""
    max: int | None = Field(default=None, ge=1)
    """The most: as `max_length` of training counts them, of a preference in its longest answer with the prompt; of a prompt its own."""

    @model_validator(mode="after")
    def bounds_leave_and_drop_something(self) -> "Tokens":
        if self.min is None and self.max is None:
            raise ValueError("nothing says how many tokens are too few or too many: give min, max or both")
        if self.min is not None and self.max is not None and self.max < self.min:
            raise ValueError(f"no row has at least {self.min} and at most {self.max} tokens: raise max, or lower min")
        return self


class Turns(Frozen):
    """Drops rows with fewer or more turns of user and assistant; the answers of a preference are one turn, the system's is none."""

    type: Literal["turns"]
    min: int = Field(default=1, ge=1)
    """The fewest turns of a row that stays."""
    max: int | None = Field(default=None, ge=1)
    """The most; as many as there are when absent."""

    @model_validator(mode="after")
    def bounds_leave_and_drop_something(self) -> "Turns":
        if self.max is not None and self.max < self.min:
            raise ValueError(f"no row has at least {self.min} and at most {self.max} turns: raise max, or lower min")
        if self.min == 1 and self.max is None:
            raise ValueError("every row has at least 1 turn: give min, max or both")
        return self


class Values(Frozen):
    """Drops rows by what a column of their data set says: a score, a pass rate, a date, a category."""

    type: Literal["values"]
    column: str | Many[str]
    """The data set's own column, whatever `columns` calls it, or the way to it through dots; of a list, the first in which a row has a
    value. One that no row of any source has ends the stage."""
    min: Bound | None = None
    """The least value of a row that stays: a number, which may stand in a text of the column (`0.75`, `3/8`), or a date in quotes,
    `'2023-10'`."""
    max: Bound | None = None
    """The greatest. Dates are compared as far as the bound is written: `'2023'` has all of that year in it."""
    one_of: Many[Value] | None = Field(default=None, min_length=1)
    """Values of rows that stay: texts letter by letter, numbers, true or false."""
    none_of: Many[Value] | None = Field(default=None, min_length=1)
    """Values of rows that go."""
    missing: Literal["keep", "drop"] = "keep"
    """What happens to rows without a value of that kind: in which the column is missing, null, or no number where bounds are numbers."""

    @field_validator("column")
    @classmethod
    def names_something(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return named_once(value, "column", "column", "pass_rate, or [pass_rate, solve_rate]")

    @model_validator(mode="after")
    def says_what_stays(self) -> "Values":
        bounds = [bound for bound in (self.min, self.max) if bound is not None]
        if sum([bool(bounds), self.one_of is not None, self.none_of is not None]) != 1:
            raise ValueError("give bounds (min, max or both), or one_of, or none_of")
        others = [bound for bound in bounds if isinstance(bound, str) and not DATE.fullmatch(bound)]
        if others:
            raise ValueError(f"{others[0]!r} is neither a number nor a date: write 0.5, or '2023-10-01'")
        if len({isinstance(bound, str) for bound in bounds}) > 1:
            raise ValueError(f"min {self.min!r} and max {self.max!r} are a number and a date: write both alike, a year in quotes")
        least = [bound[: len(bounds[-1])] if isinstance(bound, str) and isinstance(bounds[-1], str) else bound for bound in bounds]
        if sorted(least) != least:  # a month lies within its year
            raise ValueError(f"nothing lies between {self.min!r} and {self.max!r}: the lower bound is min")
        return self

    @property
    def has_bounds(self) -> bool:
        return self.one_of is None and self.none_of is None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if isinstance(self.column, str) else self.column


class Licences(Frozen):
    """Drops rows under another licence: that which a column of the row says, else the one that the recipe states for its source. Rows that
    are made here are under none, and stay."""

    type: Literal["licences"]
    allow: Many[Annotated[str, AfterValidator(licence)]] = Field(min_length=1)
    """Identifiers, as sources have them; `unknown` is one, of rows and sources that say nothing."""
    columns: Many[str] = ("license", "licence")
    """Where rows may say it: columns or ways as in `values`, the first in which a row has a text, or a list of them: then all must be
    allowed."""
    stated: Many[str | None] = ()
    """Of each source of the stage. It is filled in from what they state and not written: so the licences are part of the identity of a
    stage that goes by them, and of no other."""


class EmptyOrRepeatedTurns(Frozen):
    """Drops rows with a turn of nothing visible, an answer that repeats the question, or one that repeats the answer before it (white
    space and case folded)."""

    type: Literal["empty_or_repeated_turns"]


class ExactDuplicates(Frozen):
    """Drops all but the first of rows with the same text (white space and case folded) and template arguments."""

    type: Literal["exact_duplicates"]


class NearDuplicates(Frozen):
    """Drops all but the first of rows with nearly the same text (white space and case folded) and the same template arguments, or near by
    way of others."""

    type: Literal["near_duplicates"]
    threshold: float = Field(default=0.7, ge=0.5, le=1)
    """The least Jaccard index (shingles in common over shingles in all) of two rows that are near: pairs that MinHash proposes are
    compared exactly."""
    shingle: int = Field(default=5, ge=1, le=50)
    """Words in a row that count as one. A text of fewer words is compared whole."""


def base_id(name: str) -> str:
    """The id of a row without the number by which rows of the same content are told apart: what `SOURCE-HASH` and `SOURCE-HASH-2` share."""
    found = NUMBERED_ID.fullmatch(name)
    return found[1] if found else name


class Ids(Frozen):
    """Drops rows by their ids, each with all rows of the same content; `pedigree forget` says which. Write it last: a copy in other case
    or white space, which `exact_duplicates` dropped beside such a row, stays dropped then."""

    type: Literal["ids"]
    ids: Many[str] = Field(min_length=1)
    """As `pedigree trace` prints them. One that no row has ends the stage: a slip of the pen would keep what is to go."""

    @field_validator("ids")
    @classmethod
    def stand_for_all_copies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        numbered = [name for name in value if base_id(name) != name]
        if numbered:
            raise ValueError(f"{numbered[0]!r} ends in the number of a copy, and all copies go: write {base_id(numbered[0])!r}")
        return value


class Keywords(Frozen):
    """Drops rows that contain one of the words (case folded, whole words)."""

    type: Literal["keywords"]
    words: Many[Word] = Field(min_length=1)


class Pattern(Frozen):
    """Drops rows in which a turn matches a regular expression, or with `keep: matching` those in which none does."""

    type: Literal["pattern"]
    regex: Regex
    """Of Python's `re`, searched anywhere in a turn; `(?i)` at its beginning ignores case, `(?s)` lets `.` match line ends."""
    roles: Many[Literal["system", "user", "assistant", "call", "tool"]] = Field(default=("system", "user", "assistant"), min_length=1)
    """Whose turns; all answers of a preference are the assistant's, and texts in template arguments the system's. `call` is what the
    assistant calls, as JSON, `tool` what comes of it."""
    keep: Literal["others", "matching"] = "others"
    """Which rows stay."""


class ControlTokens(Frozen):
    """Drops rows that spell out a control token of a chat template, with which a text could end its turn."""

    type: Literal["control_tokens"]
    tokens: Many[Word] = Field(default_factory=lambda: wordings("control_tokens"), min_length=1)
    """By default those of the templates of the field."""


class Spoken(Frozen):
    """A filter whose lists are by default those of some languages."""

    LISTS: ClassVar[Mapping[str, str]]
    """Field → its list in `configs/wordings.yaml`."""
    languages: Many[str] = Field(default=(ENGLISH,), min_length=1, exclude=True)
    """Whose lists of `configs/wordings.yaml` are taken where none is given: `ar`, `de`, `en`, `es`, `fr`, `it`, `ja`, `ko`, `pt`, `ru`,
    `zh-cn`, `zh-tw`. The lists are identity, not how they were named."""

    @field_validator("languages")
    @classmethod
    def have_lists(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        others = [one for one in value if one not in worded()]
        if others:
            raise ValueError(f"{', '.join(others)} has no lists in configs/wordings.yaml: {', '.join(worded())} have, or give your own")
        return value

    @model_validator(mode="before")
    @classmethod
    def lists_are_those_of_the_languages(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("languages"), (list, tuple)):
            return value
        if cls.LISTS.keys() <= value.keys():
            raise ValueError(f"languages have no effect beside {' and '.join(cls.LISTS)}: leave one of them out")
        known = tuple(one for one in value["languages"] if one in worded())
        return {field: wordings(name, known) for field, name in cls.LISTS.items()} | value if known else value


class Refusals(Spoken):
    """Drops rows in which the assistant begins a turn with a refusal (case, quotes and the form of apostrophes folded)."""

    LISTS: ClassVar = {"phrases": "refusals"}
    type: Literal["refusals"]
    phrases: Many[Word] = Field(default_factory=lambda: wordings("refusals"), min_length=1)
    """How a refusal begins, in whole words where a script has spaces between them."""


class Identity(Spoken):
    """Drops rows in which the assistant says that it is another model, or made by somebody else. To speak of them is no claim."""

    LISTS: ClassVar = {"names": "names", "claims": "claims"}
    type: Literal["identity"]
    names: Many[Word] = Field(default_factory=lambda: wordings("names"), min_length=1)
    """Of models and makers; case is no matter."""
    claims: Many[Regex] = Field(default_factory=lambda: wordings("claims"), min_length=1)
    """Regular expressions with `{name}`; case and the form of apostrophes are no matter."""
    allow: Many[str] = ()
    """Those of the names that the model may claim: its own."""

    @field_validator("claims")
    @classmethod
    def claims_name_somebody(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        others = [claim for claim in value if claim.count(NAME) != 1]
        if others:
            raise ValueError(f"{others[0]!r} must name somebody, once: write {NAME} where the name stands, or use the filter `pattern`")
        for claim in value:
            try:
                re.compile(claim.replace(NAME, f"(?P<{GROUP}>a|name)"))
            except re.error as error:
                raise ValueError(f"{claim!r} cannot hold names, the group {GROUP!r} of several lengths, at {NAME}: {error}") from error
        return value

    @model_validator(mode="after")
    def some_names_are_left(self) -> "Identity":
        unknown = sorted(set(self.allow) - set(self.names))
        if unknown:
            raise ValueError(f"allow {', '.join(unknown)} is none of the names: {', '.join(self.names)}")
        if set(self.allow) == set(self.names):
            raise ValueError("allow has all of the names, so that nothing is looked for: leave the filter out")
        return self


class CutoffDates(Frozen):
    """Drops rows in which the assistant speaks of when its knowledge ends, as of its last update in September 2021."""

    type: Literal["cutoff_dates"]
    patterns: Many[Regex] = Field(default_factory=lambda: wordings("cutoff_dates"), min_length=1)
    """Regular expressions; case and the form of apostrophes are no matter."""


class Repetition(Frozen):
    """Drops rows in which a text of the assistant repeats itself, by the rules of Gopher (Rae et al. 2021, arXiv 2112.11446, table A1)."""

    type: Literal["repetition"]
    lines: float = Field(default=0.2, gt=0, le=1)
    """The largest share of a text's characters in lines that stand there before."""
    paragraphs: float = Field(default=0.2, gt=0, le=1)
    """The same of paragraphs."""
    ngrams: Many[float] = Field(default=(0.2, 0.18, 0.16), min_length=1, max_length=9)
    """The largest share in the most frequent 2-gram of words, 3-gram, 4-gram, and so on, where it occurs more than once."""
    min_words: int = Field(default=50, ge=2)
    """Shorter texts are not looked at: Gopher's bounds are for documents of at least 50 words."""

    @field_validator("ngrams")
    @classmethod
    def are_shares(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        outside = [bound for bound in value if not 0 < bound <= 1]
        if outside:
            raise ValueError(f"{outside[0]} is no share above 0 and up to 1 (which drops nothing)")
        return value


class Language(Frozen):
    """Drops rows in another language, as langdetect tells by the turns of user and assistant, blocks of code left out."""

    type: Literal["language"]
    codes: Many[str] = Field(min_length=1)
    """The languages that stay: codes of ISO 639-1, e.g. `en`; Chinese is `zh-cn` or `zh-tw`."""
    certainty: float = Field(default=0.9, gt=0, le=1)
    """The least probability at which a language counts as told."""
    characters: int = Field(default=500, ge=20)
    """Of a row at most so many are looked at, from its beginning."""
    unknown: Literal["keep", "drop"] = "keep"
    """What happens to rows whose language is not told: sums, lists of names, very short ones."""

    @field_validator("codes")
    @classmethod
    def are_told_apart(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        others = sorted(set(value) - set(LANGUAGES))
        if others:
            raise ValueError(f"{', '.join(others)} is none of the languages that are told apart: {', '.join(LANGUAGES)}")
        return value


RowFilter = (
    MaxCharacters | Turns | EmptyOrRepeatedTurns | Keywords | Pattern | ControlTokens | Refusals | Identity | CutoffDates | Repetition
)
"""Sees each row by itself."""
Filter = Annotated[RowFilter | Tokens | Values | Licences | Ids | ExactDuplicates | NearDuplicates | Language, Field(discriminator="type")]


def columns_named(filters: Iterable[Filter]) -> tuple[str, ...]:
    """The columns of data sets that filters go by, each once."""
    return tuple(dict.fromkeys(column for one in filters if isinstance(one, Values | Licences) for column in one.columns))
