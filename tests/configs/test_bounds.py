"""Each bounded number of each config: a value just outside is told with itself, its field, its line, the bound and the right direction."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from pedigree.configs.base.document import ConfigError, YamlDocument
from pedigree.configs.base.mistakes import validated
from pedigree.configs.base.naming import Model
from pedigree.configs.base.published import Published
from pedigree.configs.judging.constraining import ConstraintRules
from pedigree.configs.judging.synthesis import Writing
from pedigree.configs.language.execution import Execution
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.recipe_files import Reproduce
from pedigree.configs.methods.rubrics import Rubric
from pedigree.configs.rehearsal.families import ModelFamily
from pedigree.configs.rows.suite_forms import Form

TOPS = [kind.config for kind in KINDS.values()] + [
    Execution,
    Reproduce,
    Model,
    Published,
    ModelFamily,
    Rubric,
    Writing,
    ConstraintRules,
    Form,
]
OUTSIDE = {
    "minimum": ("at least", -1),
    "exclusiveMinimum": ("greater than", 0),
    "maximum": ("at most", 1),
    "exclusiveMaximum": ("less than", 0),
}
"""Bound in a JSON schema → (how it is told, the step from the bound to a value outside)."""


def models() -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {}
    todo: list[Any] = list(TOPS)
    while todo:
        one = todo.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            if one.__name__ not in found:
                found[one.__name__] = one
                todo += [field.annotation for field in one.model_fields.values()]
        else:
            todo += getattr(one, "__args__", ())
    return found


def bounded(schema: dict[str, Any]) -> Iterator[tuple[Any, str, str]]:
    """(value of a field, how its part outside is shown, the expected words) for each bound in the schema of the field."""
    for key, (words, step) in OUTSIDE.items():
        if key in schema:
            bound = schema[key]
            outside = bound + step if schema["type"] == "integer" else bound + step * 0.25
            yield outside, repr(outside), f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound}"
    for one in schema.get("anyOf", ()):
        yield from bounded(one)
    if "items" in schema:
        yield from (([value], shown, words) for value, shown, words in bounded(schema["items"]))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from (({"a": value}, shown, words) for value, shown, words in bounded(schema["additionalProperties"]))


CASES = [
    (model, field, *case)
    for _, model in sorted(models().items())
    for field, schema in model.model_json_schema().get("properties", {}).items()
    for case in bounded(schema)
]


def is_told(model: type[BaseModel], field: str, value: Any, shown: str, words: str) -> bool:
    document = YamlDocument("mine.yaml", {}, {("stages", "x"): 3, ("stages", "x", field): 7})
    with pytest.raises(ConfigError) as caught:
        validated(model, document, ("stages", "x"), {field: value})
    found = {str(one) for one in caught.value.problems if re.search(rf"stages\.x\.{field}\b.*must be", str(one))}
    expected = rf"mine\.yaml:7: stages\.x\.{field}.*must be {words}( or [a-z' ]+)?, not {re.escape(shown)}(,|$)"
    return len(found) == 1 and re.match(expected, found.pop()) is not None


def test_a_number_outside_its_bound_is_told_in_the_right_direction():
    assert len(CASES) > 150 and {"Sft", "Placement", "Optimizer", "Reproduce"} <= {case[0].__name__ for case in CASES}
    assert not [f"{case[0].__name__}.{case[1]}={case[2]}" for case in CASES if not is_told(*case)]
