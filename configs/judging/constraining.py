"""Identity of `constrain`: how many constraints are added to a prompt, and which. Their words and values stand in
`configs/constraints.yaml`, whose hash is part of the identity: who changes a word makes other prompts."""

import hashlib
from functools import cache, cached_property
from pathlib import Path
from string import Template
from typing import Literal

from pydantic import Field, ValidationError, computed_field, field_validator, model_validator

from configs.base.document import ConfigError, read_document
from configs.base.frozen import Frozen, Many

CONSTRAINTS = Path(__file__).parents[1] / "constraints.yaml"
MOST = 5
"""Constraints that are added to one prompt."""
REPEATED = "prompt_to_repeat"
"""The argument that is the prompt itself."""


class SomeOf(Frozen):
    """A list of different words as the value of an argument."""

    some: Many[int] = Field(min_length=1)
    """How many of them, one of these numbers."""
    of: Many[str] = Field(min_length=1)
    """The words."""


class ConstraintForm(Frozen):
    """One way in which an instruction of IFEval is given."""

    arguments: dict[str, Many[str | int] | dict[str, str] | SomeOf] = Field(default_factory=dict)
    """Argument → its values: one of a list, one key of a mapping (whose text is said in its place), or some words."""
    sentences: Many[str] = Field(min_length=1)
    """Ways to say it, `string.Template`s of the arguments."""
    repeats: bool = False
    """Whether the argument `prompt_to_repeat` is the prompt."""

    @model_validator(mode="after")
    def sentences_say_what_is_drawn(self) -> "ConstraintForm":
        drawn = {name for name, values in self.arguments.items() if not (isinstance(values, tuple) and len(values) == 1)}
        for sentence in self.sentences:
            said = set(Template(sentence).get_identifiers())
            if not Template(sentence).is_valid() or not drawn <= said <= set(self.arguments):
                raise ValueError(f"{sentence!r} must name {', '.join(sorted(drawn)) or 'nothing'}, each as $NAME, and no other argument")
        return self


class ConstraintRule(Frozen):
    """What the file says of one instruction."""

    forms: Many[ConstraintForm] = Field(min_length=1)
    """One is drawn."""
    excludes: Many[str] = ()
    """Instructions that are never given together with it."""


class ConstraintRules(Frozen):
    """The whole file."""

    version: int = Field(ge=1)
    """For people; what counts is the file's hash."""
    instructions: dict[str, ConstraintRule] = Field(min_length=1)
    """By the ids of IFEval's data."""

    @model_validator(mode="after")
    def excluded_ones_exist(self) -> "ConstraintRules":
        for name, rule in self.instructions.items():
            unknown = [other for other in rule.excludes if other not in self.instructions or other == name]
            if unknown:
                raise ValueError(f"{name} excludes {unknown[0]}, which is none of the others")
        return self

    @cached_property
    def apart(self) -> dict[str, frozenset[str]]:
        """Instruction → those that it is never given together with, whichever of the two says so; itself included."""
        pairs = {(name, other) for name, rule in self.instructions.items() for other in rule.excludes}
        pairs |= {(other, name) for name, other in pairs}
        return {name: frozenset({name} | {other for one, other in pairs if one == name}) for name in self.instructions}


@cache
def load_constraints() -> ConstraintRules:
    """The rules of `configs/constraints.yaml`, read once.

    Raises:
        ValueError: it holds something else; what is wrong is said.
    """
    try:
        return ConstraintRules.model_validate(read_document(CONSTRAINTS).value)
    except (ConfigError, ValidationError) as error:
        raise ValueError(f"configs/{CONSTRAINTS.name} does not say which constraints there are: {error}") from error


class Constrain(Frozen):
    """Prompts with verifiable constraints added to what the user asks for last, and IFEval's verifier of them: Tülu 3's IF-augmented
    prompts and RLVR-IFEval (Lambert et al. 2024, arXiv 2411.15124, §5.2 and §6.1). No model takes part: a hash of (seed, prompt id) draws
    them."""

    min_constraints: int = Field(default=1, ge=1, le=MOST)
    """At least so many are added to a prompt;"""
    max_constraints: int = Field(default=1, ge=1, le=MOST)
    """at most so many; every number between is as likely."""
    instructions: Many[str] | None = None
    """Ids of IFEval's instructions to draw among, e.g. `punctuation:no_comma`; all 25 when absent, of which some suit few prompts
    (`detectable_format:constrained_response` asks for yes, no or maybe)."""
    score: Literal["all", "share"] = "all"
    """What the verifier gives: 1 where all instructions are followed and else 0, or the share that is followed."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer prompts."""
    seed: int = Field(default=0, ge=0)
    """Decides, by hash, which constraints a prompt gets, with which values and in which words."""

    @field_validator("instructions")
    @classmethod
    def exist(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        known = load_constraints().instructions
        for name in value or ():
            if name not in known:
                raise ValueError(f"instruction {name!r} is none of {', '.join(known)}")
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError(f"instructions {list(value)} must name one or several distinct ones")
        return value

    @model_validator(mode="after")
    def there_are_enough(self) -> "Constrain":
        if self.max_constraints < self.min_constraints:
            raise ValueError(f"max_constraints {self.max_constraints} is below min_constraints {self.min_constraints}: raise it")
        if self.instructions is not None and len(self.instructions) < self.min_constraints:
            raise ValueError(
                f"min_constraints is {self.min_constraints}, and instructions are {len(self.instructions)}: name more, or lower it"
            )
        _ = self.wording_sha256  # what a run has loaded stays what it was, also where the file is edited under it
        return self

    @computed_field
    @cached_property
    def wording_sha256(self) -> str:
        """Of `configs/constraints.yaml`: of all words and values."""
        return hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
