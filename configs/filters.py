"""Which rows `prepare_data` keeps. A filter is identity: what it goes by stands in the recipe, or in the dump of it."""

from typing import Annotated, Literal

from pydantic import Field

from configs.frozen import Frozen, Many


class MaxCharacters(Frozen):
    """Drops rows whose text is longer."""

    type: Literal["max_characters"]
    limit: int = Field(ge=1)


class ExactDuplicates(Frozen):
    """Keeps the first of rows with the same text (white space and case folded)."""

    type: Literal["exact_duplicates"]


class NearDuplicates(Frozen):
    """Keeps the first of rows with nearly the same text (white space and case folded), and of those that are near by way of others."""

    type: Literal["near_duplicates"]
    threshold: float = Field(default=0.7, ge=0.5, le=1)
    """The least Jaccard index (shingles in common over shingles in all) of two rows that are near: pairs that MinHash proposes are
    compared exactly."""
    shingle: int = Field(default=5, ge=1, le=50)
    """Words in a row that count as one. A text of fewer words is compared whole."""


class Keywords(Frozen):
    """Drops rows that contain one of the words (case folded, whole words)."""

    type: Literal["keywords"]
    words: Many[str] = Field(min_length=1)


Filter = Annotated[MaxCharacters | ExactDuplicates | NearDuplicates | Keywords, Field(discriminator="type")]
