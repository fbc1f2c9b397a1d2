"""Config of `constrain`: the number and choice of constraints added to a prompt. Their wordings and values are in
`configs/constraints.yaml`, whose hash is part of identity."""

import hashlib
from functools import cache, cached_property
from pathlib import Path
from string import Template
from typing import Literal

from pydantic import Field, computed_field, field_validator, model_validator

from pedigree.configs.base.frozen import Frozen, Many
from pedigree.configs.base.mistakes import not_one_of, read_packaged

CONSTRAINTS = Path(__file__).parents[1] / "constraints.yaml"
MOST = 5
"""Maximum number of constraints per prompt."""
REPEATED = "prompt_to_repeat"
"""The argument whose value is the prompt itself."""


class SomeOf(Frozen):
    """A list of distinct words as the value of an argument."""

    some: Many[int] = Field(min_length=1)
    """Number of words, drawn from this list."""
    of: Many[str] = Field(min_length=1)
    """The words to draw from."""


class ConstraintForm(Frozen):
    """One way to phrase an IFEval instruction."""

    arguments: dict[str, Many[str | int] | dict[str, str] | SomeOf] = Field(default_factory=dict)
    """Argument → its values: one item of a list, one key of a mapping (whose text is inserted), or several words."""
    sentences: Many[str] = Field(min_length=1)
    """Alternative wordings, `string.Template`s of the arguments."""
    repeats: bool = False
    """Whether the argument `prompt_to_repeat` is the prompt."""

    @model_validator(mode="after")
    def _check_sentences(self) -> "ConstraintForm":
        drawn = {name for name, values in self.arguments.items() if not (isinstance(values, tuple) and len(values) == 1)}
        for sentence in self.sentences:
            named = set(Template(sentence).get_identifiers())
            if not Template(sentence).is_valid() or not drawn <= named <= set(self.arguments):
                raise ValueError(
                    f"{sentence!r} must contain {', '.join(sorted(drawn)) or 'no arguments'}, each as $NAME, and no other argument"
                )
        return self


class ConstraintRule(Frozen):
    """Rules for one instruction."""

    forms: Many[ConstraintForm] = Field(min_length=1)
    """One of them is drawn."""
    excludes: Many[str] = ()
    """Instructions that it is never combined with."""


class ConstraintRules(Frozen):
    """Content of the file."""

    version: int = Field(ge=1)
    """For readers; identity uses the file's hash."""
    instructions: dict[str, ConstraintRule] = Field(min_length=1)
    """By IFEval's instruction ids."""

    @model_validator(mode="after")
    def _check_excludes(self) -> "ConstraintRules":
        for name, rule in self.instructions.items():
            unknown = [other for other in rule.excludes if other not in self.instructions or other == name]
            if unknown:
                raise ValueError(f"{name} excludes {unknown[0]}, which is not another instruction")
        return self

    @cached_property
    def incompatible(self) -> dict[str, frozenset[str]]:
        """Instruction → those that it is never combined with, itself included; exclusion is symmetric."""
        pairs = {(name, other) for name, rule in self.instructions.items() for other in rule.excludes}
        pairs |= {(other, name) for name, other in pairs}
        return {name: frozenset({name} | {other for one, other in pairs if one == name}) for name in self.instructions}


@cache
def load_constraints() -> ConstraintRules:
    return read_packaged(ConstraintRules, CONSTRAINTS, "configs/constraints.yaml")


class Constrain(Frozen):
    """Adds verifiable constraints to the last user turn of prompts, with IFEval's verifier for them: Tülu 3's IF-augmented prompts and
    RLVR-IFEval (Lambert et al. 2024, arXiv 2411.15124, §5.2 and §6.1). Uses no model: a hash of (seed, prompt id) draws the constraints."""

    min_constraints: int = Field(default=1, ge=1, le=MOST)
    """Minimum number of constraints per prompt."""
    max_constraints: int = Field(default=1, ge=1, le=MOST)
    """Maximum number of constraints per prompt; all numbers in the range are equally likely."""
    instructions: Many[str] | None = None
    """IFEval instruction ids to draw from, e.g. `punctuation:no_comma`; by default all 25, some of which suit few prompts
    (`detectable_format:constrained_response` asks for yes, no or maybe)."""
    score: Literal["all", "share"] = "all"
    """The verifier's score: `all`, 1 if all instructions are followed, else 0; `share`, the share of instructions followed."""
    min_rows: int = Field(default=1, ge=1)
    """The stage fails with fewer prompts."""
    seed: int = Field(default=0, ge=0)
    """Seed for the constraints, values and wordings of each prompt, drawn by hash."""

    @field_validator("instructions")
    @classmethod
    def _check_instructions(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        known = load_constraints().instructions
        for name in value or ():
            if name not in known:
                raise ValueError(f"instruction {not_one_of(name, [*known])}")
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError(f"instructions {list(value)} must name one or several distinct ones")
        return value

    @model_validator(mode="after")
    def _check_counts(self) -> "Constrain":
        if self.max_constraints < self.min_constraints:
            raise ValueError(f"max_constraints {self.max_constraints} is below min_constraints {self.min_constraints}: raise it")
        if self.instructions is not None and len(self.instructions) < self.min_constraints:
            raise ValueError(
                f"min_constraints is {self.min_constraints}, but instructions lists only {len(self.instructions)}: add some, or lower it"
            )
        return self

    @computed_field
    @cached_property
    def wording_sha256(self) -> str:
        """Hash of `configs/constraints.yaml`, i.e. of all wordings and values."""
        return hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
